"""From a run's records to its rows: the offline half of every result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from harness.load.record import RequestRecord
from harness.plan import Cell
from harness.results.plan_file import Plan, read_cell, read_plan
from harness.results.store import RunFolder
from harness.results.summary import not_run, summarize


@dataclass(frozen=True)
class CellResult:
    """One cell, derived again from what is on disk.

    Attributes:
        cell: what was to run.
        records: what happened; empty if nothing did.
        row: its row of `results.csv`.
    """

    cell: Cell
    records: tuple[RequestRecord, ...]
    row: dict[str, Any]


Derived: TypeAlias = tuple[Plan, tuple[CellResult, ...]]


def derive(run: RunFolder) -> Derived:
    """The plan, and a result for each cell: those planned in their order, then any others.

    Raises:
        ResultsError: a file is missing, damaged, or of another version.
    """
    plan = read_plan(run)
    stored = set(run.cell_ids())
    results = [
        _stored(run, c.id, plan.top_k[c.id])
        if c.id in stored
        else CellResult(c, (), not_run(c, top_k=plan.top_k[c.id]))
        for c in plan.cells
    ]
    planned = {c.id for c in plan.cells}
    results += [_stored(run, i, None) for i in run.cell_ids() if i not in planned]
    return plan, tuple(results)


def _stored(run: RunFolder, cell_id: str, top_k: int | None) -> CellResult:
    source = str(run.path / "cells" / cell_id / "config.json")
    cell = read_cell(cell_id, run.config(cell_id), source)
    failure = run.summary(cell_id).get("failure")
    records = run.records(cell_id)
    row = summarize(
        cell,
        records,
        top_k=top_k,
        failure=None if failure is None else str(failure),
        steps=run.steps(cell_id),
    )
    return CellResult(cell, records, row)
