"""Scores of a batch of images on whatever device they are: Triton on a GPU, PyTorch elsewhere.

Triton is imported where it is used, so that a machine without it can import this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.visionzip.reference import attention_received
from kernels.visionzip.tuning import DEFAULT, WIDTHS, Tuning


def scores(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    scale: float,
    lse: Tensor | None = None,
    *,
    host_bounds: Sequence[int] | None = None,
    total_heads: int | None = None,
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """Attention that each token receives, as `kernels.visionzip.reference.attention_received`.

    On a GPU it is computed from the log-sum-exp in memory of O(heads · tokens). float32 holds a
    log-sum-exp to half a unit in its last place, 4e-6 below 128 and 3e-5 below 1024, and that is
    the relative error which it adds to a score.

    The same input gives the same bits. An image's scores do not depend on the others in the batch.
    Shards of heads, each divided by `total_heads`, add up to the scores of all heads, though the
    last bit may depend on how many shards there were. Where it must not, gather the shards of
    `head_scores` in order and apply `mean_heads`.

    Args:
        query, key: [tokens, heads, head_dim], after rotary embedding; any floating dtype, views with
            strides too. Triton takes bfloat16 and float16 of head_dim 64, 72, 80, 96 or 128; PyTorch
            does the rest.
        cu_seqlens: [images + 1], first token of every image and the total; int32 or int64 if a
            tensor. Values on the host are checked. Values on a GPU are not, since the host would
            have to wait for them; the kernels then keep to the tensors' bounds, and tokens in no
            image get undefined scores.
        scale: factor on the dot products; positive.
        lse: [heads, tokens] float32, natural logarithm, as FlashAttention returns it. Without it
            Triton takes one more pass. PyTorch does not read it.
        host_bounds: the values of `cu_seqlens`, if the host has them too: they are then checked.
        total_heads: heads of the whole layer where these are a shard of them.
        tuning: how the GPU's kernel cuts its work.

    Returns:
        [tokens] float32 on the inputs' device; each image's sum is its length, times the share
        of heads that were given.

    Raises:
        ValueError: shapes, dtypes or devices disagree; bounds known to the
            host do not ascend from 0 to `tokens` or hold an empty image.
    """
    heads = query.shape[1] if query.dim() == 3 else 0
    divisor = heads if total_heads is None else total_heads
    if divisor < heads:
        raise ValueError(f"total_heads {divisor} is less than the {heads} heads given")
    if not query.is_cuda:
        check(query, key, cu_seqlens, scale, host_bounds)
        if lse is not None:
            _check_lse(lse, query)
        bounds = cu_seqlens if host_bounds is None else host_bounds
        return attention_received(query, key, bounds, scale) * (heads / divisor)
    parts = head_scores(query, key, cu_seqlens, scale, lse, host_bounds=host_bounds, tuning=tuning)
    return mean_heads(parts, divisor)


def head_scores(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    scale: float,
    lse: Tensor | None = None,
    *,
    host_bounds: Sequence[int] | None = None,
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """Attention that each token receives, head by head; what `mean_heads` turns into `scores`.

    Args:
        query, key, cu_seqlens, scale, lse, host_bounds, tuning: as for `scores`.

    Returns:
        [heads, tokens] float32 on the inputs' device.

    Raises:
        ValueError: as for `scores`.
    """
    check(query, key, cu_seqlens, scale, host_bounds)
    if lse is not None:
        _check_lse(lse, query)
    if not runs_triton(query):
        bounds = cu_seqlens if host_bounds is None else host_bounds
        pairs = zip(query.split(1, 1), key.split(1, 1), strict=True)
        return torch.stack([attention_received(q, k, bounds, scale) for q, k in pairs])
    from kernels.visionzip import column_sums

    device_bounds = _on_device(cu_seqlens, query)
    if lse is None:
        lse = column_sums.log_sum_exp(query, key, device_bounds, scale)
    return column_sums.head_scores(query, key, lse, device_bounds, scale, tuning=tuning)


def mean_heads(parts: Tensor, total_heads: int) -> Tensor:
    """Sum over heads from the first to the last, over `total_heads`.

    Args:
        parts: [heads, tokens] float32, from `head_scores`. Gathered over tensor-parallel ranks in
            the order of their heads, they give the same bits at every number of ranks.
        total_heads: heads of the whole layer.

    Returns:
        [tokens] float32.
    """
    if parts.is_cuda:
        from kernels.visionzip import column_sums

        return column_sums.mean_heads(parts, total_heads)
    total = parts.new_zeros(parts.shape[1])
    for part in parts:
        total += part
    return total / total_heads


def runs_triton(query: Tensor) -> bool:
    """Whether the Triton kernels take such queries: on a GPU, of their types and widths."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and (query.shape[2] in WIDTHS)
    )


