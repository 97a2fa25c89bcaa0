"""What a sweep asks: measured samples, and others for the warm-up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.datasets.sample import Image, Sample
from harness.settings import WorkloadSettings


@dataclass(frozen=True)
class Workload:
    """Samples of one workload.

    Attributes:
        samples: the measured ones.
        warmups: asked before; none of them is among the measured.
        sha256: over all that is asked and expected, pictures included.
    """

    samples: tuple[Sample, ...]
    warmups: tuple[Sample, ...]
    sha256: str


def load_workload(settings: WorkloadSettings, warmups: int) -> Workload:
    """Read a workload; without a path, the pocket world's set in that format, drawn on first use.

    Args:
        settings: which, and how many samples.
        warmups: further samples wanted for the warm-up.

    Raises:
        ValueError: the data are missing, damaged or too few, or cannot be drawn here.
    """
    from harness.datasets import ccbench, ocrbench, rag_igbench

    load = {"ocrbench": ocrbench.load, "ccbench": ccbench.load, "rag_igbench": rag_igbench.load}
    path = Path(settings.path) if settings.path is not None else _drawn(settings, warmups)
    found = load[settings.format](path, samples=settings.samples + warmups, seed=settings.seed)
    samples, rest = found[: settings.samples], found[settings.samples :]
    return Workload(samples, rest, samples_hash(samples))


def _drawn(settings: WorkloadSettings, warmups: int) -> Path:
    try:
        from harness.pocket.generate import ensure_set
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        raise ValueError(
            "workload.path=None: the pocket world is drawn with PyTorch, which is not installed; "
            "install it (`pip install torch`), or take a data set's file"
        ) from e
    return ensure_set(
        {"ocrbench": "ocr", "ccbench": "cc", "rag_igbench": "rag"}[settings.format],
        settings.samples + warmups,
        settings.seed,
        images_per_item=settings.images_per_request,
    )


def samples_hash(samples: Sequence[Sample]) -> str:
    """SHA-256 over ids, messages, picture bytes, references and scorers, in order. 64 hex digits."""
    digest = hashlib.sha256()
    for s in samples:
        parts: list[object] = [s.id, s.references, s.scorer, s.category]
        for message in s.messages:
            parts.append(message.role)
            for part in message.parts:
                if isinstance(part, Image):
                    parts.append(hashlib.sha256(part.data).hexdigest())
                else:
                    parts.append(part.text)
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()
