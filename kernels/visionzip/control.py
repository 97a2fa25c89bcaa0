"""The control to VisionZip: the same number of tokens, chosen at random instead of by attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def random_scores(seeds: Sequence[int], image_tokens: Sequence[int]) -> Tensor:
    """Scores that say nothing about the content, for `kernels.visionzip.selection.select_tokens`.

    A token's score depends on its image's seed and its place alone. So the tokens that a smaller
    budget keeps of one image are among those of a larger one, whatever other images share it.

    Args:
        seeds: one for each image, int64.
        image_tokens: tokens of each image.

    Returns:
        [Σ image_tokens] float32 in [0, 1), on the CPU, where PyTorch draws the same everywhere.

    Raises:
        ValueError: not as many seeds as images.
    """
    return torch.cat(
        [
            torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
            for seed, n in zip(seeds, image_tokens, strict=True)
        ]
    )
