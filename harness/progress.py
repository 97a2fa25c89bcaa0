"""What a person sees while a sweep runs: which cell, how many requests, time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from harness.load.generator import Progress as LoadProgress
from harness.plan import Cell
from harness.settings import shown_k


def expected_s(cell: Cell) -> float:
    """Time that a cell's load alone takes if the engine keeps up [s]; a closed loop is a guess."""
    load = cell.settings.load
    return load.requests / load.qps if load.qps is not None else float(load.requests)


def time_left_s(cells: Sequence[Cell], done_s: Sequence[float], elapsed_s: float) -> float:
    """Time left of a sweep [s].

    Args:
        cells: all of them, in order.
        done_s: how long the first ones took.
        elapsed_s: how long the running one has taken.

    Each cell is expected to take its load's length and what finished cells took beyond theirs.
    """
    extra = [took - expected_s(c) for c, took in zip(cells, done_s, strict=False)]
    overhead = sum(extra) / len(extra) if extra else 3.0
    rest = [max(expected_s(c) + overhead, 0.0) for c in cells[len(done_s) :]]
    return max(sum(rest) - elapsed_s, 0.0)


def words(cell: Cell) -> str:
    """A cell in a few words."""
    s = cell.settings
    routing = s.routing
    k = "off" if routing.primary_experts is None else f"{routing.policy} {shown_k(routing)}"
    load = f"qps {s.load.qps:g}" if s.load.qps is not None else f"{s.load.concurrency} at a time"
    v = s.vision
    by = f" by {v.policy}" if v.prunes and v.policy != "visionzip" else ""
    return f"retain {v.retain_ratio if v.prunes else 1:g}{by} · K {k} · {load}"


class SweepProgress:
    """Bars on a terminal; a line for each cell elsewhere (a log, CI)."""

    def __init__(self, cells: Sequence[Cell], console: Console) -> None:
        self._cells, self._console = cells, console
        self._done_s: list[float] = []
        self._started = time.monotonic()
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._cell_bar = self._bars.add_task("cells", total=len(cells), note="")
        self._request_bar = self._bars.add_task("requests", total=None, note="", visible=False)
        self._failed = 0

    def __enter__(self) -> SweepProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def engine(self, waited_s: float) -> None:
        """The engine is being waited for."""
        self._bars.update(self._cell_bar, note=f"engine starting, {waited_s:.0f} s")

    def skip(self, cell: Cell) -> None:
        """A cell's results are there already."""
        self._done_s.append(expected_s(cell))
        self._bars.advance(self._cell_bar)

    def begin(self, cell: Cell) -> None:
        """A cell starts."""
        self._started, self._failed = time.monotonic(), 0
        self._bars.update(
            self._request_bar,
            description=words(cell),
            total=cell.settings.load.requests,
            completed=0,
            visible=True,
            note="warm-up",
        )
        self._note()

    def requests(self, load: LoadProgress) -> None:
        """The cell's load moved on."""
        failed = f", {load.failed} failed" if load.failed else ""
        self._bars.update(self._request_bar, completed=load.done, note=f"{load.sent} sent{failed}")
        self._note()

    def end(self, cell: Cell, status: str, failure: str | None) -> None:
        """A cell is over."""
        took = time.monotonic() - self._started
        self._done_s.append(took)
        self._bars.advance(self._cell_bar)
        self._note()
        number = f"{len(self._done_s)}/{len(self._cells)}"
        reason = f": {failure.splitlines()[0]}" if failure else ""
        left = time_left_s(self._cells, self._done_s, 0.0)
        self._console.print(
            f"cell {number}  {words(cell)}  {status}{reason}  ({took:.0f} s, {clock(left)} left)",
            style=None if status == "ok" else "red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def _note(self) -> None:
        elapsed = time.monotonic() - self._started if len(self._done_s) < len(self._cells) else 0.0
        left = time_left_s(self._cells, self._done_s, elapsed)
        self._bars.update(self._cell_bar, note=f"{clock(left)} left")


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
