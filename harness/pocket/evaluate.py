"""``python -m harness.pocket.evaluate``: what the pocket model can do, and what the levers cost it.

One engine on the CPU answers held-out sets, greedily, 16 requests at a time, under every arm: all
kept and routing off; fewer vision tokens, chosen by attention and at random; fewer experts. Answers
under one arm pair with those under another, question by question. What the batch is at each step
depends on timing, and so, a little, does what re-routing does: repeats differ in the last digits.

A run's folder is like a sweep's (see `harness.results.store`), and holds ``pocket.csv``, a row an arm
and task, and ``pocket.md``, the same in short with a verdict on each goal.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness.calibration import PROTECTION_FILE
from harness.cell import run_cell
from harness.datasets import ccbench
from harness.datasets.sample import Sample
from harness.doctor import has_bfloat16, read_cpu
from harness.endings import ended
from harness.engine.checkpoint import read_checkpoint
from harness.engine.engine import Engine, running
from harness.engine.server import EngineError
from harness.opening import begin, resume
from harness.plan import Cell, canonical_routing
from harness.pocket.evaluation.arms import (
    CC,
    CONCURRENCY,
    SEED,
    TASKS,
    Arm,
    Task,
    arms,
    settings_of,
)
from harness.pocket.evaluation.measured import Measured, measured
from harness.pocket.evaluation.table import Key, columns_text, line, markdown, to_csv
from harness.pocket.evaluation.verdicts import text, verdicts
from harness.pocket.generate import PASS_STEP, ensure_set
from harness.pocket.model import ensure
from harness.prepare import Prepared, prepare
from harness.results.errors import ResultsError
from harness.results.store import RunFolder, unpack_steps
from harness.results.summary import summarize
from harness.settings import Settings, WorkloadSettings
from harness.workload import Workload, load_workload, samples_hash

CSV_FILE, MARKDOWN_FILE, LOG_FILE = "pocket.csv", "pocket.md", "engine-0.log"
OK, TROUBLE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: all was asked, whether or not goals are met; an engine or a cell failed; nothing was
started; Ctrl-C."""


@dataclass(frozen=True)
class Entry:
    """One arm on one task, and the cell that measures it."""

    arm: Arm
    task: Task
    cell: Cell

    @property
    def key(self) -> Key:
        """Its place in the table."""
        return self.arm.name, self.task.name


# -- what is asked ----------------------------------------------------------------------------------


def balanced(path: Path, *, questions: int, seed: int) -> tuple[Sample, ...]:
    """One row of every question of a CCBench file, so chosen that each letter is as often right.

    Args:
        path: the file; every question has one pass for each letter.
        questions: how many it is to take.
        seed: draws the questions, and which of them has which letter.

    Raises:
        ValueError: the file cannot be read, or holds too few.
    """
    rows = ccbench.load(path, samples=questions * len(_LETTERS), seed=seed, circular=True)
    wanted = [_LETTERS[i % len(_LETTERS)] for i in range(questions)]
    random.Random(seed).shuffle(wanted)
    passes = [rows[i : i + len(_LETTERS)] for i in range(0, len(rows), len(_LETTERS))]
    return tuple(
        next(row for row in own if row.references == (letter,))
        for own, letter in zip(passes, wanted, strict=True)
    )


_LETTERS = "ABCD"


def entries(
    n: int, *, quick: bool, model: Path | None, dtype: str
) -> tuple[Prepared, tuple[Entry, ...]]:
    """Everything that is to be asked, checked, in the order of the table; draws sets on first use.

    Raises:
        ValueError: the model cannot be served or `n` is out of range; the message says why.
        OSError: a set cannot be written.
    """
    folder = read_checkpoint(model).path if model is not None else ensure()
    protection = folder / PROTECTION_FILE
    data = {t: ensure_set(t.task, n, SEED, band=t.band) for t in TASKS}
    pairs = [
        (arm, task, settings_of(arm, task, n=n, model=model, data=data[task], dtype=dtype))
        for arm in arms(quick=quick, protection=protection if protection.is_file() else None)
        for task in arm.tasks
    ]
    loaded: dict[WorkloadSettings, Workload] = {}
    for _, task, settings in pairs:
        if settings.workload not in loaded:
            loaded[settings.workload] = _workload(task, settings.workload)
    prepared = prepare([s for _, _, s in pairs], loaded)
    cells = {c.settings: c for c in prepared.cells}
    return prepared, tuple(
        Entry(arm, task, cells[_canonical(s, prepared)]) for arm, task, s in pairs
    )


def _workload(task: Task, settings: WorkloadSettings) -> Workload:
    if task is not CC:
        return load_workload(settings, 0)
    assert settings.path is not None
    samples = balanced(Path(settings.path), questions=settings.samples, seed=settings.seed)
    return Workload(samples, (), samples_hash(samples))


def _canonical(settings: Settings, prepared: Prepared) -> Settings:
    """As `make_cells` writes them."""
    routing = canonical_routing(settings.routing, prepared.top_k(settings))
    return dataclasses.replace(settings, routing=routing)


# -- asking -----------------------------------------------------------------------------------------


