"""A command that is told to stop tidies up and says one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_generate_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, status: int, said: str
) -> None:
    command = [sys.executable, "-m", "harness.pocket.generate", "--task", "ocr", "--n", "100000",
               "--seed", "1", "--out", str(tmp_path / "set")]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    try:
        limit = time.monotonic() + 60
        while not any(tmp_path.glob(".set.*/*/*/*.png")):
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == status
    assert errors == f"{said}; nothing was written\n"
    assert list(tmp_path.iterdir()) == []
