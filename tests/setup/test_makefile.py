"""The Makefile's targets: what they would run, without running it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def _make(*arguments: str, cwd: Path = ROOT) -> str:
    # A make that runs this test leaves its own flags behind.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "ARGS")}
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_without_a_target_every_target_is_listed():
    output = _make()
    assert output == _make("help")
    for target in ("sweep", "report", "doctor", "test", "gpu-check", "lint", "clean", "distclean"):
        assert f"\n  {target} " in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["bootstrap.py --extra cpu", "-m harness experiment=sweep"]),
        (["ENGINE=gpu"], ["bootstrap.py --extra gpu", "experiment=sweep engine=gpu"]),
        (["ENGINE=remote", "ARGS=engine.url=http://h"], ["engine=remote engine.url=http://h"]),
        (["ARGS=load.qps=1,2"], ["experiment=sweep  load.qps=1,2"]),
    ],
)
def test_sweep(arguments, expected):
    output = _make("-n", "sweep", *arguments)
    for text in expected:
        assert text in output


def test_the_gpu_check_runs_only_what_needs_one():
    assert "pytest -m gpu -k tensor" in _make("-n", "gpu-check", "ARGS=-k tensor")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_without_a_gpu_its_check_says_so_and_fails():
    done = subprocess.run(
        ["make", "gpu-check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0 and "no NVIDIA GPU here" in done.stderr


def test_a_remote_engine_installs_none():
    assert "--extra" not in _make("-n", "sweep", "ENGINE=remote")


def test_clean_keeps_runs_and_environment(tmp_path: Path):
    project = tmp_path / "my project"
    kept = ["runs/one/results.csv", ".venv/lib/__pycache__/x.pyc", "harness/a.py"]
    gone = ["build/x", "dist/x.whl", "harness/__pycache__/a.pyc", ".mypy_cache/x"]
    for name in kept + gone:
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copy(ROOT / "Makefile", project)
    _make("clean", cwd=project)
    assert all((project / name).exists() for name in kept)
    assert not any((project / name).exists() for name in gone)
    _make("distclean", cwd=project)
    assert not (project / ".venv").exists()
    assert (project / kept[0]).exists()
