"""The first pass: the rows that stay of each image, in a file that the second engine reads."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.engine.oracle import Prompt, kept_tokens


def write_rows(file: Path, prompt: Prompt, image_token: int, ratio: str, floor: int) -> float:
    """Choose and write; gives how narrowly the last token was kept.

    Tensors of image i: ``rows.i`` [kept, hidden · (1 + DeepStack levels)], ``kept.i`` [kept] int64,
    places among the image's tokens, ascending.
    """
    kept, margin = kept_tokens(prompt, Decimal(ratio), floor)
    features = torch.cat([prompt.embeds[prompt.ids == image_token], *prompt.deepstack], dim=1)
    tensors = {}
    for image in range(len(prompt.turn_of)):
        own = prompt.image_of == image
        tensors[f"rows.{image}"] = features[own & kept].contiguous()
        tensors[f"kept.{image}"] = kept[own].nonzero().squeeze(1)
    save_file(tensors, file)
    return margin
