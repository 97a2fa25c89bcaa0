"""From settings to cells: what a sweep will run, named and ordered before anything starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.settings import EngineSettings, ModelSettings, RoutingSettings, Settings

# How an engine is waited for changes nothing that it answers or how fast.
_NOT_IN_THE_HASH = {"engine": {"start_timeout_s", "stop_timeout_s", "api_key_env"}, "report": None}


@dataclass(frozen=True)
class Cell:
    """Arm × workload × load, the unit of a sweep.

    Attributes:
        id: first 12 hex digits of a SHA-256 over everything that can change the cell's result.
        settings: what to run.
    """

    id: str
    settings: Settings


def canonical_routing(routing: RoutingSettings, top_k: int | None) -> RoutingSettings:
    """The same lever with every way of writing "off" written alike.

    K absent, K >= the model's top-k and policy ``off`` all leave every route alone, so that they
    name one and the same cell. `top_k` is the model's experts per token, `None` if it has none.
    """
    k = routing.primary_experts
    if routing.policy == "off" or k is None or (top_k is not None and k >= top_k):
        return dataclasses.replace(routing, policy="off", primary_experts=None)
    return routing


def make_cells(
    settings: Iterable[Settings], *, top_k: int | None, fingerprints: Mapping[str, str]
) -> tuple[Cell, ...]:
    """Name the cells, drop repeats and order them so that arms alternate on one warm engine.

    Args:
        settings: one for each composed configuration, in the order in which they were asked for.
        top_k: the model's experts per token; `None` if it has none.
        fingerprints: content hashes of the files that settings name by path (model, data, similarity,
            protection), so that a changed file makes another cell.

    Cells that share an engine stay together, then those that share a workload, then a load: the arms
    of one load run back to back, and differences between them are the least disturbed by drift.
    """
    unique: dict[str, Cell] = {}
    for s in settings:
        s = dataclasses.replace(s, routing=canonical_routing(s.routing, top_k))
        cell = Cell(_hash(s, fingerprints), s)
        unique.setdefault(cell.id, cell)
    cells = list(unique.values())
    for key in (
        lambda c: (c.settings.load),
        lambda c: (c.settings.workload),
        lambda c: (c.settings.engine, c.settings.model),
    ):
        first_seen = list(dict.fromkeys(key(c) for c in cells))
        cells.sort(key=lambda c: first_seen.index(key(c)))  # noqa: B023 - used at once
    return tuple(cells)


def engines(cells: Sequence[Cell]) -> tuple[tuple[EngineSettings, ModelSettings], ...]:
    """The distinct engines that the cells need, in order of first use."""
    return tuple(dict.fromkeys((c.settings.engine, c.settings.model) for c in cells))


def _hash(settings: Settings, fingerprints: Mapping[str, str]) -> str:
    tree: dict[str, Any] = settings.to_tree()
    for group, names in _NOT_IN_THE_HASH.items():
        if names is None:
            del tree[group]
        else:
            tree[group] = {k: v for k, v in tree[group].items() if k not in names}
    text = json.dumps([tree, dict(fingerprints)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
