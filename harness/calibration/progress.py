"""Lines on stderr that say how far a long calibration is, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

EVERY_S = 10.0
"""Between lines of a log; on a terminal the one line is rewritten each second."""


def duration(seconds: float) -> str:
    """In the two largest units: ``42 s``, ``7 min 05 s``, ``3 h 20 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def remaining(elapsed: float, start: float, done: float, total: float) -> float | None:
    """Time left [s] at the speed so far; None while nothing has been done.

    Args:
        elapsed: since `start` of `total` was done, to `done` [s].
        start, done, total: amounts of work in one unit, in this order of size.
    """
    if done <= start:
        return None
    return elapsed * (total - done) / (done - start)


class Reporter:
    """Says from time to time how much of some work is done."""

    def __init__(
        self,
        label: str,
        total: float,
        start: float = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` and `start`, what was done before this process, are in any unit of work."""
        self._label, self._total, self._start = label, total, start
        self._stream = stream or sys.stderr
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._begun = self._said = clock()
        self._open = False

    def at(self, done: float, words: str) -> None:
        """`done` of the total is done, in other words `words`; a line if it is time for one."""
        now = self._clock()
        last = done >= self._total
        if not last and now - self._said < (1.0 if self._terminal else EVERY_S):
            return
        self._said = now
        left = remaining(now - self._begun, self._start, done, self._total)
        line = f"{self._label}: {words}, {duration(now - self._begun)}"
        if not last and left is not None:
            line += f", about {duration(left)} left"
        if self._terminal:
            self._stream.write(f"\r{line}\x1b[K")
            self._open = True
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line that a terminal has been rewriting."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False
