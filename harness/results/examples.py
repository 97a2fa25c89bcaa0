"""A few requests of a cell, to be read: what was asked, what was expected, what the model wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.load.record import RequestRecord
from harness.results.samples import StoredSample
from harness.results.text import cut, one_line, visible

PER_CELL = 3
_LIMIT = 700


@dataclass(frozen=True)
class Example:
    """One request, as texts that are safe to show once a template has escaped them.

    Attributes:
        sample: the sample's id.
        question: what was asked; empty if it was not kept.
        references: accepted answers.
        answer: what the model wrote.
        outcome: the finish reason, or the error.
        good: whether the request is good.
        scores: metric → value, as texts.
    """

    sample: str
    question: str
    references: tuple[str, ...]
    answer: str
    outcome: str
    good: bool
    scores: tuple[tuple[str, str], ...]


def examples(
    records: Sequence[RequestRecord], samples: Mapping[str, StoredSample]
) -> tuple[Example, ...]:
    """The first requests of a cell, and the first that failed if it is not among them.

    The same schedule is replayed for every arm, so that arms show the same samples.
    """
    chosen = list(records[:PER_CELL])
    failed = next((r for r in records if not r.good), None)
    if failed is not None and failed not in chosen:
        chosen.append(failed)
    return tuple(_example(r, samples.get(r.sample_id)) for r in chosen)


def _example(record: RequestRecord, sample: StoredSample | None) -> Example:
    return Example(
        sample=one_line(record.sample_id, 80),
        question=cut(visible(sample.question), _LIMIT) if sample else "",
        references=tuple(cut(visible(r), _LIMIT) for r in sample.references) if sample else (),
        answer=cut(visible(record.text), _LIMIT),
        outcome=one_line(record.error or record.finish_reason or "no finish reason", 200),
        good=record.good,
        scores=tuple((one_line(k, 40), f"{v:.3g}") for k, v in sorted(record.scores.items())),
    )
