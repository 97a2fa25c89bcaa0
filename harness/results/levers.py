"""What differs between the cells of a run, seen as axes for charts and as lists of settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.plan import Cell

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """A column that cells can differ in.

    Attributes:
        column: its name in the CSV.
        title: what an axis or a legend calls it, with its unit.
        measured: whether distances between its values mean something (else they are only ranked).
    """

    column: str
    title: str
    measured: bool = False


AXES: tuple[Axis, ...] = (
    Axis("retain_ratio", "Retain ratio", measured=True),
    Axis("primary_experts", "K [experts]"),
    Axis("qps", "QPS [requests/s]", measured=True),
    Axis("concurrency", "Concurrency [requests]", measured=True),
    Axis("similarity_threshold", "ρ", measured=True),
    Axis("similarity_quantile", "ρ quantile", measured=True),
    Axis("routing_policy", "Policy"),
    Axis("routing_budget", "Budget [experts]", measured=True),
    Axis("routing_floor_batch", "Floor [requests decoding]", measured=True),
    Axis("protection", "Protection"),
    Axis("vision_policy", "Vision policy"),
    Axis("vision_budget", "Vision budget"),
    Axis("vision_merge", "Merge"),
    Axis("workload", "Workload"),
    Axis("model", "Model"),
    Axis("arrival", "Arrival"),
    Axis("min_tokens_per_image", "Floor [tokens]", measured=True),
    Axis("requests", "Requests", measured=True),
)
# Drawn over even where a run has one value only; the next ones only where it has several.
ALWAYS = ("retain_ratio", "primary_experts", "qps")
IF_SEVERAL = ("concurrency", "similarity_threshold")

# With re-routing off these say nothing about the cell.
_OF_ROUTING = (
    "routing_policy",
    "similarity_threshold",
    "similarity_quantile",
    "routing_budget",
    "routing_floor_batch",
    "protection",
)
# Settings that an axis stands for, the rest being "other" settings.
_KEYS = frozenset(
    {
        "vision.retain_ratio",
        "vision.policy",
        "vision.budget",
        "vision.merge",
        "vision.min_tokens_per_image",
        "routing.primary_experts",
        "routing.auto_experts",
        "routing.policy",
        "routing.similarity_threshold",
        "routing.similarity_quantile",
        "routing.budget",
        "routing.floor_batch",
        "routing.protection_path",
        "load.qps",
        "load.concurrency",
        "load.arrival",
        "load.requests",
        "workload.name",
        "model.name",
    }
)


def value(row: Row, column: str) -> Any:
    """The row's value on an axis; `None` where the axis says nothing about the cell."""
    if column in _OF_ROUTING and row["primary_experts"] == "off":
        return None
    found = row[column]
    return None if found == "" else found


def values(rows: Iterable[Row], column: str) -> list[Any]:
    """The distinct values on an axis, ascending; K's "off" comes last, it is the largest."""
    return sorted({v for r in rows if (v := value(r, column)) is not None}, key=_rank)


def varied(rows: Sequence[Row]) -> tuple[Axis, ...]:
    """The axes on which the cells have several values."""
    return tuple(a for a in AXES if len(values(rows, a.column)) > 1)


def charted(rows: Sequence[Row]) -> tuple[Axis, ...]:
    """The axes that charts are drawn over."""
    present = {a.column: len(values(rows, a.column)) for a in AXES}
    return tuple(
        a
        for a in AXES
        if (a.column in ALWAYS and present[a.column] > 0)
        or (a.column in IF_SEVERAL and present[a.column] > 1)
    )


def flat(tree: Mapping[str, Any], prefix: str = "", leaf: str | None = None) -> dict[str, Any]:
    """A nested tree as ``group.key`` → value; mappings that have the key `leaf` count as values."""
    found: dict[str, Any] = {}
    for key, entry in tree.items():
        if isinstance(entry, Mapping) and (leaf is None or leaf not in entry):
            found.update(flat(entry, f"{prefix}{key}.", leaf))
        else:
            found[prefix + key] = entry
    return found


def shared_and_varied(cells: Sequence[Cell]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The settings that all cells have alike, and those that differ with their distinct values."""
    alike: dict[str, Any] = {}
    differ: dict[str, list[Any]] = {}
    trees = [flat(c.settings.to_tree()) for c in cells]
    for key in trees[0] if trees else ():
        # By JSON: 1 and True, equal to Python, are different settings.
        distinct = {json.dumps(t[key]): t[key] for t in trees}
        if len(distinct) == 1:
            alike[key] = trees[0][key]
        else:
            differ[key] = list(distinct.values())
    return alike, differ


def others(cells: Sequence[Cell]) -> dict[str, str]:
    """Cell id → its values of the settings that differ and are no axis, as one text."""
    _, differ = shared_and_varied(cells)
    keys = [k for k in differ if k not in _KEYS]
    flats = {c.id: flat(c.settings.to_tree()) for c in cells}
    return {i: " ".join(f"{k}={tree[k]}" for k in keys) for i, tree in flats.items()}


def _rank(item: Any) -> tuple[int, float, str]:
    if isinstance(item, int | float):
        return (0, float(item), "")
    if str(item).startswith("auto "):
        return (1, float(str(item).split()[1]), "")
    return (2, 0.0, str(item))
