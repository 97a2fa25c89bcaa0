"""The bundled model: a small trained Qwen3-VL-MoE checkpoint folder, kept as package data.

The folder is what vLLM and Transformers load by path: the published layout in every file, and beside
them, under ``pruneroute/``, the similarity of its experts by each measure (`harness.calibration`) and
the marks of those worth protecting (`harness.pocket.protect`). `harness.pocket.train` made the weights;
``README.md`` in the folder is the model card.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.calibration import MEASURES, similarity_file
from harness.pocket import cache
from harness.pocket.recipe import (
    Recipe,
    generation_config,
    image_processor_config,
    model_config,
    video_processor_config,
)
from harness.pocket.tokenizer import CHAT_TEMPLATE, tokenizer_config, tokenizer_json

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = Path(__file__).parent / "checkpoint"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
CALIBRATION_TEXTS = 96
"""Conversations that experts are compared on."""


class ModelMissing(OSError):
    """The bundled model's files are not where the package should have them."""


def ensure() -> Path:
    """The bundled model's folder.

    Raises:
        ModelMissing: files are missing or cut short, by name.
    """
    if not cache.is_whole(FOLDER):
        raise ModelMissing(
            f"{FOLDER}: the bundled model is incomplete; check the repository out again "
            "(git restore harness/pocket/checkpoint) or install the package anew"
        )
    return FOLDER


def build(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    card: str,
    then: Callable[[Path], object] | None = None,
) -> None:
    """Write a checkpoint with these weights, and calibrate it; it appears whole or not at all.

    It takes a minute. The marks of protected experts take another, see `harness.pocket.protect`.

    Args:
        folder: replaced if it exists.
        weights: under their published names, any float type; stored as bfloat16.
        card: the model card, Markdown.
        then: adds to the folder before it appears.

    Raises:
        harness.pocket.cache.CacheError: the place cannot be written.
    """

    def fill(draft: Path) -> None:
        _fill(draft, Recipe(), weights, card)
        if then is not None:
            then(draft)

    cache.write_folder(folder, fill)


def _fill(folder: Path, r: Recipe, weights: Mapping[str, Tensor], card: str) -> None:
    documents: dict[str, dict[str, Any]] = {
        "config.json": model_config(r),
        "generation_config.json": generation_config(),
        "preprocessor_config.json": image_processor_config(r),
        "video_preprocessor_config.json": video_processor_config(r),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(r.max_position_embeddings),
    }
    documents["model.safetensors.index.json"] = _write_weights(folder / WEIGHTS_FILE, weights)
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / CARD_FILE).write_text(card, encoding="utf-8")

    from harness.calibration.collect import calibrate
    from harness.pocket.held_in import held_in_texts

    with one_thread():
        texts = held_in_texts(CALIBRATION_TEXTS, seed=0)
        for measure in MEASURES:
            out = folder / similarity_file(measure)
            # Whole conversations: cut short, notes with pictures would have no answer.
            calibrate(
                folder, out, measure=measure, texts=texts, max_tokens=r.max_position_embeddings
            )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One PyTorch thread: sums in one order on any machine, and at this size also the fastest."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write_weights(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write bfloat16 weights; returns their index.

    One file needs no index, but engines load every ``*.safetensors`` beside an unindexed one as
    weights, and the similarity file is not.
    """
    import torch
    from safetensors.torch import save_file

    tensors = {name: t.to("cpu", torch.bfloat16).contiguous() for name, t in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
        "weight_map": dict.fromkeys(sorted(tensors), path.name),
    }
