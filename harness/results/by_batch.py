"""Quality against how many requests decoded together, as measured.

Re-routing goes by what a batch reads: alone, a request has no experts of others to move to, and in a
large batch nearly every expert is read anyway. So a mean over a run hides what a request of a quiet
hour gets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from harness.results import levers
from harness.results.derive import CellResult
from harness.results.text import one_line

_OF_LOAD = frozenset({"qps", "concurrency", "arrival", "requests"})


@dataclass(frozen=True)
class Mean:
    """Of the requests of one arm and one bin."""

    value: float
    count: int


@dataclass(frozen=True)
class BatchTable:
    """One metric.

    Attributes:
        metric: its name.
        bins: their words, ascending.
        arms: words of each setting of the levers, and its mean in each bin; None where it has no
            request.
    """

    metric: str
    bins: tuple[str, ...]
    arms: tuple[tuple[str, tuple[Mean | None, ...]], ...]


def by_batch(results: Sequence[CellResult]) -> tuple[BatchTable, ...]:
    """A table for each quality metric, arms pooled over loads; none if no cell re-routes.

    A request's batch size is the mean over its decode steps. Requests that failed, or never decoded,
    have none and are left out.
    """
    rows = [r.row for r in results]
    if all(row["primary_experts"] == "off" for row in rows):
        return ()
    axes = [a for a in levers.varied(rows) if a.column not in _OF_LOAD]
    found: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for result in results:
        arm = _words(result, axes)
        for record in result.records:
            if not record.good or record.routing is None:
                continue
            bin_ = math.ceil(math.log2(max(1.0, record.routing.batch_size)))
            for metric, score in record.scores.items():
                if math.isfinite(score):
                    found[metric][arm][bin_].append(score)
    return tuple(_table(metric, arms) for metric, arms in sorted(found.items()))


def _words(result: CellResult, axes: Sequence[levers.Axis]) -> str:
    parts = [
        f"{a.title.split(' [')[0]} {value}"
        for a in axes
        if (value := levers.value(result.row, a.column)) is not None
    ]
    return one_line(" · ".join(parts), 120) or "all"


def _table(metric: str, arms: dict[str, dict[int, list[float]]]) -> BatchTable:
    bins = sorted({b for by_bin in arms.values() for b in by_bin})
    return BatchTable(
        one_line(metric, 60),
        tuple("1" if b == 0 else f"≤ {2**b}" for b in bins),
        tuple(
            (arm, tuple(_mean(by_bin[b]) if b in by_bin else None for b in bins))
            for arm, by_bin in arms.items()
        ),
    )


def _mean(values: Sequence[float]) -> Mean:
    return Mean(math.fsum(values) / len(values), len(values))
