"""`plan.json`: what a run set out to do, and where. The single place that knows its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from harness.plan import Cell
from harness.results.errors import ResultsError
from harness.results.store import RunFolder
from harness.settings import Settings, SettingsError

SCHEMA = 1


@dataclass(frozen=True)
class Plan:
    """What a report needs of a plan.

    Attributes:
        name: the sweep's name.
        title: heading of the report.
        created: when the run began, ISO 8601.
        top_k: cell id → experts per token of its model; `None` if it has none or it is not known.
        cells: in the order in which they run.
        provenance: what `harness.results.provenance.collect` found.
        notes: whatever else the run wrote down, by name.
    """

    name: str
    title: str
    created: str
    top_k: Mapping[str, int | None]
    cells: tuple[Cell, ...]
    provenance: Mapping[str, Any]
    notes: Mapping[str, Any]


def plan_tree(
    *,
    name: str,
    created: datetime,
    cells: Sequence[Cell],
    top_k: Callable[[Settings], int | None],
    provenance: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    """The tree for `RunFolder.write_plan`.

    Args:
        name: the sweep's name.
        created: when the run began.
        cells: what will run, in order; at least one.
        top_k: experts per token of the model that a cell's settings name, as for `make_cells`.
        provenance: from `harness.results.provenance.collect`.
        notes: further facts to keep, name → plain value or tree (content hashes, the cache policy).
    """
    return {
        "schema": SCHEMA,
        "name": name,
        "title": cells[0].settings.report.title,
        "created": created.isoformat(timespec="seconds"),
        "provenance": dict(provenance),
        "notes": dict(notes),
        "cells": [
            {"id": c.id, "top_k": top_k(c.settings), "settings": c.settings.to_tree()}
            for c in cells
        ],
    }


def read_plan(run: RunFolder) -> Plan:
    """The plan of `run`.

    Raises:
        ResultsError: it is damaged, or was written by a version with other settings.
    """
    tree, source = run.plan(), run.path / "plan.json"
    if tree.get("schema") != SCHEMA:
        raise ResultsError(
            f"{source}: schema {tree.get('schema')!r}; this program reads schema {SCHEMA}"
        )
    fields = {key: tree.get(key) for key in ("provenance", "notes")}
    if not all(isinstance(v, Mapping) for v in fields.values()):
        raise ResultsError(f"{source}: damaged at `provenance` or `notes`")
    entries = dict(zip(run.planned_ids(), tree.get("cells", []), strict=True))
    top_k = {i: entry.get("top_k") for i, entry in entries.items()}
    if not all(k is None or isinstance(k, int) for k in top_k.values()):
        raise ResultsError(f"{source}: damaged at `top_k`")
    return Plan(
        name=str(tree.get("name", "")),
        title=str(tree.get("title", "")),
        created=str(tree.get("created", "")),
        top_k=top_k,
        cells=tuple(
            read_cell(i, entry.get("settings"), str(source)) for i, entry in entries.items()
        ),
        provenance=fields["provenance"] or {},
        notes=fields["notes"] or {},
    )


def read_cell(cell_id: str, settings: Any, source: str) -> Cell:
    """A cell from its id and the tree of its settings.

    Raises:
        ResultsError: the settings are not those of this version; names `source` and the keys.
    """
    try:
        return Cell(cell_id, Settings.from_tree(settings if isinstance(settings, Mapping) else {}))
    except SettingsError as error:
        findings = str(error).replace("\n", "; ")
        raise ResultsError(f"{source}: settings of cell {cell_id}: {findings}") from None
