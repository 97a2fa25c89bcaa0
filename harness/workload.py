"""What a sweep asks: measured samples, and others for the warm-up."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
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
    own = _read(
        settings.format,
        settings.path,
        settings.samples + warmups,
        settings.seed,
        settings.images_per_request,
    )
    if settings.mix_format is not None:
        others = _read(settings.mix_format, settings.mix_path, len(own), settings.seed, 1)
        own = mixed(own, [i for s in others for i in s.images], settings.mix_images)
    samples, rest = own[: settings.samples], own[settings.samples :]
    return Workload(samples, rest, samples_hash(samples))


def mixed(
    samples: Sequence[Sample], images: Sequence[Image], per_sample: int
) -> tuple[Sample, ...]:
    """Samples with further images behind the last one of their own; what is asked stays.

    Args:
        samples: each with an image.
        images: taken in turn, from the first again when they run out.
        per_sample: images that each gets.

    Raises:
        ValueError: a sample has no image, or there are no images to add.
    """
    if not images:
        raise ValueError("workload.mix_format: the second data set has no images")
    more = itertools.cycle(images)
    return tuple(_with_images(s, tuple(itertools.islice(more, per_sample))) for s in samples)


def _with_images(sample: Sample, images: tuple[Image, ...]) -> Sample:
    for at, message in reversed([*enumerate(sample.messages)]):
        places = [i for i, part in enumerate(message.parts) if isinstance(part, Image)]
        if places:
            end = places[-1] + 1
            parts = (*message.parts[:end], *images, *message.parts[end:])
            messages = list(sample.messages)
            messages[at] = dataclasses.replace(message, parts=parts)
            return dataclasses.replace(sample, messages=tuple(messages))
    raise ValueError(f"workload.mix_format: sample {sample.id} has no images of its own")


def _read(
    fmt: str, path: str | None, count: int, seed: int, images_per_request: int
) -> tuple[Sample, ...]:
    """`count` samples of a file, or of a drawn set."""
    from harness.datasets import ccbench, ocrbench, rag_igbench

    load = {"ocrbench": ocrbench.load, "ccbench": ccbench.load, "rag_igbench": rag_igbench.load}
    where = Path(path) if path is not None else _drawn(fmt, count, seed, images_per_request)
    return tuple(load[fmt](where, samples=count, seed=seed))


def _drawn(fmt: str, count: int, seed: int, images_per_request: int) -> Path:
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
        {"ocrbench": "ocr", "ccbench": "cc", "rag_igbench": "rag"}[fmt],
        count,
        seed,
        images_per_item=images_per_request,
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
