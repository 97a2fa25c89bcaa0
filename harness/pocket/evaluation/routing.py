"""``python -m harness.pocket.evaluation.routing WEIGHTS``: what decoding owes to its experts.

For use between pieces of training: held-out answers with the experts of decoded tokens changed, the
prompt's left alone as in the engine. Answers are teacher-forced (right if every token is the
likeliest), which takes seconds on a GPU. A model in which any eight experts do as well as the chosen
ones has nothing to show about re-routing.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from harness.endings import ended
from harness.pocket import sheets
from harness.pocket.initial import families_of
from harness.pocket.network import MixtureOfExperts, Network, expert_weights, positions_of
from harness.pocket.recipe import Recipe
from harness.pocket.special import token_id
from harness.pocket.weights import read_weights
from harness.pocket.world.batch import TASKS, Minibatch, draw
from harness.pocket.world.draw import HELD_OUT, MERGED, Draws
from harness.pocket.world.text import Codec

IMAGE_PAD = token_id("<|image_pad|>")

Change = Callable[[Tensor, int], Tensor]
"""Router logits [rows, experts] and the model's top-k to weights [rows, experts]."""


def plain_top(k: int) -> Change:
    """The k best alone."""
    return lambda logits, _: expert_weights(logits, k)


def any_experts(logits: Tensor, top_k: int) -> Tensor:
    """As many experts as the model takes, by lot."""
    g = torch.Generator(logits.device).manual_seed(0)
    lots = torch.rand(logits.shape, generator=g, device=logits.device)
    return torch.zeros_like(logits).scatter(-1, lots.topk(top_k, -1).indices, 1 / top_k)


def no_experts(logits: Tensor, top_k: int) -> Tensor:
    """None at all."""
    return torch.zeros_like(logits)


CHANGES: Mapping[str, Change | None] = {
    "as trained": None,
    "top-4": plain_top(4),
    "top-2": plain_top(2),
    "top-1": plain_top(1),
    "eight by lot": any_experts,
    "none": no_experts,
}


@contextlib.contextmanager
def decoding_with(network: Network, change: Change | None, decoded: Tensor) -> Iterator[None]:
    """While open, the rows `decoded` (bool [B · L]) take the experts that `change` gives."""

    def forward_of(block: MixtureOfExperts) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            rows = x.flatten(0, 1)
            logits = block.gate(rows)
            weights = expert_weights(logits, block.top_k)
            if change is not None:
                weights = torch.where(decoded[:, None], change(logits, block.top_k), weights)
            return block.experts(rows, weights).view(x.shape), logits.view(*x.shape[:-1], -1)

        return forward

    blocks = [layer.get_submodule("mlp") for layer in network.model.language_model.layers]
    for block in blocks:
        assert isinstance(block, MixtureOfExperts)
        block.__dict__["forward"] = forward_of(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["forward"]


@torch.inference_mode()
def right(network: Network, batch: Minibatch, change: Change | None) -> Tensor:
    """Which first answers are right, bool [B]."""
    height, width = batch.pixels.shape[2:]
    positions = positions_of(batch.tokens, IMAGE_PAD, (height // MERGED, width // MERGED))
    device = batch.pixels.device.type
    decoded = batch.answer.flatten()
    with torch.autocast(device, torch.bfloat16), decoding_with(network, change, decoded):
        vision = network.encode(batch.pixels.float() / 127.5 - 1)
        hidden = network(vision, batch.tokens, positions).hidden
        likeliest = network.lm_head(hidden).argmax(-1)
    return batch.right(likeliest)


def own_share(network: Network, seed: int, families: int) -> list[float]:
    """Of each layer, how much of its experts' norm is not their family's mean, 0 to 1."""
    found = []
    for i, layer in enumerate(network.model.language_model.layers):
        weight = layer.get_submodule("mlp.experts").get_parameter("down_proj").detach()
        name = f"model.language_model.layers.{i}.mlp.experts.down_proj"
        family = families_of(seed, name, len(weight), families).to(weight.device)
        mean = torch.stack([weight[family == f].mean(0) for f in range(families)])
        found.append(float((weight - mean[family]).norm() / weight.norm()))
    return found


def main() -> int:
    """Print the table; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.pocket.evaluation.routing", description=__doc__
    )
    parser.add_argument("weights", type=Path, help="model.safetensors of harness.pocket.train")
    parser.add_argument("--rounds", type=int, default=4, help="batches of each task")
    parser.add_argument("--items", type=int, default=96, help="of a batch")
    parser.add_argument("--families", type=int, default=8, help="as in training")
    parser.add_argument("--seed", type=int, default=0, help="as in training")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, least in (("rounds", 1), ("items", 8), ("families", 1), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: takes a whole number >= {least}")
    if Recipe().experts % args.families:
        parser.error(f"--families {args.families}: takes a divisor of {Recipe().experts}")
    try:
        weights = read_weights(args.weights)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    network = Network(Recipe()).to(device)
    with torch.no_grad():
        for name, value in network.state_dict().items():
            value.copy_(weights[name])
    codec = Codec(sheets.load().to(device))
    draws, rng = Draws(torch.Generator(device).manual_seed(77)), random.Random(5)
    asked = {
        task: [draw(codec, draws, rng, task, args.items, HELD_OUT) for _ in range(args.rounds)]
        for task in TASKS
    }
    for name, change in CHANGES.items():
        good = {
            task: torch.cat([right(network, b, change) for b in batches])
            for task, batches in asked.items()
        }
        print(f"{name:13s}", *(f"{t} {float(g.float().mean()):.3f}" for t, g in good.items()))
    shares = own_share(network, args.seed, args.families)
    print("own share of the experts' norm, by layer:", *(f"{s:.3f}" for s in shares))
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
