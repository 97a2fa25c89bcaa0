"""What does not fit is refused before it begins, with what takes how much."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.calibration import memory
from harness.calibration.memory import Need, check_fits, free_bytes, size
from harness.calibration.similarity import CalibrationError

NEED = Need(model=60_000, sums=100, work=5_000)


def test_what_has_to_fit_where() -> None:
    check_fits(NEED, "cpu", {"cpu": 65_100})
    with pytest.raises(
        CalibrationError,
        match=r"^device=cpu: cpu has 65.1 kB of memory free, and this takes 65.1 kB: model 60 kB, "
        r"sums 100 B, work 5 kB; take dtype=bfloat16",
    ):
        check_fits(NEED, "cpu", {"cpu": 65_099})
    check_fits(NEED, "cuda", {"cpu": 60_100, "cuda": 65_000})
    with pytest.raises(CalibrationError, match="cuda has 65 kB of memory free"):
        check_fits(NEED, "cuda", {"cpu": 60_100, "cuda": 64_999})
    with pytest.raises(CalibrationError, match=r"cpu has 60\.1 kB of memory free"):
        check_fits(NEED, "cuda", {"cpu": 60_099, "cuda": 65_000})
    check_fits(NEED, "cpu", {"cpu": None})


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (61_064_000_000, "61.1 GB"), (2e12, "2 TB")],
)
def test_sizes(count: float, words: str) -> None:
    assert size(count) == words


def test_free_memory_is_what_the_system_and_the_container_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert free_bytes("cpu") is None
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")
    assert free_bytes("cpu") == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    assert free_bytes("cpu") == 8000 * 1024
    (tmp_path / "memory.max").write_text("5000000\n")
    assert free_bytes("cpu") == 2_000_000
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 500000\n")
    assert free_bytes("cpu") == 2_500_000
