"""A sweep from settings to a report: one folder, one engine start, every cell, whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cell import CellOutcome, first_line, run_cell
from harness.engine.engine import Engine, running
from harness.engine.server import EngineError, tail
from harness.load.schedule import draw
from harness.opening import begin, resume
from harness.plan import Cell, engine_of
from harness.prepare import Prepared, prepare
from harness.progress import SweepProgress
from harness.results.errors import ResultsError
from harness.results.report import write_report
from harness.results.store import RunFolder, unpack_steps
from harness.results.summary import not_run, summarize
from harness.results.table import terminal_table, write_csv
from harness.settings import Settings

OK, SOME_FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
"""Exit statuses: all cells ran; some did not; nothing was started; Ctrl-C; SIGTERM."""


def run_sweep(settings: Sequence[Settings], argv: Sequence[str]) -> int:
    """Run all cells of `settings` and leave a run folder; gives the process's exit status.

    Args:
        settings: one for each composed configuration, checked.
        argv: how it was asked for, for the plan.
    """
    console = Console(stderr=True)
    try:
        prepared = prepare(settings)
        run, finished = _open_run(prepared, settings[0], argv)
    except (ValueError, ResultsError, OSError) as e:
        console.print(f"error: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        return BAD_INPUT
    sweep = _Sweep(prepared, run, finished, console)
    with _terminations() as terminated:
        try:
            sweep.run()
        except KeyboardInterrupt:
            sweep.problems.append("interrupted; finished cells are kept")
            sweep.status = TERMINATED if terminated else INTERRUPTED
        finally:
            try:
                sweep.write_results()
            except KeyboardInterrupt:
                # No record is lost; only what is made from them.
                sweep.problems.append(
                    "interrupted again; `python -m harness.report` makes the rest"
                )
                sweep.status = INTERRUPTED
    return sweep.close()


class _Sweep:
    """The state of one sweep; every cell ends up with a row."""

    def __init__(
        self, prepared: Prepared, run: RunFolder, finished: frozenset[str], console: Console
    ) -> None:
        self.prepared, self.run_folder, self.console = prepared, run, console
        self.finished = finished
        self.rows: dict[str, dict[str, Any]] = {i: dict(run.summary(i)) for i in finished}
        self.problems: list[str] = []
        self.status = OK

    def run(self) -> None:
        """All cells, engine by engine."""
        cells = self.prepared.cells
        with SweepProgress(cells, self.console) as progress:
            for number, (_, group) in enumerate(groupby(cells, key=engine_of)):
                own = list(group)
                for cell in own:
                    if cell.id in self.finished:
                        progress.skip(cell)
                waiting = [c for c in own if c.id not in self.finished]
                if waiting:
                    self._run_on_one_engine(waiting, number, progress)

    def _run_on_one_engine(
        self, cells: Sequence[Cell], number: int, progress: SweepProgress
    ) -> None:
        log = self.run_folder.path / f"engine-{number}.log"
        settings = cells[0].settings.engine
        checkpoint = self.prepared.checkpoint(cells[0])
        done = 0
        try:
            progress.say(f"engine: starting, log in {_near(log)}")
            with running(
                settings, checkpoint, log, [c.settings for c in cells], progress.engine
            ) as engine:
                progress.say("engine: ready, levers verified" if engine.hooks else "engine: ready")
                for cell in cells:
                    outcome = self._run_cell(cell, engine, progress)
                    done += 1
                    if outcome.stopped == "interrupted":
                        raise KeyboardInterrupt
                    if outcome.stopped is not None or engine.failure() is not None:
                        raise EngineError(
                            engine.failure()
                            or f"{outcome.stopped}\nlast lines of {_near(log)}:\n{tail(log)}"
                        )
        except EngineError as e:
            self.problems.append(str(e))
            for cell in cells[done:]:
                self._write_unrun(cell, f"not run: {first_line(str(e))}")

    def _write_unrun(self, cell: Cell, failure: str) -> None:
        """Keep the reason why a cell never ran."""
        samples = self.prepared.workloads[cell.settings.workload].samples
        schedule = draw(cell.settings.load, len(samples))
        self._write_cell(cell, CellOutcome(schedule, (), None, failure, None))

    def _run_cell(self, cell: Cell, engine: Engine, progress: SweepProgress) -> CellOutcome:
        progress.begin(cell)
        outcome = asyncio.run(
            run_cell(
                cell,
                engine,
                self.prepared.workloads[cell.settings.workload],
                self.prepared.similarity.get(cell.id),
                progress.requests,
            )
        )
        row = self._write_cell(cell, outcome)
        progress.end(cell, row["status"], row["failure"] or row["first_error"])
        return outcome

    def _write_cell(self, cell: Cell, outcome: CellOutcome) -> dict[str, Any]:
        """Put a cell's folder and row in place; gives the row."""
        row = summarize(
            cell,
            outcome.records,
            top_k=self.prepared.top_k(cell.settings),
            failure=outcome.failure,
            steps=None if outcome.steps is None else unpack_steps(outcome.steps),
        )
        self.run_folder.write_cell(
            cell.id,
            config=cell.settings.to_tree(),
            schedule=outcome.schedule.to_json(),
            records=outcome.records,
            steps=outcome.steps,
            summary=row,
        )
        self.rows[cell.id] = row
        self._write_csv()
        return row

    def _all_rows(self) -> list[dict[str, Any]]:
        return [
            self.rows.get(c.id) or not_run(c, top_k=self.prepared.top_k(c.settings))
            for c in self.prepared.cells
        ]

    def _write_csv(self) -> None:
        write_csv(self.run_folder, self._all_rows())

    def write_results(self) -> None:
        """`results.csv` and `report.html` from all that is there, and `latest`."""
        self._write_csv()
        write_report(self.run_folder)
        self.run_folder.point_latest()

    def close(self) -> int:
        """Say how it went; gives the exit status."""
        rows = self._all_rows()
        self.console.print(terminal_table(rows))
        for problem in self.problems:
            self.console.print(
                f"error: {problem}", style="red", markup=False, highlight=False, soft_wrap=True
            )
        try:
            print(f"results: {_near(self.run_folder.path / 'results.csv')}", flush=True)
            print(f"report:  {_near(self.run_folder.path / 'report.html')}", flush=True)
        except BrokenPipeError:
            # Whoever read this has gone; the interpreter would complain again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if self.status == OK and (self.problems or any(r["status"] != "ok" for r in rows)):
            return SOME_FAILED
        return self.status


def _open_run(
    prepared: Prepared, settings: Settings, argv: Sequence[str]
) -> tuple[RunFolder, frozenset[str]]:
    """The run's folder with its plan, and the cells that it has finished already."""
    report = settings.report
    if report.resume is not None:
        return resume(Path(report.resume), prepared, asked=f"report.resume={report.resume}")
    run = RunFolder.create(Path(report.folder), report.name, datetime.now().astimezone())
    begin(run, prepared, name=report.name, argv=argv)
    return run, frozenset()


def _near(path: Path) -> str:
    """A path as it is reached from here, or in full if it lies elsewhere."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class _terminations:
    """While open, SIGTERM ends the sweep as Ctrl-C does; the value is true once it came."""

    def __enter__(self) -> list[int]:
        self._came: list[int] = []
        self._before = signal.signal(signal.SIGTERM, self._on_term)
        return self._came

    def _on_term(self, number: int, frame: object) -> None:
        self._came.append(number)
        signal.raise_signal(signal.SIGINT)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
