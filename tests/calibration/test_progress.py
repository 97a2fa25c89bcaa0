"""Progress is said from time to time, with an estimate that counts only what this process did."""

from __future__ import annotations

import io

import pytest

from harness.calibration.progress import Reporter, duration, remaining


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_time_left_at_the_speed_so_far() -> None:
    assert remaining(10, start=0, done=5, total=20) == 30
    assert remaining(10, start=50, done=75, total=100) == 10
    assert remaining(10, start=50, done=50, total=100) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (61, "1 min 01 s"), (3600, "1 h 00 min"), (-1, "0 s")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    now, log = [100.0], io.StringIO()
    reporter = Reporter("work", total=8, start=2, stream=log, clock=lambda: now[0])
    for done in range(3, 9):
        now[0] += 4
        reporter.at(done, f"{done} of 8")
    reporter.close()
    assert log.getvalue().splitlines() == [
        "work: 5 of 8, 12 s, about 12 s left",
        "work: 8 of 8, 24 s",
    ]


def test_a_terminal_has_one_line_rewritten() -> None:
    now, terminal = [0.0], Terminal()
    reporter = Reporter("work", total=3, stream=terminal, clock=lambda: now[0])
    for done in (1, 2, 3):
        now[0] += 1
        reporter.at(done, f"{done}")
    reporter.close()
    reporter.close()
    lines = ["work: 1, 1 s, about 2 s left", "work: 2, 2 s, about 1 s left", "work: 3, 3 s"]
    assert terminal.getvalue() == "".join(f"\r{line}\x1b[K" for line in lines) + "\n"
