"""What the servers ought to say, computed another way: Transformers in fp32, and nothing of ours.

The whole images go through the vision encoder; the attention that every patch receives in one of
its layers is summed by hand; the rows that a turn's budget does not cover are cut out of the
prompt, as they are out of the DeepStack features if the model has them; what is left keeps the uncut
prompt's positions.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import apply_rotary_pos_emb_vision


@dataclass(frozen=True)
class Prompt:
    """An encoded conversation, before any pruning.

    Attributes:
        ids: [tokens].
        positions: [3, tokens], of Transformers' `get_rope_index`.
        embeds: [tokens, hidden], image features in place.
        deepstack: a [vision tokens, hidden] for each level; none if the model has no DeepStack.
        scores: [vision tokens], attention received, averaged over merge units.
        keys: [vision tokens, head_dim], of the same layer, averaged over merge units and heads.
        image_of: [vision tokens], image that each belongs to.
        turn_of: turn of each image.
    """

    ids: Tensor
    positions: Tensor
    embeds: Tensor
    deepstack: list[Tensor]
    scores: Tensor
    keys: Tensor
    image_of: Tensor
    turn_of: list[int]


@dataclass(frozen=True)
class Expected:
    """A greedy answer.

    Attributes:
        ids: its tokens.
        logprobs: of each of them.
        gaps: how far each lies above the runner-up.
        prompt_tokens: tokens of the pruned prompt.
        images: (before, after) for each image.
        margin: how narrowly a token was kept, as a difference of scores; inf if all were.
        route_gaps: how narrowly, at worst, an expert was chosen in the step that gave each token, as
            a difference of router probabilities.
    """

    ids: list[int]
    logprobs: list[float]
    gaps: list[float]
    prompt_tokens: int
    images: list[tuple[int, int]]
    margin: float
    route_gaps: list[float]


class Routing(Protocol):
    """Changes one decode row's routes: expert ids, heaviest first, and their weights."""

    @property
    def primary(self) -> int:
        """Experts that a row keeps."""

    def __call__(
        self, layer: int, ids: list[int], weights: list[float]
    ) -> tuple[list[int], list[float]]: ...


@dataclass(frozen=True)
class Sere:
    """Re-routing in a batch of one row: its own heaviest experts are all that it can move to.

    Attributes:
        similarity: [layers, experts, experts].
        primary: K.
        threshold: rho.
        protected: (layer, expert) pairs that stay.
    """

    similarity: Tensor
    primary: int
    threshold: float
    protected: frozenset[tuple[int, int]] = frozenset()

    def __call__(
        self, layer: int, ids: list[int], weights: list[float]
    ) -> tuple[list[int], list[float]]:
        new = list(ids)
        for slot, expert in enumerate(ids):
            alike = self.similarity[layer, expert].tolist()
            # The lowest id among the most alike.
            to = max(sorted(ids[: self.primary]), key=lambda v: alike[v])
            stays = slot < self.primary or (layer, expert) in self.protected
            if not stays and alike[to] >= self.threshold:
                new[slot] = to
        return new, weights


@dataclass(frozen=True)
class Topk:
    """Only the `primary` heaviest experts, their weights scaled to the old sum or left alone."""

    primary: int
    renormalize: bool

    def __call__(
        self, layer: int, ids: list[int], weights: list[float]
    ) -> tuple[list[int], list[float]]:
        kept = weights[: self.primary]
        scale = sum(weights) / sum(kept) if self.renormalize else 1.0
        return ids[: self.primary], [w * scale for w in kept]


