"""VisionZip's contextual tokens: what is not kept, merged into a few more rows.

VisionZip (arXiv 2412.04467, section 3.3), as its Qwen2.5-VL port has it (github.com/dvlab-research/
VisionZip): of the tokens that were not chosen, every so many-th becomes a target, every other one
goes to the target whose key is most similar, and a target's row becomes its own plus the mean of
those that came to it. The row stays at the target's place. Unlike the port, images do not mix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def contextual_count(keep: int, share: float, floors: int, total: int) -> int:
    """How many of `keep` rows are contextual: one at least, if there is room for it.

    Args:
        keep: rows of a group in all.
        share: of them, in [0, 1); 0 for none.
        floors: rows that must be tokens of their own, for the images' floors.
        total: tokens of the group.
    """
    if keep == total or share == 0:
        return 0
    return max(0, min(max(int(share * keep), 1), keep - max(floors, 1)))


def contextual_targets(dominant: Tensor, total: int, count: int) -> Tensor:
    """The targets: `count` of the tokens that are not dominant, at a uniform stride.

    Args:
        dominant: int64 [D], ascending.
        total: tokens in all.
        count: 0 to `total` - D.

    Returns:
        int64 [count], ascending.
    """
    rest = _rest(dominant, total)
    return rest[:: max(1, len(rest) // max(count, 1))][:count]


def merge_contextual(
    features: Tensor, keys: Tensor, image_tokens: Sequence[int], dominant: Tensor, targets: Tensor
) -> Tensor:
    """The targets' rows, with the mean of what was merged into each added to them.

    Args:
        features: [T, width] of all tokens, after the encoder's merger.
        keys: [T, d], keys of the scored layer, mean over heads and over each merge unit.
        image_tokens: tokens of each image.
        dominant: int64 [D] of the tokens that stay as they are.
        targets: int64 [C] of others.

    Returns:
        [C, width], dtype of `features`. A token of an image without a target is lost.
    """
    device = features.device
    image = torch.repeat_interleave(
        torch.arange(len(image_tokens), device=device),
        torch.tensor(image_tokens, device=device),
    )
    rest = _rest(torch.cat([dominant, targets]).sort().values, len(features))
    metric = torch.nn.functional.normalize(keys.float(), dim=-1)
    similar = metric[rest] @ metric[targets].T
    similar.masked_fill_(image[rest, None] != image[targets], -torch.inf)
    best, where = similar.max(dim=1) if len(targets) else (similar.new_empty(0), rest[:0])
    # A one-hot product instead of an index_add, whose order on a GPU is not fixed.
    chosen = torch.zeros_like(similar)
    if len(targets):
        chosen.scatter_(1, where[:, None], torch.isfinite(best).to(chosen.dtype)[:, None])
    count = chosen.sum(0).clamp(min=1)
    merged = (chosen.T @ features[rest].float()) / count[:, None]
    return (features[targets].float() + merged).to(features.dtype)


def _rest(taken: Tensor, total: int) -> Tensor:
    free = torch.ones(total, dtype=torch.bool, device=taken.device)
    free[taken] = False
    return free.nonzero()[:, 0]
