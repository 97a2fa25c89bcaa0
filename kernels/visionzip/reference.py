"""VisionZip's scores in plain PyTorch: the definition that faster kernels must meet.

Importance of a vision token is the attention that it receives in one layer of the vision encoder,
summed over the queries of its own image and averaged over heads (VisionZip, arXiv 2412.04467, for
encoders without a CLS token; github.com/dvlab-research/VisionZip, Qwen2.5-VL port).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def attention_received(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    scale: float,
    *,
    block: int = 1024,
) -> Tensor:
    """Attention that each token receives: the column sums of the softmax matrix, mean over heads.

    a_j = 1/H · Σ_h Σ_{q in the image of j} softmax_j(scale · ⟨q_h, k_h⟩). Each image's scores sum to
    its length, so that they average 1 whatever the image's size.

    Args:
        query, key: [tokens, heads, head_dim], after rotary embedding; any floating dtype.
        cu_seqlens: [images + 1], first token of every image and the total; images never mix.
        scale: factor on the dot products, head_dim^-0.5 as a rule.
        block: queries at a time. Memory is O(heads · block · longest image), never its square.

    Returns:
        [tokens] float32 on the inputs' device.

    Raises:
        ValueError: shapes disagree, `cu_seqlens` is not ascending from 0 to `tokens`, or an image
            is empty.
    """
    if query.shape != key.shape or query.dim() != 3:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be "
            "[tokens, heads, head_dim]"
        )
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != query.shape[0]:
        raise ValueError(f"cu_seqlens {bounds} must run from 0 to {query.shape[0]} tokens")
    scores = torch.empty(query.shape[0], dtype=torch.float32, device=query.device)
    for start, end in itertools.pairwise(bounds):
        if end <= start:
            raise ValueError(f"cu_seqlens {bounds} holds an empty image")
        keys = key[start:end].float().permute(1, 2, 0)
        received = torch.zeros(end - start, dtype=torch.float32, device=query.device)
        for first in range(start, end, block):
            queries = query[first : min(first + block, end)].float().permute(1, 0, 2)
            attention = torch.softmax(torch.matmul(queries, keys) * scale, dim=-1)
            received += attention.sum(dim=(0, 1))
        scores[start:end] = received / query.shape[1]
    return scores


def merge_unit_scores(scores: Tensor, unit: int) -> Tensor:
    """Mean over each merge unit: patches that the encoder merges into one token are scored as one.

    Args:
        scores: [patches] float32, the patches of a unit adjacent (Qwen3-VL's order).
        unit: patches a unit, spatial_merge_size² (4 for Qwen-VL).

    Returns:
        [patches / unit] float32.

    Raises:
        ValueError: `patches` is no multiple of `unit`.
    """
    if scores.shape[0] % unit:
        raise ValueError(f"{scores.shape[0]} patches do not divide into units of {unit}")
    return scores.view(-1, unit).mean(dim=1)
