"""The bundled model: a small Qwen3-VL-MoE checkpoint folder, built from a seed.

`ensure` is what most callers want. The folder is what vLLM and Transformers load by path: the
published layout in every file, random weights (see `harness.pocket.weights`), and beside them
``pruneroute/sere_similarity.safetensors``, the similarity of its experts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.calibration import SIMILARITY_FILE
from harness.pocket import cache
from harness.pocket.recipe import (
    Recipe,
    generation_config,
    image_processor_config,
    model_config,
    video_processor_config,
)
from harness.pocket.tokenizer import CHAT_TEMPLATE, tokenizer_config, tokenizer_json

WEIGHTS_FILE = "model.safetensors"

# Modules that what is built depends on.
_POCKET = ("recipe.py", "tokenizer.py", "weights.py", "model.py")
_CALIBRATION = ("similarity.py", "collect.py", "texts.py", "fingerprint.py")


def build(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint to `folder`, which appears whole or not at all.

    Byte-identical for the same seed on the same machine and library versions. An existing folder
    is replaced.

    Args:
        folder: where the checkpoint goes; its parent is made if needed.
        seed: draws the weights; >= 0.

    Raises:
        harness.pocket.cache.CacheError: the place cannot be written.
    """
    cache.write_folder(folder, lambda draft: _fill(draft, Recipe(), seed))


def default_path(seed: int = 0) -> Path:
    """Where the bundled model lives: in the cache, under a name that changes with its recipe."""
    here = Path(__file__).parent
    calibration = here.parent / "calibration"
    sources = [here / f for f in _POCKET]
    sources += [calibration / f for f in _CALIBRATION]
    return cache.root() / f"pocket-{cache.source_hash(sources, str(seed))}"


def ensure(seed: int = 0) -> Path:
    """The bundled model's folder, built first if it is absent or damaged.

    Safe when several processes call it at once: one builds, the others wait.

    Raises:
        harness.pocket.cache.CacheError: the cache cannot be written.
    """
    return cache.ensure_folder(default_path(seed), lambda folder: build(folder, seed))


def _fill(folder: Path, r: Recipe, seed: int) -> None:
    documents: dict[str, dict[str, Any]] = {
        "config.json": model_config(r),
        "generation_config.json": generation_config(),
        "preprocessor_config.json": image_processor_config(r),
        "video_preprocessor_config.json": video_processor_config(r),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(r.max_position_embeddings),
    }
    documents["model.safetensors.index.json"] = _write_weights(folder / WEIGHTS_FILE, r, seed)
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")

    from harness.calibration.collect import calibrate

    with _one_thread():
        calibrate(folder, folder / SIMILARITY_FILE)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One PyTorch thread: sums in one order on any machine, and at this size also the fastest."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write_weights(path: Path, r: Recipe, seed: int) -> dict[str, Any]:
    """Write bfloat16 weights; returns their index.

    One file needs no index, but engines load every ``*.safetensors`` beside an unindexed one as
    weights, and the similarity file is not.
    """
    import torch
    from safetensors.torch import save_file

    from harness.pocket.weights import draw

    tensors = {
        name: torch.from_numpy(array).to(torch.bfloat16).contiguous()
        for name, array in draw(r, seed)
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
        "weight_map": dict.fromkeys(sorted(tensors), path.name),
    }
