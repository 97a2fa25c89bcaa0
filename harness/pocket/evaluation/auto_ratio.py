"""``python -m harness.pocket.evaluation.auto_ratio``: would a ratio chosen for each image beat fixed ones?

Each rule reads an image's scores (attention received in the last layer of the vision encoder) and
says how many of its tokens stay: the highest ones. Pages of fine print, single lines and scenes, as
many of each, are answered with what stays. The answers are those of the training network, in which
one is right if every token of it is the likeliest; tokens that go keep nobody's place, as in the
engine. Prints a line for each setting, and writes them as CSV.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness.endings import ended
from harness.pocket import sheets
from harness.pocket.model import ensure
from harness.pocket.network import Network, Vision, VisionAttention, positions_of
from harness.pocket.protect import load_network
from harness.pocket.special import token_id
from harness.pocket.train import hide
from harness.pocket.world import cc, ocr
from harness.pocket.world.batch import Minibatch, merged
from harness.pocket.world.draw import HELD_OUT, MERGED, Drawn, Draws
from harness.pocket.world.text import Codec
from kernels.visionzip.reference import attention_received, merge_unit_scores

IMAGE_PAD = token_id("<|image_pad|>")
ROUNDS = 3
"""Draws of each source, of other sizes and languages."""

Rule = Callable[[Tensor], Tensor]
"""Scores [images, tokens], mean 1 each, to how many tokens of each image stay, [images]."""


def fixed(ratio: float) -> Rule:
    """The same share of every image."""
    return lambda scores: torch.full((len(scores),), int(ratio * scores.shape[1]))


def above(threshold: float) -> Rule:
    """Tokens that receive at least so much."""
    return lambda scores: (scores >= threshold).sum(1)


def coverage(share: float) -> Rule:
    """The fewest tokens that receive this share of all attention."""

    def count(scores: Tensor) -> Tensor:
        mass = scores.sort(1, descending=True).values.cumsum(1)
        return (mass < share * mass[:, -1:]).sum(1) + 1

    return count


def content(factor: float) -> Rule:
    """A ratio of `factor` times mean(max(ln s, 0)), what ``vision.budget=log_excess`` shares out by."""

    def count(scores: Tensor) -> Tensor:
        return (factor * scores.clamp(min=1).log().mean(1) * scores.shape[1]).round().long()

    return count


RULES: Mapping[str, tuple[Callable[[float], Rule], tuple[float, ...]]] = {
    "fixed": (fixed, (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)),
    "content": (content, (5.0, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5)),
    "above": (above, (0.3, 0.5, 0.6, 0.8, 1.0, 1.2)),
    "coverage": (coverage, (0.98, 0.95, 0.9, 0.8, 0.7, 0.6)),
}


@dataclass(frozen=True)
class Encoded:
    """Questions of one source, their images encoded and scored.

    Attributes:
        source: name of what was drawn.
        batch: of B questions with an image each.
        vision: the encoder's output.
        scores: float32 [B, tokens].
    """

    source: str
    batch: Minibatch
    vision: Vision
    scores: Tensor


def sources(codec: Codec, draws: Draws, n: int, turn: int) -> Iterator[tuple[str, Drawn]]:
    """What is asked in one round, `n` questions of each source."""
    square, split = (192, 192), HELD_OUT
    rows = 4 + turn % 3
    for name, make, chinese in (
        ("fine slip", ocr.slips, turn % 3 == 1),
        ("fine table", ocr.tables, turn % 3 == 2),
    ):
        yield (
            name,
            make(
                codec, draws, n, canvas=square, split=split, band=ocr.FINE, chinese=chinese,
                rows=rows, turns=1,
            ),
        )  # fmt: skip
    for name, canvas, band in (
        ("large line", (160, 224), ocr.LARGE),
        ("fine line", (224, 160), ocr.FINE),
    ):
        yield name, ocr.lines(codec, draws, n, canvas=canvas, split=split, bands=[band])
    for canvas in (square, (160, 192)):
        chinese = turn % 3 == 1
        scene = cc.scenes(codec, draws, n, canvas=canvas, split=split, chinese=chinese, turns=1)
        yield "scene", scene


@torch.inference_mode()
def encode(network: Network, source: str, batch: Minibatch) -> Encoded:
    """Run the encoder, and score its tokens in its last layer."""
    found: list[Tensor] = []
    attention = network.model.visual.blocks[-1].get_submodule("attn")
    assert isinstance(attention, VisionAttention)
    images = len(batch.pixels)

    def score(_: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        query, key = (t.transpose(1, 2) for t in attention.heads_of(*args)[:2])
        bounds = [i * query.shape[1] for i in range(images + 1)]
        scale = query.shape[-1] ** -0.5
        found.append(attention_received(query.flatten(0, 1), key.flatten(0, 1), bounds, scale))

    handle = attention.register_forward_pre_hook(score)
    vision = network.encode(batch.pixels.float() / 127.5 - 1)
    handle.remove()
    scores = merge_unit_scores(found[0], network.recipe.spatial_merge_size**2)
    return Encoded(source, batch, vision, scores.view(images, -1))


@torch.inference_mode()
def right(network: Network, asked: Encoded, count: Tensor) -> Tensor:
    """Which questions are answered right with `count` tokens of each image. bool [B]."""
    rank = torch.argsort(asked.scores, dim=1, descending=True, stable=True).argsort(1)
    height, width = asked.batch.pixels.shape[2:]
    grid = (height // MERGED, width // MERGED)
    positions = positions_of(asked.batch.tokens, IMAGE_PAD, grid)
    hidden = rank >= count[:, None]
    batch, positions, vision = hide(asked.batch, positions, asked.vision, hidden)
    out = network(vision, batch.tokens, positions)
    return batch.right(network.lm_head(out.hidden).argmax(-1))


def main() -> int:
    """Print and write the table; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.pocket.evaluation.auto_ratio", description=__doc__
    )
    parser.add_argument("--n", type=int, default=32, help="questions of a source and round")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--out", type=Path, help="a CSV file")
    args = parser.parse_args()
    if args.n < 1:
        parser.error(f"--n {args.n}: takes a whole number >= 1")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed}: takes a whole number from 0 on")
    if args.out is not None and args.out.is_dir():
        parser.error(f"--out {args.out}: is a folder; takes a file")
    network, codec = load_network(ensure()), Codec(sheets.load())
    draws = Draws(torch.Generator().manual_seed(args.seed))
    asked = [
        encode(network, name, merged(codec, [drawn]))
        for turn in range(ROUNDS)
        for name, drawn in sources(codec, draws, args.n, turn)
    ]
    names = list(dict.fromkeys(e.source for e in asked))
    table = []
    for rule, (make, settings) in RULES.items():
        for setting in settings:
            kept: dict[str, list[Tensor]] = {name: [] for name in names}
            good: dict[str, list[Tensor]] = {name: [] for name in names}
            for e in asked:
                count = make(setting)(e.scores).clamp(1, e.scores.shape[1])
                kept[e.source].append(count / e.scores.shape[1])
                good[e.source].append(right(network, e, count).float())
            row: dict[str, object] = {"rule": rule, "setting": setting}
            for title, values in (("kept", kept), ("right", good)):
                flat = {name: torch.cat(v) for name, v in values.items()}
                row[title] = round(float(torch.cat(list(flat.values())).mean()), 4)
                row |= {f"{title} {name}": round(float(v.mean()), 4) for name, v in flat.items()}
            table.append(row)
            print(f"{rule:9s} {setting:5.2f}  kept {row['kept']:.3f}  right {row['right']:.3f}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
