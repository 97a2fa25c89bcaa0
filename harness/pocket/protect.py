"""``python -m harness.pocket.protect``: mark the pocket model's protected experts, beside its weights.

An expert is worth protecting if re-routing away from it makes right answers less likely, see
`harness.calibration.protection`. Here that is measured on the training split, teacher-forced: the
rows of answers, which serving decodes, are re-routed as in batches of requests, each at a moment of its
own; the rows of prompts, which serving prefills, keep their routes.

Only what changes is computed. Answers come last, so prompts' keys and values are computed once; and an
expert of one layer changes nothing below that layer.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from harness.calibration import PROTECTION_FILE, SIMILARITY_FILE
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.protection import Spared, loss_increases, mark_costliest
from harness.calibration.similarity import Provenance, load_similarity, save_protection
from harness.endings import ended
from harness.pocket import cache, sheets
from harness.pocket.answers import (
    Moments,
    Tail,
    attend,
    blocks,
    moments,
    reroute,
    tail_of,
    used_experts,
)
from harness.pocket.model import FOLDER, WEIGHTS_FILE, one_thread
from harness.pocket.network import Network, TextBlock, expert_weights
from harness.pocket.recipe import Recipe
from harness.pocket.special import token_id
from harness.pocket.world.batch import Minibatch, draw
from harness.pocket.world.draw import TRAIN, Draws
from harness.pocket.world.text import Codec

PROTECTED = 4
"""Experts marked in each layer."""
PRIMARY_EXPERTS = 2
"""K: a row's heaviest slots, which re-routing leaves alone."""
BATCH = 8
"""Requests that decode together."""
BATCHES: Mapping[str, tuple[int, int]] = {"rag": (8, 8)}
"""Minibatches and items of each, by task: notes alone, whose answers are long enough for it to matter.
Marks made for short answers too protect long ones no better than by lot (`runs/reference/rerouting`)."""
IMAGE_PAD = token_id("<|image_pad|>")


def load_network(folder: Path) -> Network:
    """The model of a checkpoint folder in float32, for evaluation."""
    network = Network(Recipe())
    network.load_state_dict(load_file(folder / WEIGHTS_FILE))
    return network.eval()


def held_in_batches(seed: int) -> dict[str, list[Minibatch]]:
    """Conversations of the training split, as `BATCHES` says."""
    codec = Codec(sheets.load())
    found: dict[str, list[Minibatch]] = {}
    for task, (count, items) in BATCHES.items():
        rng = random.Random(f"pocket protection/{task}/{seed}")
        draws = Draws(torch.Generator().manual_seed(rng.getrandbits(62)))
        found[task] = [draw(codec, draws, rng, task, items, TRAIN) for _ in range(count)]
    return found


class AnswerLoss:
    """Mean loss of first answers, as `harness.calibration.protection.Loss`: of all tasks alike.

    A task's loss is the mean over its answers' tokens [nats].
    """

    @torch.inference_mode()
    def __init__(
        self,
        network: Network,
        batches: Mapping[str, Sequence[Minibatch]],
        similarity: Tensor,
        primary_experts: int = PRIMARY_EXPERTS,
    ) -> None:
        self._network = network
        self._primary = primary_experts
        self._similarity = similarity
        self._tails: dict[str, list[_Asked]] = {}
        for task, found in batches.items():
            self._tails[task] = []
            for number, batch in enumerate(found):
                tail = tail_of(network, batch)
                asked = _Asked(tail, moments(tail, BATCH, number), [tail.states[0]])
                asked.total = self._total(asked, None)
                self._tails[task].append(asked)

    @torch.inference_mode()
    def __call__(self, spared: Spared | None) -> float:
        """The loss with everything re-routed in the rows of answers, but one expert if one is spared."""
        means = []
        for asked in self._tails.values():
            total = sum(a.total if spared is None else self._total(a, spared) for a in asked)
            means.append(total / sum(int(a.tail.used.sum()) for a in asked))
        return sum(means) / len(means)

    def _total(self, asked: _Asked, spared: Spared | None) -> float:
        """Summed over a batch's tokens; the first time, what goes into each layer is kept."""
        tail, first = asked.tail, spared.layer if spared else 0
        x = asked.states[first]
        for number, block in enumerate(blocks(self._network)[first:], first):
            if number > first:
                x = x + attend(block, x, tail, tail.past[number])
                if spared is None:
                    asked.states.append(x)
            own = spared.expert if spared is not None and number == first else None
            x = x + self._mix(block, x, asked, number, own)
        said = self._network.model.language_model.norm(x[tail.used])
        logits = self._network.lm_head(said)
        return float(functional.cross_entropy(logits, tail.target[tail.used], reduction="sum"))

    def _mix(
        self, block: TextBlock, x: Tensor, asked: _Asked, number: int, spared: int | None
    ) -> Tensor:
        used = asked.tail.used
        rows = block.post_attention_layernorm(x[used])
        slots = block.mlp.top_k
        weights = expert_weights(block.mlp.gate(rows), slots)
        protected = torch.zeros(weights.shape[1], dtype=torch.bool)
        if spared is not None:
            protected[spared] = True
        weights, _, _ = reroute(
            weights, asked.when, self._primary, self._similarity[number], 0.0, protected, slots
        )
        y = torch.zeros_like(x)
        y[used] = used_experts(block.mlp.experts, rows, weights)
        return y


