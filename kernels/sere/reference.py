"""Expert re-routing in plain PyTorch: the definition that faster kernels must meet.

SERE (arXiv 2602.07616; github.com/JL-Cheng/SERE): in a decode step every token keeps its K primary
experts; a secondary expert that no token of the batch has as a primary moves to the most similar
expert that the batch reads anyway, unless none is similar enough. Weights stay as the router gave
them. Protection follows the published production design: a protected expert is never moved away
from, and being protected changes nobody else's candidates.

Ids outside 0 … E - 1 are empty slots: -1 by convention, anything in rows that only pad a captured
graph (their inputs are leftovers, and a router makes anything of NaN). They are passed through.

No function here reads a value back to the host, so that each can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PADDING, PREFILL, DECODE = 0, 1, 2
"""Row kinds: padding neither moves nor counts; prefill keeps its routes, and its experts are read
anyway; decode rows choose the primaries and are the only ones re-routed."""


def slot_ranks(ids: Tensor, weights: Tensor) -> Tensor:
    """Rank of each expert slot in its row by weight, heaviest first: 0 … slots - 1.

    Routers do not promise sorted slots (vLLM's CPU and grouped ones use unsorted top-k). Ties go to
    the lowest expert id, then the lowest slot; empty slots (id -1) come last.

    Args:
        ids: [rows, slots] integer expert ids, -1 for an empty slot.
        weights: [rows, slots] float.

    Returns:
        [rows, slots] int64.
    """
    w = weights.float().masked_fill(ids < 0, -torch.inf)
    slot = torch.arange(ids.shape[1], device=ids.device)
    heavier = w.unsqueeze(1) > w.unsqueeze(2)
    equal = w.unsqueeze(1) == w.unsqueeze(2)
    lower_id = ids.unsqueeze(1) < ids.unsqueeze(2)
    same_id = ids.unsqueeze(1) == ids.unsqueeze(2)
    earlier = slot.view(1, 1, -1) < slot.view(1, -1, 1)
    return (heavier | (equal & (lower_id | (same_id & earlier)))).sum(dim=2)


def expert_set(ids: Tensor, counted: Tensor, experts: int) -> Tensor:
    """The distinct experts among the counted slots, as a bitmap.

    Args:
        ids: [rows, slots] integer expert ids, -1 for an empty slot.
        counted: [rows, slots] bool.
        experts: E.

    Returns:
        [E] bool.
    """
    bins = torch.zeros(experts + 1, dtype=torch.bool, device=ids.device)
    index = torch.where(counted & (ids >= 0) & (ids < experts), ids.long(), experts)
    return bins.index_fill(0, index.flatten(), True)[:experts]


def sere(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    similarity: Tensor,
    protected: Tensor,
    primary_experts: Tensor | int,
    threshold: Tensor | float,
) -> Tensor:
    """Expert ids after similarity-based re-routing.

    P = primaries (K heaviest slots) of all decode rows, with all experts of prefill rows, which are
    read in any case. A secondary slot of a decode row with expert u not in P and not protected moves
    to v = argmax_{v in P} similarity[u, v] if similarity[u, v] >= threshold; ties go to the lowest v.

    Args:
        ids: [rows, slots] integer; -1 is passed through.
        weights: [rows, slots] float, read only to rank the slots.
        row_kind: [rows] integer, `PADDING`, `PREFILL` or `DECODE`.
        similarity: [E, E] float without NaN.
        protected: [E] bool.
        primary_experts: K >= 1; at K >= slots nothing moves.
        threshold: rho; compared in the dtype of `similarity`.

    Returns:
        [rows, slots], dtype of `ids`.
    """
    experts = similarity.shape[0]
    decode = (row_kind == DECODE).unsqueeze(1)
    primary = slot_ranks(ids, weights) < primary_experts
    reads = expert_set(ids, (decode & primary) | (row_kind == PREFILL).unsqueeze(1), experts)
    if isinstance(threshold, Tensor):  # else comparing would widen a 16-bit matrix
        threshold = threshold.to(similarity.dtype)
    best, target = similarity.masked_fill(~reads, -torch.inf).max(dim=1)
    moves = (best >= threshold) & ~reads & ~protected
    table = torch.where(moves, target, torch.arange(experts, device=ids.device)).to(ids.dtype)
    moved = table[ids.clamp(0, experts - 1).long()]
    return torch.where(decode & ~primary & (ids >= 0) & (ids < experts), moved, ids)


def sere_by_step(
    ids: Tensor,
    weights: Tensor,
    step: Tensor,
    steps: int,
    similarity: Tensor,
    protected: Tensor,
    primary_experts: Tensor | int,
    threshold: float = 0.0,
) -> Tensor:
    """`sere` of many decode steps at once, as when known answers are read in one pass.

    Args:
        ids: [rows, slots] integer in 0 … E - 1.
        weights: [rows, slots] float.
        step: [rows] int64, number of the step that decodes a row; -1 for rows that none does, which
            keep their routes and lend nothing.
        steps: how many.
        similarity, protected, threshold: as for `sere`.
        primary_experts: K >= 1, of all rows or [rows].

    Returns:
        [rows, slots], dtype of `ids`.
    """
    experts = similarity.shape[0]
    decode = (step >= 0).unsqueeze(1)
    own = torch.as_tensor(primary_experts, device=ids.device).reshape(-1, 1)
    secondary = decode & (slot_ranks(ids, weights) >= own)
    # One row more than there are steps, for slots that do not count.
    at = torch.where(decode & ~secondary, step.unsqueeze(1), steps) * experts + ids.long()
    flags = torch.zeros((steps + 1) * experts, dtype=torch.bool, device=ids.device)
    reads = flags.index_fill(0, at.flatten(), True).view(-1, experts)[:steps]
    best, target = similarity.masked_fill(~reads.unsqueeze(1), -torch.inf).max(dim=2)
    moves = (best >= threshold) & ~reads & ~protected
    table = torch.where(moves, target, torch.arange(experts, device=ids.device)).to(ids.dtype)
    moved = table[step.clamp(min=0)].gather(1, ids.long())
    return torch.where(secondary, moved, ids)


def topk(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    primary_experts: Tensor | int,
    renormalize: Tensor | bool,
) -> tuple[Tensor, Tensor]:
    """Plain top-K on decode rows: secondary experts are dropped, the baseline to beat.

    A dropped slot gets weight 0 and its row's heaviest expert as id, so that it reads no weights of
    its own; shapes stay as they are.

    Args:
        ids, weights, row_kind, primary_experts: as for `sere`.
        renormalize: whether the remaining weights are scaled to the row's former sum.

    Returns:
        ids and weights, shapes and dtypes as given.
    """
    ranks = slot_ranks(ids, weights)
    drop = (row_kind == DECODE).unsqueeze(1) & (ranks >= primary_experts) & (ids >= 0)
    heaviest = ids.gather(1, ranks.argmin(dim=1, keepdim=True))
    kept = weights.masked_fill(drop, 0)
    before, after = weights.sum(1, keepdim=True), kept.sum(1, keepdim=True)
    scale = torch.where(after > 0, before / after, torch.ones_like(after))
    renorm = torch.as_tensor(renormalize, device=ids.device)
    scaled = torch.where(renorm & drop.any(1, keepdim=True), kept * scale, kept)
    return torch.where(drop, heaviest, ids), scaled


def by_batch(alone: float, rows: int) -> int:
    """A K that follows the batch: `alone` over the root of its rows, to the nearest whole, at least 1.

    The more rows, the more experts are read for others' sake, and the nearer is one that will do. On
    the pocket model the K that costs least at a given number of experts falls about so (see
    `harness.pocket.evaluation.rerouting`).

    Args:
        alone: K of a single row, >= 1.
        rows: that decode in the step.
    """
    return max(1, round(alone / math.sqrt(max(1, rows))))
