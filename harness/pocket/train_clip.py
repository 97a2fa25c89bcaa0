"""``python -m harness.pocket.train_clip FOLDER``: train the pocket CLIP on captions of the pocket world.

Seeded and resumable: started again with the same folder, it goes on from the checkpoint there. The
learning rate falls to 0 over the last 40 % of `--steps`, and recall rises most there: a training
that ran out of `--minutes` is not finished; start it again with the same options.
Writes JSON lines, and at the end how often a picture and its caption find each other.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image as PillowImage
from torch import Tensor

from harness.pocket import clip
from harness.pocket import sheets as sheets_of
from harness.pocket.world.captions import KINDS, Captioned, caption_texts, captioned
from harness.pocket.world.draw import HELD_OUT, TRAIN, Draws
from harness.pocket.world.text import Codec
from harness.pocket.world.things import things_of

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
DRAWN_AT_ONCE = 10
"""Batches that are drawn together: drawing costs the same launches for any number."""


class Batches:
    """The training's batches by step; the same step gives the same batch, on one kind of device."""

    def __init__(self, codec: Codec, n: int, seed: int) -> None:
        self.codec, self.n, self.seed = codec, n, seed
        self.group = -1
        self.drawn: list[Captioned] = []

    def __call__(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pictures, captions, and what they tell of, as `clip.DrawBatch` wants them."""
        group, part = divmod(step, DRAWN_AT_ONCE)
        if group != self.group:
            seed = self.seed * 1_000_003 + group
            draws = Draws(torch.Generator(self.codec.device).manual_seed(seed))
            self.drawn = []  # frees the memory before more is taken
            self.drawn = captioned(
                self.codec, draws, random.Random(seed), self.n, TRAIN, parts=DRAWN_AT_ONCE
            )
            self.group = group
        batch = self.drawn[part]
        return batch.pictures, batch.tokens, batch.things, batch.named


def recall(
    model: clip.Clip, codec: Codec, *, pairs: int = 100, rounds: int = 10, seed: int = 1_234
) -> dict[str, float]:
    """Recall@1 among held-out pairs, by kind and for all kinds mixed, the mean over draws.

    Of both directions the lower one counts, in each draw. 0..1.

    Args:
        model: as `clip.load` gives it; pictures and captions go through its own preprocessing.
        codec: glyphs and tokens.
        pairs: of a draw, with captions that all differ.
        rounds: draws.
        seed: of the draws.
    """
    draws = Draws(torch.Generator(codec.device).manual_seed(seed))
    rng = random.Random(seed)
    found = {}
    for name in (*KINDS, "mixed"):
        kinds = KINDS if name == "mixed" else (name,)
        total = 0.0
        for _ in range(rounds):
            images, captions = _different(codec, draws, rng, pairs, kinds)
            total += clip.retrieval(model, images, captions)
        found[name] = total / rounds
    return found


def _different(
    codec: Codec, draws: Draws, rng: random.Random, pairs: int, kinds: tuple[str, ...]
) -> tuple[list[PillowImage.Image], list[str]]:
    # Of 192 pairs of a thing and a number, 3 * pairs draws give 152 different ones on average.
    batch = captioned(codec, draws, rng, 3 * pairs, HELD_OUT, kinds=kinds)[0]
    batch = batch[torch.randperm(len(batch.kind), generator=_cpu(rng)).to(codec.device)]
    texts = caption_texts(batch.tokens)
    first = list({text: i for i, text in reversed([*enumerate(texts)])}.values())
    rows = sorted(first)[:pairs]
    if len(rows) < pairs:
        raise ValueError(f"only {len(rows)} different captions, not {pairs}")
    pictures = batch.pictures[torch.tensor(rows, device=codec.device)].cpu().numpy()
    return [PillowImage.fromarray(p) for p in pictures], [texts[r] for r in rows]


def _cpu(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(32))


def main(argv: list[str] | None = None) -> int:
    """Train and measure; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.pocket.train_clip", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="of the model, the checkpoint and the log")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training (default 4)")
    parser.add_argument("--steps", type=int, default=2_600, help="of the whole schedule")
    parser.add_argument("--batch", type=int, default=1_024, help="pairs of a step (default 1024)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--aux", type=float, default=0.2, help="weight of the loss on patches")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10, help="draws of the recall (default 10)")
    args = parser.parse_args(argv)
    begun = time.monotonic()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)

    def say(**line: object) -> None:
        text = json.dumps({"s": round(time.monotonic() - begun, 1), **line})
        print(text, flush=True)
        with (folder / LOG).open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def progress(at: clip.Progress) -> None:
        figures = {k: round(getattr(at, k), 4) for k in ("loss", "patch", "whole")}
        say(step=at.step, **figures, pairs_per_s=round(at.pairs_per_s))

    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    say(options=options, torch=torch.__version__)
    codec = Codec(sheets_of.load().to(device))
    done = clip.train_clip(
        Batches(codec, args.batch, args.seed),
        steps=args.steps, seconds=60 * args.minutes, device=device, folder=folder,
        checkpoint=folder / CHECKPOINT, things=things_of(codec.sheets).total, seed=args.seed,
        lr=args.lr, aux=args.aux, log=progress,
    )  # fmt: skip
    figures = {k: None if math.isnan(v) else round(v, 4) for k, v in asdict(done).items()}
    say(trained=figures, done=done.done)
    found = recall(clip.load(device, folder), codec, rounds=args.rounds)
    say(recall_at_1={k: round(v, 4) for k, v in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
