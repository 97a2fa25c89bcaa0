"""From settings to cells: what a sweep will run, named and ordered before anything starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.settings import EngineSettings, ModelSettings, RoutingSettings, Settings

# How an engine is waited for changes nothing that it answers or how fast, and where a file lies
# says nothing that its content does not.
_NOT_IN_THE_HASH: Mapping[str, frozenset[str]] = {
    "engine": frozenset({"start_timeout_s", "stop_timeout_s", "api_key_env"}),
    "model": frozenset({"path"}),
    "workload": frozenset({"path"}),
    "routing": frozenset({"similarity_path", "protection_path"}),
}
_GROUPS_NOT_IN_THE_HASH = frozenset({"report"})


@dataclass(frozen=True)
class Cell:
    """Arm × workload × load, the unit of a sweep.

    Attributes:
        id: ``c`` and 11 hex digits of a SHA-256 over everything that can change the cell's result.
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
    enough = isinstance(k, int) and top_k is not None and k >= top_k
    if routing.policy == "off" or k is None or enough:
        return dataclasses.replace(routing, policy="off", primary_experts=None, floor_batch=0)
    return routing


def make_cells(
    settings: Iterable[Settings],
    *,
    top_k: Callable[[Settings], int | None],
    fingerprints: Callable[[Settings], Mapping[str, str]],
) -> tuple[Cell, ...]:
    """Name the cells, drop repeats and order them so that arms alternate on one warm engine.

    Args:
        settings: one for each composed configuration, in the order in which they were asked for.
        top_k: experts per token of the model that they name; `None` if it has none.
        fingerprints: content hashes of what they name by path (model, data, matrices) and versions
            of what runs them, so that a changed file makes another cell, and a moved one does not.

    Cells that share an engine stay together, then those that share a workload, then a load: the arms
    of one load run back to back, and differences between them are the least disturbed by drift.
    """
    unique: dict[str, Cell] = {}
    for s in settings:
        s = dataclasses.replace(s, routing=canonical_routing(s.routing, top_k(s)))
        cell = Cell(_hash(s, fingerprints(s)), s)
        unique.setdefault(cell.id, cell)
    ordered = list(unique.values())
    for key in (_load_of, _workload_of, engine_of):  # stable sorts: the last one weighs most
        ordered = _by_first_use(ordered, key)
    return tuple(ordered)


def engine_of(cell: Cell) -> tuple[EngineSettings, ModelSettings]:
    """What a cell needs to be running. Cells that agree in it share one start."""
    return cell.settings.engine, cell.settings.model


def _workload_of(cell: Cell) -> Hashable:
    return cell.settings.workload


def _load_of(cell: Cell) -> Hashable:
    return cell.settings.load


def _by_first_use(cells: Sequence[Cell], key: Callable[[Cell], Hashable]) -> list[Cell]:
    first_use = {k: i for i, k in reversed(list(enumerate(map(key, cells))))}
    return sorted(cells, key=lambda c: first_use[key(c)])


def _hash(settings: Settings, fingerprints: Mapping[str, str]) -> str:
    idle = _idle(settings)
    tree = {
        group: {
            k: v
            for k, v in values.items()
            if k not in _NOT_IN_THE_HASH.get(group, ()) and f"{group}.{k}" not in idle
        }
        for group, values in settings.to_tree().items()
        if group not in _GROUPS_NOT_IN_THE_HASH
    }
    text = json.dumps([tree, dict(fingerprints)], sort_keys=True)
    # A letter first: no id may look like a number to whoever reads the CSV.
    return "c" + hashlib.sha256(text.encode()).hexdigest()[:11]


def _idle(settings: Settings) -> set[str]:
    """Settings that nothing reads, given the others."""
    idle = set()
    if settings.routing.policy != "sere":
        idle |= {"routing.similarity_threshold", "routing.similarity_quantile"}
    if settings.routing.similarity_quantile is not None:
        idle.add("routing.similarity_threshold")
    if settings.routing.policy != "topk":
        idle.add("routing.renormalize")
    if settings.routing.policy not in ("xshare", "lynx"):
        idle.add("routing.budget")
    if settings.routing.primary_experts != "auto":
        idle.add("routing.auto_experts")
    if settings.routing.policy != "random_remap":
        idle.add("routing.seed")
    vision, of_attention = settings.vision, {"vision.layer", "vision.budget", "vision.merge"}
    if not vision.prunes:
        idle |= {"vision.policy", "vision.min_tokens_per_image", *of_attention}
    if vision.policy == "none":
        idle.add("vision.retain_ratio")
    if vision.policy != "visionzip":
        idle |= of_attention
    if vision.merge == "none" or of_attention <= idle:
        idle.add("vision.contextual_share")
    if settings.load.arrival != "gamma":
        idle.add("load.burstiness")
    return idle
