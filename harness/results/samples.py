"""What was asked, kept beside the records so that a report can show it: texts, not pictures."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.datasets.sample import Sample, Text
from harness.results.errors import ResultsError
from harness.settings import WorkloadSettings


@dataclass(frozen=True)
class StoredSample:
    """The part of a `Sample` that can be read.

    Attributes:
        question: the texts of all turns, a line each, with ``[image: NAME]`` where pictures are.
        references: accepted answers.
        scorer: which rule judged it.
        category: the data set's own type of question, or empty.
    """

    question: str
    references: tuple[str, ...]
    scorer: str
    category: str


def stored(sample: Sample) -> StoredSample:
    """The readable part of `sample`."""
    several = len(sample.messages) > 1
    lines = []
    for message in sample.messages:
        parts = (
            p.text if isinstance(p, Text) else f"[image: {p.name or p.media_type}]"
            for p in message.parts
        )
        lines.append((f"{message.role}: " if several else "") + " ".join(parts))
    return StoredSample("\n".join(lines), sample.references, sample.scorer, sample.category)


def workload_key(workload: WorkloadSettings) -> str:
    """12 hex digits that name a workload's samples: cells that ask the same share them."""
    text = json.dumps(dataclasses.asdict(workload), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def to_tree(samples: Iterable[Sample]) -> dict[str, Any]:
    """The samples' readable parts by id, ready for JSON."""
    return {s.id: dataclasses.asdict(stored(s)) for s in samples}


def from_tree(tree: Mapping[str, Any], source: str) -> dict[str, StoredSample]:
    """What `to_tree` gave.

    Raises:
        ResultsError: an entry is damaged; names `source` and the sample.
    """
    samples = {}
    for name, entry in tree.items():
        try:
            values = {f: entry[f] for f in ("question", "scorer", "category")}
            texts = [*values.values(), *entry["references"]]
        except (TypeError, KeyError):
            raise ResultsError(f"{source}: damaged at sample {name!r}") from None
        if not all(isinstance(t, str) for t in texts):
            raise ResultsError(f"{source}: damaged at sample {name!r}")
        samples[name] = StoredSample(**values, references=tuple(entry["references"]))
    return samples