class Oracle:
    """A checkpoint of any Qwen-VL family in Transformers, fp32, eager attention, on the CPU."""

    def __init__(self, path: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(path)
        self.model = AutoModelForImageTextToText.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()

    @torch.no_grad()
    def encode(
        self, messages: list[dict[str, Any]], images: list[Image.Image], layer: int = -1
    ) -> Prompt:
        """Run the vision encoder over whole images and lay out the unpruned prompt.

        Args:
            messages: in OpenAI's format.
            images: theirs, in order.
            layer: of the encoder, whose attention scores the tokens.
        """
        text = self.processor.apply_chat_template(
            copy.deepcopy(messages),  # it rewrites what it is given
            tokenize=False,
            add_generation_prompt=True,
        )
        batch = self.processor(text=[text], images=images or None, return_tensors="pt")
        ids = batch["input_ids"]
        core = self.model.model
        embeds = core.get_input_embeddings()(ids)[0]
        grids = batch.get("image_grid_thw")
        types = (ids == self.model.config.image_token_id).int()
        positions, _ = core.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)
        nothing = torch.zeros(0)
        if grids is None:
            return Prompt(ids[0], positions[:, 0], embeds, [], nothing, nothing, nothing.long(), [])

        attention = core.visual.blocks[layer].attn
        with _inputs_of(attention) as seen:
            features = core.get_image_features(batch["pixel_values"], grids)
        embeds[types[0].bool()] = torch.cat(features.pooler_output)
        scores, keys = zip(
            *(
                [
                    self._in_rows(patches.unflatten(0, (-1, 4)).mean(1), grid.tolist())
                    for patches in _received(attention, *seen, image)
                ]
                for image, grid in enumerate(grids)
            ),
            strict=True,
        )
        levels = getattr(features, "deepstack_features", None) or ()
        return Prompt(
            ids=ids[0],
            positions=positions[:, 0],
            embeds=embeds,
            deepstack=[torch.cat(level) for level in levels],
            scores=torch.cat(scores),
            keys=torch.cat(keys),
            image_of=torch.cat([torch.full((len(s),), i) for i, s in enumerate(scores)]),
            turn_of=self._turns(ids[0].tolist()),
        )

    def _in_rows(self, values: Tensor, grid: list[int]) -> Tensor:
        """Values of an image's tokens row by row; an encoder with windows has them window by window."""
        vision = self.model.config.vision_config
        window = getattr(vision, "window_size", 0) // vision.patch_size // 2
        if not window:
            return values
        places = [(row, column) for row in range(grid[1] // 2) for column in range(grid[2] // 2)]
        by_window = sorted(
            range(len(places)),
            key=lambda i: (places[i][0] // window, places[i][1] // window, places[i]),
        )
        rows = torch.empty_like(values)
        rows[by_window] = values
        return rows

    def _turns(self, ids: list[int]) -> list[int]:
        """Turn of each image: how many ends of turn come before it."""
        end = self.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
        start = self.model.config.vision_start_token_id
        turns, ended = [], 0
        for token in ids:
            ended += token == end
            if token == start:
                turns.append(ended)
        return turns

    @torch.no_grad()
    def answer(
        self,
        prompt: Prompt,
        tokens: int,
        retain_ratio: str = "1",
        *,
        floor: int = 1,
        budget: str = "log_excess",
        merged: float = 0.0,
        routing: Routing | None = None,
        follow: list[int] | None = None,
    ) -> Expected:
        """Prune, then decode greedily. `retain_ratio` is a decimal numeral, and exact.

        `merged` is the share of the kept rows that the other tokens are merged into; `follow` are
        tokens to go on with, whatever is likeliest.
        """
        is_image = prompt.ids == self.model.config.image_token_id
        kept, margin = _kept(prompt, Decimal(retain_ratio), floor, budget, merged)
        embeds = prompt.embeds.clone()
        if merged:
            rows = embeds[is_image]
            margin = min(margin, _merge(prompt, Decimal(retain_ratio), floor, merged, kept, rows))
            embeds[is_image] = rows
        stays = torch.ones(len(prompt.ids), dtype=torch.bool)
        stays[is_image] = kept
        cache = DynamicCache(config=self.model.config.get_text_config())
        ids: list[int] = []
        logprobs: list[float] = []
        gaps: list[float] = []
        route_gaps: list[float] = []
        with self._gates() as gates:
            logits = self._forward(
                embeds[stays],
                prompt.positions[:, stays],
                cache,
                visual_pos_masks=is_image[stays].unsqueeze(0) if prompt.deepstack else None,
                deepstack_visual_embeds=[level[kept] for level in prompt.deepstack] or None,
            )
            gates.routing = routing  # prefill keeps its routes
            # Text goes on where the unpruned prompt ended.
            position = int(prompt.positions.max()) + 1
            for step in range(tokens):
                chances = logits.log_softmax(-1)
                best = chances.topk(2)
                ids.append(follow[step] if follow else int(best.indices[0]))
                logprobs.append(float(chances[ids[-1]]))
                gaps.append(float(best.values[0] - best.values[1]))
                route_gaps.append(gates.take_gap())
                if step < tokens - 1:
                    embed = self.model.model.get_input_embeddings()(torch.tensor(ids[-1:]))
                    at = torch.full((3, 1), position + step)
                    logits = self._forward(embed, at, cache)
        images = range(len(prompt.turn_of))
        return Expected(
            ids,
            logprobs,
            gaps,
            prompt_tokens=int(stays.sum()),
            images=[
                (int((prompt.image_of == i).sum()), int((prompt.image_of[kept] == i).sum()))
                for i in images
            ],
            margin=margin,
            route_gaps=route_gaps,
        )

    def _forward(
        self, embeds: Tensor, positions: Tensor, cache: DynamicCache, **vision: Any
    ) -> Tensor:
        """Logits of the last row."""
        hidden = self.model.model.language_model(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=positions.unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
            **vision,
        ).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[0, -1])
        return logits

    @contextlib.contextmanager
    def _gates(self) -> Iterator[_Gates]:
        """While open, every layer's gate, if it has one, is watched, and does what it is told."""
        gates = _Gates()
        layers = self.model.model.language_model.layers
        handles = [
            layer.mlp.gate.register_forward_hook(functools.partial(gates.pass_through, index))
            for index, layer in enumerate(layers)
            if hasattr(layer.mlp, "gate")
        ]
        try:
            yield gates
        finally:
            for handle in handles:
                handle.remove()


class _Gates:
    """All layers' gates: how narrowly they chose, and what routing changes their answers, if any."""

    def __init__(self) -> None:
        self.routing: Routing | None = None
        self._gap = math.inf

    def take_gap(self) -> float:
        """The narrowest choice since the last look."""
        gap, self._gap = self._gap, math.inf
        return gap

    def pass_through(
        self, layer: int, gate: Any, _args: Any, out: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, ids = out
        ranked = logits.softmax(-1).topk(gate.top_k + 1).values
        gaps = ranked[:, :-1] - ranked[:, 1:]
        self._gap = min(self._gap, float(gaps[:, -1].min()))
        if self.routing is None:
            return out
        assert len(ids) == 1, "only decode steps are re-routed"
        if self.routing.primary < gate.top_k:
            self._gap = min(self._gap, float(gaps[0, self.routing.primary - 1]))
        new_ids, new_weights = self.routing(layer, ids[0].tolist(), weights[0].tolist())
        return logits, torch.tensor([new_weights]), torch.tensor([new_ids])


@contextlib.contextmanager
def _inputs_of(attention: nn.Module) -> Iterator[list[Any]]:
    """While open, notes what `attention` is called with: states, bounds, rotations."""
    seen: list[Any] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.extend([args[0], kwargs["cu_seqlens"], kwargs["position_embeddings"]])

    handle = attention.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _received(
    attention: Any, states: Tensor, bounds: Tensor, rotations: tuple[Tensor, Tensor], image: int
) -> tuple[Tensor, Tensor]:
    """Attention that each patch of one image receives from all its patches, and its key.

    Both are means over heads: [patches] and [patches, head_dim].
    """
    qkv = attention.qkv(states).view(len(states), 3, attention.num_heads, -1)
    query, key = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], *rotations)
    own = slice(int(bounds[image]), int(bounds[image + 1]))
    q, k = query[own].transpose(0, 1).double(), key[own].transpose(0, 1).double()
    weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
    return weights.sum(1).mean(0), k.mean(0)


def kept_tokens(prompt: Prompt, ratio: Decimal, floor: int) -> tuple[Tensor, float]:
    """Which vision tokens stay under the default budget rule, [vision tokens] bool, and how narrowly."""
    return _kept(prompt, ratio, floor, "log_excess", 0.0)


def _kept(
    prompt: Prompt, ratio: Decimal, floor: int, rule: str, merged: float
) -> tuple[Tensor, float]:
    """Which vision tokens stay as they are, and how narrowly the last of them won."""
    if rule == "log_excess":
        return _kept_in_two_stages(prompt, ratio, floor, merged)
    assert rule == "raw"
    score, image_of = prompt.scores.tolist(), prompt.image_of.tolist()
    kept = torch.zeros(len(score), dtype=torch.bool)
    margin = math.inf
    for turn in sorted(set(prompt.turn_of)):
        images = [i for i, t in enumerate(prompt.turn_of) if t == turn]
        own = [j for j, i in enumerate(image_of) if i in images]
        ranked = sorted(own, key=lambda j: (-score[j], j))
        of_image = {i: [j for j in ranked if image_of[j] == i] for i in images}
        floors = [j for ranked_here in of_image.values() for j in ranked_here[:floor]]
        budget = _rows(ratio, merged, len(own), len(floors))[0]
        free = [j for j in ranked if j not in floors][: budget - len(floors)]
        kept[floors + free] = True
        # Who competed with whom: all of a turn for the budget, those of an image for its floor.
        for winners, rivals in [(free, own), *((o[:floor], o) for o in of_image.values())]:
            losers = [score[j] for j in rivals if not kept[j]]
            if winners and losers:
                margin = min(margin, min(score[j] for j in winners) - max(losers))
    return kept, margin


def _rows(ratio: Decimal, merged: float, tokens: int, floors: int) -> tuple[int, int]:
    """Rows of a turn for tokens that stay as they are, and rows that others are merged into."""
    rows = max(int(ratio * tokens), floors, 1)
    targets = 0 if rows == tokens else max(0, min(int(merged * rows), rows - max(floors, 1)))
    return rows - targets, targets


def _merge(
    prompt: Prompt, ratio: Decimal, floor: int, merged: float, kept: Tensor, rows: Tensor
) -> float:
    """Merge into every so many-th of the other tokens those of its image that are most like it.

    Args:
        prompt: whose tokens.
        ratio, floor, merged: as for `Oracle.answer`.
        kept: [vision tokens] bool; the tokens merged into join it, in place.
        rows: [vision tokens, hidden], changed in place.

    Returns:
        How narrowly the least certain token went where it went.
    """
    image_of = prompt.image_of.tolist()
    margin = math.inf
    plain = rows.clone()
    for turn in sorted(set(prompt.turn_of)):
        images = [i for i, t in enumerate(prompt.turn_of) if t == turn]
        own = [j for j, i in enumerate(image_of) if i in images]
        floors = sum(min(floor, image_of.count(i)) for i in images)
        _, count = _rows(ratio, merged, len(own), floors)
        rest = [j for j in own if not kept[j]]
        targets = rest[:: max(1, len(rest) // max(count, 1))][:count]
        came: dict[int, list[int]] = {t: [] for t in targets}
        for j in set(rest) - set(targets):
            near = [t for t in targets if image_of[t] == image_of[j]]
            alike = torch.cosine_similarity(prompt.keys[near], prompt.keys[j], dim=-1)
            ranked = sorted(zip(alike.tolist(), near, strict=True), reverse=True)
            if ranked:
                came[ranked[0][1]].append(j)
            if len(ranked) > 1:
                margin = min(margin, ranked[0][0] - ranked[1][0])
        for t, others in came.items():
            if others:
                rows[t] = plain[t] + plain[others].mean(0)
        kept[targets] = True
    return margin


def _kept_in_two_stages(
    prompt: Prompt, ratio: Decimal, floor: int, merged: float
) -> tuple[Tensor, float]:
    """As `_kept`; images get shares by how far above 1 their scores' logarithms lie."""
    score, image_of = prompt.scores.tolist(), prompt.image_of.tolist()
    kept = torch.zeros(len(score), dtype=torch.bool)
    margin = math.inf
    for turn in sorted(set(prompt.turn_of)):
        images = [i for i, t in enumerate(prompt.turn_of) if t == turn]
        own = {i: [j for j, of in enumerate(image_of) if of == i] for i in images}
        sizes = [len(own[i]) for i in images]
        floors = [min(floor, n) for n in sizes]
        budget = _rows(ratio, merged, sum(sizes), sum(floors))[0]
        mass = [sum(math.log(max(score[j], 1)) for j in own[i]) for i in images]
        shares, narrow = _water(mass, floors, sizes, budget)
        if budget < sum(sizes):
            margin = min(margin, narrow)
        for i, share in zip(images, shares, strict=True):
            ranked = sorted(own[i], key=lambda j: (-score[j], j))
            kept[ranked[:share]] = True
            if 0 < share < len(ranked):
                margin = min(margin, score[ranked[share - 1]] - score[ranked[share]])
    return kept, margin


def _water(
    mass: list[float], floors: list[int], sizes: list[int], budget: int
) -> tuple[list[int], float]:
    """Shares in proportion to `mass` between floors and sizes, and how narrowly rounding fell.

    Images at a bound are set aside, one kind at a time, until the others fit.
    """
    bound: dict[int, int] = {}
    while True:
        free = [i for i in range(len(sizes)) if i not in bound]
        left = budget - sum(bound.values())
        total = sum(mass[i] for i in free)
        ideal = {i: left * mass[i] / total if total else left / len(free) for i in free}
        over = {i: sizes[i] for i in free if ideal[i] > sizes[i]}
        under = {i: floors[i] for i in free if ideal[i] < floors[i]}
        excess = sum(ideal[i] - n for i, n in over.items())
        lack = sum(n - ideal[i] for i, n in under.items())
        if not over and not under:
            break
        bound |= over if excess >= lack else under
    shares = [bound.get(i, int(ideal.get(i, 0))) for i in range(len(sizes))]
    parts = sorted(((ideal[i] - int(ideal[i]), -i) for i in free), reverse=True)
    extra = budget - sum(shares)
    for part in parts[:extra]:
        shares[-part[1]] += 1
    near = parts[extra - 1][0] - parts[extra][0] if 0 < extra < len(parts) else math.inf
    # An ideal that is nearly whole may fall to either side of it.
    whole = min((min(p, 1 - p) for p, _ in parts if p > 0), default=math.inf)
    return shares, min(near, whole)
