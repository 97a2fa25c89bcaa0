"""Minibatches for training and for looking at held-out loss: one task, one picture size, B items."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.pocket.special import token_id
from harness.pocket.world import cc, ocr, rag
from harness.pocket.world.draw import TRAIN, Drawn, Draws, Marks, things_by_patch, together
from harness.pocket.world.several import several
from harness.pocket.world.text import PAD, Codec
from harness.pocket.world.things import things_of

TASKS = ("ocr", "cc", "rag")
LENGTH_MULTIPLE = 16
ARRANGEMENTS = 4
"""Most different arrangements of notes in a minibatch."""


@dataclass(frozen=True)
class Minibatch:
    """Items of one task.

    Attributes:
        pixels: uint8 [N, 3, H, W], pictures in the order in which the items hold them.
        tokens: int64 [B, L], conversations padded at the end.
        answer: bool [B, L], tokens that the model is to say.
        valid: bool [B, L], tokens that are no padding.
        things: bool [N, patches, things], for the auxiliary loss.
        kind: int64 [B], index into `kinds`.
        kinds: names of the items' categories.
        print_px: int64 [B], size of the print; 0 where there is none.
    """

    pixels: Tensor
    tokens: Tensor
    answer: Tensor
    valid: Tensor
    things: Tensor
    kind: Tensor
    kinds: tuple[str, ...]
    print_px: Tensor

    def right(self, likeliest: Tensor) -> Tensor:
        """Which first answers have no mistake: what greedy decoding would say. bool [B].

        Args:
            likeliest: int64 [B, L], the likeliest token after each token. The first turn alone is
                what the benchmarks ask.
        """
        first = (self.tokens == token_id("<|im_start|>")).cumsum(1)[:, 1:] <= 2
        wrong = (likeliest[:, :-1] != self.tokens[:, 1:]) & self.answer[:, 1:] & first
        return ~wrong.any(1)

    def parts(self, n: int, order: Tensor) -> list[Minibatch]:
        """The items in a new order (int64 [B]), in `n` parts of about the same size."""
        pictures = len(self.pixels) // len(self.tokens)
        found = []
        for chosen in order.tensor_split(n):
            step = torch.arange(pictures, device=order.device)
            image = (chosen[:, None] * pictures + step).flatten()
            found.append(
                Minibatch(
                    self.pixels[image], self.tokens[chosen], self.answer[chosen],
                    self.valid[chosen], self.things[image], self.kind[chosen], self.kinds,
                    self.print_px[chosen],
                )
            )  # fmt: skip
        return found


def draw(
    codec: Codec, draws: Draws, rng: random.Random, task: str, n: int, split: str
) -> Minibatch:
    """A minibatch of about `n` items (exactly so for "cc" and "rag").

    Args:
        codec: glyphs and tokens.
        draws: randomness of contents, on the device.
        rng: randomness of shapes.
        task: one of `TASKS`.
        n: items, at least 8.
        split: train or held out.
    """
    if task == "ocr":
        return merged(codec, _ocr(codec, draws, rng, n, split))
    return merged(codec, (_cc if task == "cc" else _rag)(codec, draws, rng, n, split))


def _cc(codec: Codec, draws: Draws, rng: random.Random, n: int, split: str) -> list[Drawn]:
    canvas = rng.choice([c for c in ocr.CANVASES if min(c) >= 3 * cc.SIDE])
    chinese = 2 * n // 5
    return [
        cc.scenes(
            codec, draws, count, canvas=canvas, split=split, chinese=language, turns=3,
            open_share=0.5 if split == TRAIN else 0.0,
        )
        for language, count in ((False, n - chinese), (True, chinese))
    ]  # fmt: skip


def _rag(codec: Codec, draws: Draws, rng: random.Random, n: int, split: str) -> list[Drawn]:
    # Several arrangements in a batch: with one, when to stop is the same for all of its items, and
    # is learned from the batch before instead of from the notes.
    total = rng.randint(3, 12)
    fitting = [a for a in rag.arrangements(split) if sum(a[0]) == total]
    chosen = rng.sample(fitting, min(ARRANGEMENTS, len(fitting), n))
    canvas = rng.choice(rag.CANVASES)
    return [
        rag.notes(
            codec, draws, n * (i + 1) // len(chosen) - n * i // len(chosen), canvas=canvas,
            split=split, chinese=rng.random() < 0.4, steps=steps, documents=documents,
            asides=3 if split == TRAIN else 0,
        )
        for i, (steps, documents) in enumerate(chosen)
    ]  # fmt: skip


def _ocr(codec: Codec, draws: Draws, rng: random.Random, n: int, split: str) -> list[Drawn]:
    canvas = rng.choice(ocr.CANVASES)
    if rng.random() < 0.15:
        images = rng.choice((2, 2, 3, 4))
        bands = [ocr.LARGE, ocr.FINE]
        one = ocr.lines(codec, draws, images * (n // 2), canvas=canvas, split=split, bands=bands)
        return [several(codec, one, images)]
    drawn = [
        ocr.lines(
            codec, draws, 3 * n // 8, canvas=canvas, split=split,
            bands=[ocr.LARGE, ocr.FINE, ocr.FINE, ocr.MIDDLE],
        )
    ]  # fmt: skip
    for make, share in ((ocr.slips, 3 * n // 8), (ocr.tables, n // 4)):
        band = rng.choices([ocr.LARGE, ocr.MIDDLE, ocr.FINE], [0.3, 0.15, 0.55])[0]
        rows = rng.randint(2, 3) if band == ocr.LARGE else rng.randint(3, 7)
        drawn.append(
            make(
                codec, draws, share, canvas=canvas, split=split, band=band,
                chinese=rng.random() < 0.35, rows=rows, turns=min(3, rows),
            )
        )  # fmt: skip
    return drawn


def merged(codec: Codec, parts: Sequence[Drawn]) -> Minibatch:
    """Drawn batches with pictures of one size as one minibatch."""
    joined = [p.conversation(codec, multiple=LENGTH_MULTIPLE) for p in parts]
    longest = max(j.ids.shape[1] for j in joined)

    def padded(t: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(t, (0, longest - t.shape[1]), value=value)

    marks, first = [], 0
    for p in parts:
        m = p.marks
        marks.append(Marks(torch.where(m.image >= 0, m.image + first, -1), m.x, m.y, m.thing))
        first += len(p.pixels)
    pixels = torch.cat([p.pixels for p in parts])
    things = things_of(codec.sheets).total
    length = torch.cat([j.length for j in joined])
    height, width = pixels.shape[2:]
    return Minibatch(
        pixels,
        torch.cat([padded(j.ids, PAD) for j in joined]),
        torch.cat([padded(j.answer, 0) for j in joined]),
        torch.arange(longest, device=length.device) < length[:, None],
        things_by_patch(together(marks), len(pixels), height, width, things),
        torch.cat([p.kind for p in parts]),
        parts[0].kinds,
        torch.cat([p.print_px for p in parts]),
    )
