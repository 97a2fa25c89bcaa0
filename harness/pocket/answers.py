"""Answers computed from where they start: what comes before them once, and no row beyond them.

For whoever asks many times what an answer's loss is if its rows are treated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.pocket.network import Experts, Network, TextBlock, positions_of
from harness.pocket.special import token_id
from harness.pocket.world.batch import Minibatch
from harness.pocket.world.draw import MERGED
from kernels.sere.reference import sere_by_step

IMAGE_PAD = token_id("<|image_pad|>")


@dataclass(frozen=True)
class Tail:
    """The answers of a batch of B conversations, each from the row that says its first token.

    R is the longest answer's tokens and one, P the longest prompt's less one. The last token of an
    answer, the end of its turn, is said and never read.

    Attributes:
        states: float32 [B, R, hidden] for each layer, what its experts' norm sees if nothing moves.
        past: keys and values of the first P rows, [B, kv_heads, P, head_dim] each, for each layer.
        turn: cosine and sine of the rows' positions, [B, 1, R, head_dim] each.
        sees: bool [B, 1, R, P + R], causal, and of the first P only those of the item's prompt.
        used: bool [B, R], rows that say a token of the answer.
        decoded: bool [B, R], rows that a server decodes: all but the first, which ends the prompt.
        target: int64 [B, R], the answer's next token where `used`.
    """

    states: tuple[Tensor, ...]
    past: tuple[tuple[Tensor, Tensor], ...]
    turn: tuple[Tensor, ...]
    sees: Tensor
    used: Tensor
    decoded: Tensor
    target: Tensor


def used_experts(experts: Experts, rows: Tensor, weights: Tensor) -> Tensor:
    """What `experts` gives, in a quarter of its arithmetic on a CPU: only rows that an expert has."""
    y = torch.zeros_like(rows)
    for expert, share in enumerate(weights.unbind(1)):
        who = share.nonzero()[:, 0]
        gate, up = (rows[who] @ experts.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = functional.silu(gate) * up * share[who, None]
        y.index_add_(0, who, inner @ experts.down_proj[expert])
    return y


def blocks(network: Network) -> list[TextBlock]:
    """The language model's layers."""
    return [b for b in network.model.language_model.layers if isinstance(b, TextBlock)]


def attend(block: TextBlock, x: Tensor, tail: Tail, past: tuple[Tensor, Tensor]) -> Tensor:
    """What attention adds to the rows of answers.

    Args:
        block: a layer.
        x: float32 [B, R, hidden], what comes into it.
        tail: whose rows they are.
        past: the layer's of `tail`.

    Returns:
        [B, R, hidden].
    """
    attention = block.self_attn
    q, k, v = attention.heads(block.input_layernorm(x), *tail.turn)
    keys, values = (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
    attended = functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=tail.sees, enable_gqa=attention.grouped
    )
    return attention.o_proj(attended.transpose(1, 2).flatten(2))


@torch.inference_mode()
def tail_of(network: Network, batch: Minibatch) -> Tail:
    """Run a batch once, and keep what its first answers need."""
    # The first turn alone is what the benchmarks ask.
    turn = (batch.tokens == token_id("<|im_start|>")).cumsum(1)
    answer = batch.answer & (turn <= 2)
    end = int(answer.any(0).nonzero().max()) + 1
    tokens, answer = batch.tokens[:, :end], answer[:, :end]
    height, width = batch.pixels.shape[2:]
    positions = positions_of(tokens, IMAGE_PAD, (height // MERGED, width // MERGED))
    vision = network.encode(batch.pixels.float() / 127.5 - 1)

    item = torch.arange(len(tokens))[:, None]
    start = answer.int().argmax(1, keepdim=True) - 1
    rows = int(answer.sum(1).max()) + 1
    step, before = torch.arange(rows), int(start.max())
    at = (start + step).clamp(max=end - 1)
    states: list[Tensor] = []
    past: list[tuple[Tensor, Tensor]] = []
    turns: list[tuple[Tensor, ...]] = []

    def attending(module: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
        _, k, v = module.heads(*args)
        past.append((k[:, :, :before].clone(), v[:, :, :before].clone()))
        turns.append(tuple(angles[item, 0, at].unsqueeze(1) for angles in args[1:]))

    def mixing(module: Any, args: tuple[Tensor]) -> None:
        states.append(args[0][item, at])

    hooks = []
    for block in blocks(network):
        hooks.append(block.self_attn.register_forward_pre_hook(attending))
        hooks.append(block.post_attention_layernorm.register_forward_pre_hook(mixing))
    try:
        network(vision, tokens, positions)
    finally:
        for hook in hooks:
            hook.remove()

    prompt = (torch.arange(before) < start)[:, None].expand(-1, rows, -1)
    causal = (step <= step[:, None]).expand(len(tokens), -1, -1)
    length = answer.sum(1, keepdim=True)
    return Tail(
        states=tuple(states),
        past=tuple(past),
        turn=turns[0],
        sees=torch.cat((prompt, causal), 2).unsqueeze(1),
        used=step < length,
        decoded=(step > 0).expand_as(at),
        target=tokens[item, (at + 1).clamp(max=end - 1)],
    )


@dataclass(frozen=True)
class Moments:
    """When the rows of a tail are decoded.

    Attributes:
        of: int64 [rows used], number of the step, -1 for rows that no step decodes.
        age: int64 [rows used], tokens of the answer before it.
        count: steps.
    """

    of: Tensor
    age: Tensor
    count: int


def moments(tail: Tail, batch: int, seed: int) -> Moments:
    """Group a tail's requests into batches, each request starting at a moment of its own."""
    items, rows = tail.used.shape
    start = torch.randint(rows, (items,), generator=torch.Generator().manual_seed(seed))
    step = (start[:, None] + torch.arange(rows)) % rows
    number = torch.arange(items)[:, None] // batch * rows + step
    number = number.masked_fill(~tail.decoded, -1)
    age = torch.arange(rows).expand(items, rows)
    return Moments(number[tail.used], age[tail.used], -(-items // batch) * rows)


def reroute(
    weights: Tensor,
    when: Moments,
    primary: Tensor | int,
    similarity: Tensor,
    threshold: float,
    protected: Tensor,
    slots: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """SERE of all steps at once, see `kernels.sere.reference.sere_by_step`.

    Args:
        weights: float32 [rows, E], zero but for a row's `slots` experts.
        when: the rows' steps; rows of none are left alone.
        primary: K, of all rows or int64 [rows].
        similarity: float [E, E].
        threshold: rho.
        protected: bool [E].
        slots: experts of a row.

    Returns:
        New weights, and the distinct experts of each step before and after, [steps] each.
    """
    total = weights.shape[1]
    shares, ids = (t[:, :slots] for t in weights.sort(dim=1, descending=True, stable=True))
    moved = sere_by_step(
        ids, shares, when.of, when.count, similarity, protected, primary, threshold
    )

    def distinct(experts: Tensor) -> Tensor:
        at = torch.where(when.of < 0, when.count, when.of)[:, None] * total + experts
        flags = torch.zeros((when.count + 1) * total, dtype=torch.bool)
        return flags.index_fill(0, at.flatten(), True).view(-1, total)[:-1].sum(1)

    after = torch.zeros_like(weights).scatter_add(1, moved, shares)
    return after, distinct(ids), distinct(moved)