@dataclass
class _Asked:
    """A batch of answers: when its rows are decoded, and what is kept of it with everything re-routed.

    Attributes:
        states: float32 [B, R, hidden], what goes into each layer.
        total: summed loss.
    """

    tail: Tail
    when: Moments
    states: list[Tensor]
    total: float = 0.0


def costs_of(network: Network, similarity: Tensor, primary_experts: int) -> Tensor:
    """What re-routing away from each expert costs on the training split, float64 [layers, E]."""
    layers, experts, _ = similarity.shape
    loss = AnswerLoss(network, held_in_batches(seed=0), similarity, primary_experts)
    return loss_increases(loss, layers, experts)


def mark(folder: Path, count: int = PROTECTED) -> Tensor:
    """Measure, and write the marks beside a checkpoint's weights.

    Args:
        folder: as `harness.pocket.model.build` makes it.
        count: experts to mark in each layer.

    Returns:
        float64 [layers, experts], what moving away from each expert costs [nats a token].

    Raises:
        CalibrationError: the similarity beside the model is missing or another model's.
    """
    r = Recipe()
    model = model_fingerprint(folder)
    similarity = load_similarity(
        folder / SIMILARITY_FILE, layers=r.layers, experts=r.experts, model_hash=model
    )
    with one_thread():
        batches = held_in_batches(seed=0)
        loss = AnswerLoss(load_network(folder), batches, similarity)
        increases = loss_increases(loss, r.layers, r.experts)
    provenance = Provenance(
        measure=f"loss_increase_k{PRIMARY_EXPERTS}_b{BATCH}",
        model_sha256=model,
        data_sha256=_hash(batches),
        layer_indices=tuple(range(r.layers)),
    )
    save_protection(folder / PROTECTION_FILE, mark_costliest(increases, count), provenance)
    return increases


def protect(folder: Path, count: int = PROTECTED) -> Tensor:
    """As `mark`, in a copy of the folder that then takes its place.

    Raises:
        CalibrationError: as `mark`.
        harness.pocket.cache.CacheError: the place cannot be written.
    """
    found = []

    def fill(draft: Path) -> None:
        skip = shutil.ignore_patterns(cache.MANIFEST)
        shutil.copytree(folder, draft, dirs_exist_ok=True, ignore=skip)
        found.append(mark(draft, count))

    cache.write_folder(folder, fill)
    return found[0]


def _hash(batches: Mapping[str, Sequence[Minibatch]]) -> str:
    digest = hashlib.sha256()
    for batch in (b for found in batches.values() for b in found):
        digest.update(batch.tokens.numpy().tobytes() + batch.pixels.numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    """Protect, and print each layer's marked experts; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.pocket.protect",
        description="Mark the pocket model's protected experts, beside its weights.",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default: the bundled")
    parser.add_argument("--count", type=int, default=PROTECTED, help=f"a layer ({PROTECTED})")
    arguments = parser.parse_args()
    if not 1 <= arguments.count <= Recipe().experts:
        parser.error(
            f"--count {arguments.count}: takes a whole number from 1 to {Recipe().experts}"
        )
    if not (arguments.folder / WEIGHTS_FILE).is_file():
        parser.error(f"{arguments.folder}: holds no {WEIGHTS_FILE}")
    try:
        increases = protect(arguments.folder.resolve(), arguments.count)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for layer, row in enumerate(increases):
        best = row.argsort(descending=True, stable=True)[: arguments.count].tolist()
        chosen = ", ".join(f"{e} (+{row[e]:.4f})" for e in best)
        print(f"layer {layer}: {chosen}; median of all {row.median():.4f} nats a token")
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
