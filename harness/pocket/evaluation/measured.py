"""What one arm came to on one task: a score for every question, and one row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from harness.datasets.sample import Sample
from harness.load.record import RequestRecord
from harness.pocket.evaluation.arms import Arm, Task
from harness.settings import Settings
from metrics.exact import exact
from metrics.intervals import Array, Estimate, mean, wilson

METRICS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ocr": ("exact", "edit_similarity"),
        "cc": ("ccbench",),
        "rag": ("image_edit", "rouge1", "citation_format"),
    }
)
"""Metrics of each task, the one that arms are compared by first."""

PROPORTIONS = frozenset({"exact", "ccbench", "citation_format"})
"""Metrics that are 0 or 1 for every question."""


@dataclass(frozen=True)
class Measured:
    """One arm on one task.

    Attributes:
        scores: metric → [questions] float64, by the set's own order, so that arms pair up.
        row: column → value, see `harness.pocket.evaluation.table.COLUMNS`.
    """

    scores: Mapping[str, Array]
    row: Mapping[str, Any]

    @property
    def main(self) -> Array:
        """Scores in the metric that arms are compared by."""
        return next(iter(self.scores.values()))


def scores_of(
    task: Task, records: Sequence[RequestRecord], samples: Sequence[Sample]
) -> dict[str, Array]:
    """Metric → [questions] float64, in the order of `samples`. What failed scores 0.

    Args:
        task: says which metrics.
        records: scored, one for each sample, in any order.
        samples: the set.

    Raises:
        ValueError: a question has no record.
    """
    by_id = {r.sample_id: r for r in records}
    missing = [s.id for s in samples if s.id not in by_id]
    if missing:
        raise ValueError(f"{task.name}: no record of {missing[0]} and {len(missing) - 1} others")

    def score(name: str, sample: Sample) -> float:
        record = by_id[sample.id]
        if name == "exact":
            return exact(record.text, sample.references) if record.good else 0.0
        return record.scores[name]

    return {
        name: np.array([score(name, s) for s in samples], dtype=np.float64)
        for name in METRICS[task.task]
    }


def estimate(name: str, scores: Array) -> Estimate:
    """A metric over all questions, with the interval that its kind calls for."""
    if name in PROPORTIONS:
        return wilson(round(float(scores.sum())), len(scores))
    return mean(scores)


def measured(
    arm: Arm,
    task: Task,
    settings: Settings,
    records: Sequence[RequestRecord],
    samples: Sequence[Sample],
    summary: Mapping[str, Any],
) -> Measured:
    """Scores and row.

    Args:
        arm, task, settings: what was asked, and how.
        records, samples: as for `scores_of`.
        summary: of `harness.results.summary.summarize`, of the same records.
    """
    scores = scores_of(task, records, samples)
    pruned, routing = settings.vision.prunes, settings.routing
    row: dict[str, Any] = {
        "part": arm.part,
        "arm": arm.name,
        "task": task.name,
        "questions": len(samples),
        "failed": summary["failed"],
        "seconds": max((r.end_s for r in records if r.end_s is not None), default=None),
        "retain_ratio": settings.vision.retain_ratio,
        "vision_policy": settings.vision.policy if pruned else None,
        "vision_layer": settings.vision.layer if summary["vision_policy"] == "visionzip" else None,
        "vision_kept": summary["vision_kept"],
        "routing_policy": routing.policy,
        "primary_experts": routing.primary_experts,
        "similarity_threshold": summary["similarity_threshold"],
        "renormalize": routing.renormalize if routing.policy == "topk" else None,
        "protection": summary["protection"],
    }
    for name, values in scores.items():
        found = estimate(name, values)
        row |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    for name in ("experts_before", "experts_after", "slots_moved", "decode_batch_size", "cell"):
        row[name] = summary[name]
    return Measured(MappingProxyType(scores), MappingProxyType(row))
