"""Other published rules that shrink a batch's set of experts, in plain PyTorch, to set beside SERE.

OEA (arXiv 2511.02237), XShare (arXiv 2602.07265) and Lynx (arXiv 2411.08982) differ in the set of
experts that they let a step read. What a row does within that set is the same for all three here:
slots whose expert is in it stay, the others take the row's next-ranked experts of it. For a router
that takes the top-k of `choice` this is the top-k within the set, as OEA and XShare have it; where
a router does not (groups, ties), a row keeps what the router gave it as far as the set allows.
`random_remap` is a control for SERE: the same slots move, to experts drawn at random.

All of them change decode rows only. The experts of prefill rows are read anyway, so that they are in
every set, and no budget counts them. Padding neither moves nor counts. Settings are Python numbers
or 1-element tensors on the device of `ids`. No function reads a value back to the host or makes a
shape depend on data, so that each can be captured in a CUDA graph.

Arguments that the functions share:
    ids: [rows, slots] integer expert ids; anything outside 0 … E - 1 is an empty slot and passed
        through with its weight.
    weights: [rows, slots] float, as the router gave them; rank the slots of a row (`slot_ranks`).
    row_kind: [rows] integer, `PADDING`, `PREFILL` or `DECODE`.
    scores: [rows, E] float >= 0, the gate values that weights are made of (softmax or sigmoid).
    choice: [rows, E] float, by which the router ranks experts: `scores`, plus the bias if it has
        one; -inf (or NaN) where a row may not use an expert, as outside the groups of a router with
        groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sere.reference import DECODE, PREFILL, expert_set, slot_ranks

_LOW_32 = 0xFFFFFFFF


class _Step(NamedTuple):
    """What is read off the routes of a step before any rule is applied.

    Attributes:
        routes: [rows, slots], the ids with -1 for every empty slot.
        ranks: [rows, slots] int64, `slot_ranks`.
        decode: [rows, 1] bool.
        prefill: [rows, 1] bool.
        experts: E.
    """

    routes: Tensor
    ranks: Tensor
    decode: Tensor
    prefill: Tensor
    experts: int

    def read_by_prefill(self) -> Tensor:
        """The experts of prefill rows, [E] bool."""
        return expert_set(self.routes, self.prefill, self.experts)

    def heaviest(self, count: Tensor | int) -> Tensor:
        """The experts in the `count` heaviest slots of each decode row, [E] bool."""
        return expert_set(self.routes, self.decode & (self.ranks < count), self.experts)


def oea(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    scores: Tensor,
    choice: Tensor,
    base_experts: Tensor | int,
) -> tuple[Tensor, Tensor]:
    """Opportunistic Expert Activation, the simplified form (arXiv 2511.02237, algorithm 1).

    The set is the union of the k0 heaviest slots of all decode rows. A row keeps its own k0 and adds
    its next-ranked experts of the set, over all E (the paper's maxP = N), until it has as many as the
    router gave it (k_max = k). Scores of the chosen experts are renormalised, here to the row's former
    sum instead of 1, which is the same where the router normalises.

    Args:
        ids, weights, row_kind, scores, choice: see the module.
        base_experts: k0 >= 1; at k0 >= slots nothing changes.

    Returns:
        ids and weights, shapes and dtypes as given. A slot for which the set has no expert left gets
        weight 0 and the row's heaviest expert as id, so that it reads no weights of its own.
    """
    step = _step(ids, weights, row_kind, scores.shape[1])
    allowed = step.read_by_prefill() | step.heaviest(base_experts)
    return _reselect(step, allowed, ids, weights, scores, choice)


def xshare(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    scores: Tensor,
    choice: Tensor,
    base_experts: Tensor | int,
    budget: Tensor | int,
) -> tuple[Tensor, Tensor]:
    """XShare for one batch on one device (arXiv 2602.07265; its section 3.4, read at second hand).

    The set begins with the k0 heaviest slots of all decode rows and grows, up to `budget` experts, by
    those with the largest gate value summed over the decode rows; ties go to the lower id. Each decode
    row then selects anew within it. The set is larger than the budget where the k0 alone are.

    Experts of prefill rows are in the set for free: they take no place of the budget, also where they
    are among some row's k0. With them the step may read that many experts more.

    Args:
        ids, weights, row_kind, scores, choice: see the module.
        base_experts: k0 >= 1 (the paper's warm-up keeps the first expert of every token).
        budget: experts in the set, >= 0, without those of prefill rows; at E nothing changes.

    Returns:
        ids and weights, as `oea` returns them.
    """
    step = _step(ids, weights, row_kind, scores.shape[1])
    free = step.read_by_prefill()
    base = step.heaviest(base_experts) & ~free
    gate = scores.float().masked_fill(~step.decode, 0).sum(0)
    # Those already in the set rank last, where it does not matter whether they are added.
    rank = _expert_ranks(gate.masked_fill(free | base, -torch.inf))
    allowed = free | base | (rank < budget - base.sum())
    return _reselect(step, allowed, ids, weights, scores, choice)


def lynx(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    scores: Tensor,
    choice: Tensor,
    base_experts: Tensor | int,
    budget: Tensor | int,
) -> tuple[Tensor, Tensor]:
    """Lynx in its first form: the experts that fewest assignments of the batch use are dropped.

    The set is the `budget` experts with most decode slots (ties: larger summed weight, then lower id),
    with the k0 heaviest experts of every decode row, whatever their popularity. A slot whose expert is
    not in the set takes the row's best-ranked expert that is and that the row does not hold yet.

    The paper's (arXiv 2411.08982): from the union of the batch's experts the least popular are dropped
    (v1, as the OEA paper sums it up; its own text could not be had). From v3: decode only, a token
    still uses k experts, assignments are remapped to experts that remain, a token's top-ranked expert
    matters most, weights are renormalised. v3 also replaces popularity by binned affinities
    ("AffinityBinning"), which is not done here. Ours: a fixed budget, the ties, next-best by `choice`,
    the k0 heaviest experts kept for every row (v3: one, for tokens whose router is confident), and
    that these come on top of the budget.

    Experts of prefill rows are in the set for free and take no place of the budget.

    Args:
        ids, weights, row_kind, scores, choice: see the module.
        base_experts: k0 >= 1; at k0 >= slots nothing changes.
        budget: popular experts kept, >= 0; at E, or as many experts as decode rows use, nothing
            changes.

    Returns:
        ids and weights, as `oea` returns them.
    """
    step = _step(ids, weights, row_kind, scores.shape[1])
    free = step.read_by_prefill()
    users = _per_expert(step, torch.ones_like(weights, dtype=torch.float32))
    weight = _per_expert(step, weights.float())
    rank = _expert_ranks(users.masked_fill(free, -1), weight)
    allowed = free | step.heaviest(base_experts) | (rank < budget)
    return _reselect(step, allowed, ids, weights, scores, choice)


def random_remap(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    primary_experts: Tensor | int,
    seed: Tensor | int,
    experts: int,
) -> tuple[Tensor, Tensor]:
    """SERE with targets drawn at random: what the similarity matrix is worth.

    The same P and the same moving slots as in `sere` with threshold 0 and nothing protected. An
    expert u outside P goes to the v of P with the smallest hash of (seed, u, v): one target for all
    rows, every v as likely as the others, and the same one again for the same seed, u and P. A larger
    P leaves a target as it is unless one of the new experts is drawn.

    Args:
        ids, weights, row_kind, primary_experts: as for `sere`; -1 is passed through.
        seed: integer of which the low 32 bits count. Whoever wants another draw for every layer or
            step puts that into the seed.
        experts: E.

    Returns:
        ids, dtype as given, and the weights unchanged.
    """
    decode = (row_kind == DECODE).unsqueeze(1)
    primary = slot_ranks(ids, weights) < primary_experts
    reads = expert_set(ids, (decode & primary) | (row_kind == PREFILL).unsqueeze(1), experts)
    expert = torch.arange(experts, device=ids.device)
    # `_mix` is one-to-one, so that in a row of the table no two experts draw the same number.
    source = _mix(_mix(torch.zeros_like(expert) + seed) + expert)
    draw = _mix(source.unsqueeze(1) + expert).masked_fill(~reads, _LOW_32 + 1)
    table = torch.where(~reads & reads.any(), draw.argmin(dim=1), expert).to(ids.dtype)
    moved = table[ids.clamp(0, experts - 1).long()]
    return torch.where(decode & ~primary & (ids >= 0) & (ids < experts), moved, ids), weights


def _step(ids: Tensor, weights: Tensor, row_kind: Tensor, experts: int) -> _Step:
    """The step of which `ids`, `weights` and `row_kind` are given as the module has them."""
    routes = ids.masked_fill((ids < 0) | (ids >= experts), -1)
    kind = row_kind.unsqueeze(1)
    return _Step(routes, slot_ranks(routes, weights), kind == DECODE, kind == PREFILL, experts)


def _per_expert(step: _Step, values: Tensor) -> Tensor:
    """Sum over the slots of decode rows of [rows, slots] float values for each expert, [E].

    By way of [rows, E], so that the order of adding, and with it a tie, does not change from run to
    run on a GPU: in a row an expert occurs once.
    """
    counted = step.decode & (step.routes >= 0)
    index = step.routes.masked_fill(~counted, step.experts).long()
    bins = values.new_zeros(values.shape[0], step.experts + 1)
    return bins.scatter_add(1, index, values).sum(0)[:-1]


def _expert_ranks(*keys: Tensor) -> Tensor:
    """Rank of each expert, 0 for the largest key; ties by the next key, then the lower id.

    Args:
        keys: [E] each.

    Returns:
        [E] int64.
    """
    expert = torch.arange(keys[0].shape[0], device=keys[0].device)
    ahead = expert.unsqueeze(0) < expert.unsqueeze(1)
    for key in reversed(keys):
        other, own = key.unsqueeze(0), key.unsqueeze(1)
        ahead = (other > own) | ((other == own) & ahead)
    return ahead.sum(dim=1)


def _reselect(
    step: _Step,
    allowed: Tensor,
    ids: Tensor,
    weights: Tensor,
    scores: Tensor,
    choice: Tensor,
) -> tuple[Tensor, Tensor]:
    """Decode rows within a set of experts.

    Slots of allowed experts stay. The others take, from left to right, the row's best allowed experts
    by `choice` that it does not hold; ties go to the lower id. Slots that none is left for repeat the
    row's heaviest expert with weight 0. Rows of which a slot changed are weighted by the scores of
    their experts, in float32, scaled to the row's former sum; all others stay bit for bit.

    Args:
        step: of `ids` and `weights`.
        allowed: [E] bool, with at least the heaviest expert of every decode row.
        ids, weights, scores, choice: see the module.

    Returns:
        ids and weights, shapes and dtypes as given.
    """
    filled = step.routes >= 0
    at = step.routes.clamp(min=0).long()
    stays = filled & allowed[at]
    lost = step.decode & filled & ~stays

    held = step.decode.new_zeros(step.decode.shape[0], step.experts + 1)
    held = held.scatter(1, at.masked_fill(~stays, step.experts), True)[:, :-1]
    open_to = allowed & ~held & (choice > -torch.inf)
    ranked = (
        choice.masked_fill(~open_to, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    )
    turn = lost.cumsum(1) - 1
    served = lost & (turn < open_to.sum(1, keepdim=True))
    next_best = ranked.gather(1, turn.clamp(0, step.experts - 1))
    heaviest = at.gather(1, step.ranks.argmin(dim=1, keepdim=True))
    chosen = torch.where(lost, torch.where(served, next_best, heaviest), at)

    carries = filled & (served | ~lost)
    gate = scores.gather(1, chosen).float().masked_fill(~carries, 0)
    # Scores that all underflow say nothing; the row is shared evenly, and its sum kept.
    gate = torch.where(gate.sum(1, keepdim=True) > 0, gate, carries.float())
    total = weights.float().masked_fill(~filled, 0).sum(1, keepdim=True)
    scaled = gate * (total / gate.sum(1, keepdim=True))
    changed = lost.any(1, keepdim=True) & filled
    new_ids = torch.where(lost, chosen.to(ids.dtype), ids)
    return new_ids, torch.where(changed, scaled.to(weights.dtype), weights)


def _mix(x: Tensor) -> Tensor:
    """A one-to-one hash of 32-bit numbers held in int64: the finaliser of splitmix32.

    The multipliers are below 2^31, so that no product overflows.
    """
    x = x & _LOW_32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW_32
    return x ^ (x >> 15)
