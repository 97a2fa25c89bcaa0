"""The whole way through, as a user runs it: `python -m harness -m …` on a real engine."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def command(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "harness", *overrides, f"report.folder={folder}"]


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_multirun_shares_one_engine_and_its_levers_do_what_they_say(tmp_path: Path) -> None:
    done = subprocess.run(
        command(
            tmp_path,
            "-m",
            "vision.retain_ratio=1.0,0.6",
            "routing.primary_experts=8,2",
            "routing.similarity_threshold=0.2",
            "load.qps=8",
            "load.requests=16",
            "load.warmup_requests=2",
            "workload.samples=16",
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "latest"
    table = rows(run)
    assert [r["status"] for r in table] == ["ok"] * 4
    assert [f.name for f in sorted(run.glob("engine-*.log"))] == ["engine-0.log"]
    starts = [line for line in (run / "engine-0.log").read_text().splitlines() if line[:2] == "$ "]
    assert len(starts) == 1

    for row in table:
        ratio = Fraction(row["retain_ratio"])
        lines = (run / "cells" / row["cell"] / "records.jsonl").read_text().splitlines()
        for record in map(json.loads, lines):
            before = sum(i["before"] for i in record["images"])
            assert sum(i["after"] for i in record["images"]) == int(ratio * before)
        assert int(row["good"]) == 16
    for row in table:
        fewer = float(row["experts_after"]) < 0.9 * float(row["experts_before"])
        assert fewer == (row["primary_experts"] == "2")
    assert {float(r["slots_moved"]) > 0 for r in table if r["primary_experts"] == "2"} == {True}
    assert {float(r["slots_moved"]) for r in table if r["primary_experts"] == "off"} == {0.0}
    assert (run / "report.html").stat().st_size > 100_000

    # Everything derived can be derived again, to the byte.
    before = (run / "results.csv").read_bytes()
    again = subprocess.run(
        [sys.executable, "-m", "harness.report", str(run)], capture_output=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert (run / "results.csv").read_bytes() == before


def test_a_killed_server_ends_the_sweep_and_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(
            tmp_path,
            "-m",
            "vision.retain_ratio=1.0,0.5",
            "load.qps=4",
            "load.requests=200",
            "load.warmup_requests=1",
            "workload.samples=8",
        ),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if "levers verified" in line:
            break
    else:
        pytest.fail("the engine never came up: " + "".join(said))
    time.sleep(8)  # into the measured load
    family = descendants(process.pid)
    server = next(
        p
        for p in family
        if b"api_server" in Path(f"/proc/{p}/cmdline").read_bytes()
        and b"warden" not in Path(f"/proc/{p}/cmdline").read_bytes()
    )
    assert len(family) >= 3, "a warden, a server and an engine behind it"
    os.kill(server, signal.SIGKILL)
    killed = time.monotonic()
    said += process.stderr.readlines()
    assert process.wait(60) == 1
    assert time.monotonic() - killed < 60
    text = "".join(said)
    assert "the engine ended with status 137" in text
    assert "killed from outside (SIGKILL)" in text
    assert not [p for p in family if alive(p)]
    first, second = rows(tmp_path / "latest")
    assert first["status"] == "failed" and "status 137" in first["failure"]
    assert second["status"] == "failed" and second["failure"].startswith("not run: ")
    assert 0 < int(first["failed"]) <= 200


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("vision.retian_ratio=0.5", "did you mean vision.retain_ratio"),
        ("vision.retain_ratio=2", "takes a number in (0, 1]"),
        ("vision.layer=9", "vision.layer=9: the vision encoder has 6 layers; takes -6 to 5"),
        ("routing.primary_experts=9", "gives each token 8 experts"),
        ("model.path=/nowhere", "no such folder"),
        ("workload.path=/nowhere.json", "/nowhere.json: cannot be read"),
        ("model.name=${nope}", "nope"),
        ("report.folder=/dev/null/x", "/dev/null"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, override: str, words: str
) -> None:
    overrides = [f"report.folder={tmp_path}/runs", override]
    if override.startswith("report.folder"):
        overrides = [override]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *overrides], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/2*"))