class Evaluation:
    """One evaluation under way: what is found. The CSV holds all of it at any time."""

    def __init__(
        self, run: RunFolder, prepared: Prepared, wanted: Sequence[Entry], finished: frozenset[str]
    ) -> None:
        self.run, self.prepared, self.wanted = run, prepared, wanted
        self.found: dict[Key, Measured] = {}
        self.failures: list[str] = []
        for entry in wanted:
            if entry.cell.id in finished:
                self._take(entry)

    def ask_all(self) -> None:
        """Ask whatever is not there yet.

        Raises:
            EngineError: the engine does not start, or died.
            KeyboardInterrupt: finished cells are kept.
        """
        waiting = [e for e in self.wanted if e.key not in self.found]
        say(f"{len(waiting)} of {len(self.wanted)} arms × tasks to ask")
        if not waiting:
            return
        first = waiting[0].cell
        started = time.monotonic()
        with running(
            first.settings.engine,
            self.prepared.checkpoint(first),
            self.run.path / LOG_FILE,
            [e.cell.settings for e in waiting],
        ) as engine:
            say(f"engine ready after {time.monotonic() - started:.0f} s")
            for number, entry in enumerate(waiting, 1):
                self._ask(entry, engine)
                measured = self.found.get(entry.key)
                said = (
                    f"{' · '.join(entry.key)}: failed" if measured is None else line(measured.row)
                )
                say(f"{number}/{len(waiting)}  {said}")

    def _ask(self, entry: Entry, engine: Engine) -> None:
        cell = entry.cell
        workload = self.prepared.workloads[cell.settings.workload]
        similarity = self.prepared.similarity.get(cell.id)
        outcome = asyncio.run(run_cell(cell, engine, workload, similarity, lambda _: None))
        if outcome.stopped == "interrupted":
            raise KeyboardInterrupt
        if outcome.stopped is not None:
            raise EngineError(engine.failure() or outcome.stopped)
        if outcome.failure is not None:
            self.failures.append(f"{' · '.join(entry.key)}: {outcome.failure}")
            return
        self.run.write_cell(
            cell.id,
            config=cell.settings.to_tree(),
            schedule=outcome.schedule.to_json(),
            records=outcome.records,
            steps=outcome.steps,
            summary=summarize(
                cell,
                outcome.records,
                top_k=self.prepared.top_k(cell.settings),
                steps=None if outcome.steps is None else unpack_steps(outcome.steps),
            ),
        )
        self._take(entry)
        self.run.write_text(CSV_FILE, to_csv(m.row for m in self.in_order().values()))

    def _take(self, entry: Entry) -> None:
        """Read back what a finished cell left: the table is made of what is on disk."""
        cell = entry.cell
        self.found[entry.key] = measured(
            entry.arm,
            entry.task,
            cell.settings,
            self.run.records(cell.id),
            self.prepared.workloads[cell.settings.workload].samples,
            self.run.summary(cell.id),
        )

    def in_order(self) -> Mapping[Key, Measured]:
        """What is found, in the order of the table."""
        return {e.key: self.found[e.key] for e in self.wanted if e.key in self.found}


def report(found: Mapping[Key, Measured]) -> str:
    """Tables and verdicts, as Markdown."""
    return f"{markdown(found)}\n\n{text(verdicts(found))}\n"


def say(words: str) -> None:
    """A line of progress; results go to standard output."""
    print(words, file=sys.stderr, flush=True)


# -- command line -----------------------------------------------------------------------------------


def evaluate(
    n: int, *, quick: bool, model: Path | None, out: Path | None, dtype: str = "bfloat16"
) -> int:
    """Ask, write and print everything; gives the exit status."""
    started = time.monotonic()
    try:
        prepared, wanted = entries(n, quick=quick, model=model, dtype=dtype)
        run, finished = _open(prepared, out)
    except (ValueError, ResultsError, OSError) as error:
        say(f"error: {error}")
        return BAD_INPUT
    evaluation, status = Evaluation(run, prepared, wanted, finished), OK
    try:
        evaluation.ask_all()
    except EngineError as error:
        evaluation.failures.append(str(error))
    except KeyboardInterrupt:
        evaluation.failures.append(f"interrupted; go on with --out {run.path}")
        status = INTERRUPTED
    said = report(evaluation.in_order())
    run.write_text(MARKDOWN_FILE, said)
    print(said, flush=True)
    for failure in evaluation.failures:
        say(f"error: {failure}")
    say(f"{run.path / CSV_FILE} ({time.monotonic() - started:.0f} s)")
    return TROUBLE if evaluation.failures and status == OK else status


def _open(prepared: Prepared, out: Path | None) -> tuple[RunFolder, frozenset[str]]:
    if out is not None and (out / "plan.json").is_file():
        return resume(out, prepared, asked=f"--out {out}")
    now = datetime.now().astimezone()
    run = RunFolder.create(Path("runs"), "pocket", now) if out is None else RunFolder.create_at(out)
    begin(run, prepared, name="pocket", argv=sys.argv)
    return run, frozenset()


def main() -> int:
    """Entry point; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.pocket.evaluate",
        description=f"Asks a model the held-out sets of the pocket world, {CONCURRENCY} questions at "
        "a time, with everything kept, with fewer vision tokens and with fewer experts.",
        epilog=f"columns of {CSV_FILE}:\n{columns_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, help="a checkpoint folder (the bundled model)")
    add(
        "--out", type=Path, help="a new folder, or that of an unfinished run to go on with (runs/…)"
    )
    add("--n", type=int, default=200, help="questions of each set (200)")
    add("--quick", action="store_true", help="about a third of the arms")
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="that the engine computes in (auto: bfloat16 where the processor has it)",
    )
    args = parser.parse_args()
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if has_bfloat16(read_cpu()[1]) else "float32"
        say(f"the engine computes in {dtype}")
    if not 1 <= args.n <= PASS_STEP:
        parser.error(f"--n {args.n}: takes a whole number from 1 to {PASS_STEP}")
    model = None if args.model is None else args.model.resolve()
    return evaluate(args.n, quick=args.quick, model=model, out=args.out, dtype=dtype)


if __name__ == "__main__":
    sys.exit(ended(main, "finished cells are kept"))