def log_sum_exp(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    scale: float,
    *,
    host_bounds: Sequence[int] | None = None,
    block: int = 1024,
) -> Tensor:
    """Log-sum-exp of every query's logits, where the attention itself does not give it.

    Args:
        query, key, cu_seqlens, scale, host_bounds: as for `scores`.
        block: queries at a time in PyTorch, whose memory is O(heads · block · longest image).

    Returns:
        [heads, tokens] float32, natural logarithm.

    Raises:
        ValueError: as for `scores`.
    """
    check(query, key, cu_seqlens, scale, host_bounds)
    if query.is_cuda:
        from kernels.visionzip import column_sums

        check_triton(query)
        return column_sums.log_sum_exp(query, key, _on_device(cu_seqlens, query), scale)
    out = torch.empty((query.shape[1], query.shape[0]), dtype=torch.float32, device=query.device)
    known = cu_seqlens if host_bounds is None else host_bounds
    bounds = known.tolist() if isinstance(known, Tensor) else list(known)
    for start, end in itertools.pairwise(bounds):
        keys = key[start:end].float().permute(1, 2, 0)
        for first in range(start, end, block):
            last = min(first + block, end)
            queries = query[first:last].float().permute(1, 0, 2)
            out[:, first:last] = torch.logsumexp(torch.matmul(queries, keys) * scale, dim=-1)
    return out


def check(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    scale: float,
    host_bounds: Sequence[int] | None = None,
) -> None:
    """Raises ValueError for what `scores` refuses on any device."""
    if query.shape != key.shape or query.dim() != 3:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be "
            "[tokens, heads, head_dim]"
        )
    if query.dtype != key.dtype or not query.is_floating_point():
        raise ValueError(
            f"query {query.dtype} and key {key.dtype} must have one floating-point type"
        )
    if query.device != key.device:
        raise ValueError(f"query is on {query.device} and key on {key.device}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale {scale} is not a positive number")
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"cu_seqlens {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} must be [images + 1], "
                "int32 or int64"
            )
        if cu_seqlens.is_cuda and cu_seqlens.device != query.device:
            raise ValueError(f"query is on {query.device} and cu_seqlens on {cu_seqlens.device}")
    if len(cu_seqlens) < 2:
        raise ValueError("cu_seqlens holds no image")
    if not (isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cuda):
        known = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        _check_bounds("cu_seqlens", known, query.shape[0])
        if host_bounds is not None and list(host_bounds) != known:
            raise ValueError(f"host_bounds {list(host_bounds)} are not cu_seqlens {known}")
    elif host_bounds is not None:
        if len(host_bounds) != len(cu_seqlens):
            raise ValueError(
                f"{len(host_bounds)} host_bounds for {len(cu_seqlens)} values of cu_seqlens"
            )
        _check_bounds("host_bounds", list(host_bounds), query.shape[0])


def check_triton(query: Tensor) -> None:
    """Raises ValueError for what the Triton kernels alone refuse."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"query {query.dtype} must be bfloat16 or float16 on a GPU")
    if query.shape[2] not in WIDTHS:
        raise ValueError(f"head_dim {query.shape[2]} is none of {list(WIDTHS)}")


def _check_bounds(name: str, bounds: list[int], tokens: int) -> None:
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(f"{name} {bounds} must run from 0 to {tokens} tokens")
    if any(end <= start for start, end in itertools.pairwise(bounds)):
        raise ValueError(f"{name} {bounds} holds an empty image")


def _check_lse(lse: Tensor, query: Tensor) -> None:
    shape = (query.shape[1], query.shape[0])
    if lse.shape != shape or lse.dtype != torch.float32 or lse.device != query.device:
        raise ValueError(
            f"lse {lse.dtype} {tuple(lse.shape)} on {lse.device} must be float32 "
            f"[heads, tokens] = {shape} on {query.device}"
        )


def _on_device(cu_seqlens: Tensor | Sequence[int], query: Tensor) -> Tensor:
    """The bounds as a tensor beside the queries."""
    if not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(list(cu_seqlens), dtype=torch.int32)
    return cu_seqlens.to(query.device, non_blocking=True)
