"""Pictures of the pocket world with captions, for the pocket CLIP.

Scenes of icons, whose captions name colour, thing and place of up to three of them; pictures of an
icon and a number, as notes hold them; lines of large print. English or Chinese; a kind has one
language in a batch, so that no two captions there say the same in different words. Held out are the
places of scenes and the words and layouts of lines, as in the other tasks; the few pairs of a thing
and a number all occur in training, in other pictures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from harness.pocket.special import token_id
from harness.pocket.tokenizer import character_id, characters
from harness.pocket.world import cc, ocr, rag
from harness.pocket.world.draw import Draws, Marks, things_by_patch
from harness.pocket.world.text import PAD, Codec, Piece, join
from harness.pocket.world.things import PLACES, PLACES_ZH, things_of

KINDS = ("scene", "step", "line")
SHARES = (0.55, 0.25, 0.2)
"""Of each kind in a batch."""
SIDE = 160
"""Width and height of every picture [px]."""
CONTEXT = 128
"""Length to which captions are padded [tokens]."""
END = "<|im_end|>"
MOST_FACTS = 3
FACTS = (0.15, 0.25, 0.6)
"""How often a caption names one, two and three icons, where a scene has as many."""
SCENE_CANVASES = ((160, 160), (160, 160), (192, 192), (160, 192), (224, 160))
LINE_CANVASES = ((160, 160), (160, 160), (192, 192), (160, 224))
"""Height and width in which pictures are drawn [px], before they are squashed to a square."""
CHINESE = 0.4
"""Share of Chinese batches."""


@dataclass(frozen=True)
class Captioned:
    """N pictures and captions.

    Attributes:
        pictures: uint8 [N, SIDE, SIDE, 3].
        tokens: int64 [N, CONTEXT], captions, each with `END` after it, then padding.
        kind: int64 [N], index into `KINDS`.
        things: bool [N, patches, `things_of`], what has its centre in which patch of 16 px: a glyph,
            an icon, the colour and the place of a scene's icon.
        named: bool [N, `things_of`], which of them the caption names.
    """

    pictures: Tensor
    tokens: Tensor
    kind: Tensor
    things: Tensor
    named: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Captioned:
        parts = (self.pictures, self.tokens, self.kind, self.things, self.named)
        return Captioned(*(part[rows] for part in parts))


@dataclass(frozen=True)
class _Part:
    """N pairs of one kind.

    Attributes:
        pixels: uint8 [N, 3, SIDE, SIDE].
        pieces: of the captions.
        marks: what is where on the pictures.
        named: bool [N, `things_of`], what the captions name; None where that is all of it.
    """

    pixels: Tensor
    pieces: Sequence[Piece]
    marks: Marks
    named: Tensor | None = None


def captioned(
    codec: Codec,
    draws: Draws,
    rng: random.Random,
    n: int,
    split: str,
    *,
    parts: int = 1,
    kinds: Sequence[str] = KINDS,
) -> list[Captioned]:
    """Draw several batches at once, each of `n` pairs and all with the same sizes of pictures.

    Args:
        codec: glyphs and tokens.
        draws: randomness of contents, on the device.
        rng: randomness of sizes and languages.
        n: pairs of a batch, at least 8.
        split: train or held out.
        parts: batches.
        kinds: those which occur, out of `KINDS`.
    """
    counts = _counts(n, kinds)
    total = things_of(codec.sheets).total
    pixels, tokens, which, things, named = [], [], [], [], []
    for kind, count in counts.items():
        chinese = torch.tensor([rng.random() < CHINESE for _ in range(parts)], device=codec.device)
        # Row r belongs to batch r % parts, whatever its kind.
        part = _MAKERS[kind](codec, draws, rng, split, chinese.repeat(count))
        pixels.append(part.pixels)
        tokens.append(_ended(codec, part.pieces))
        things.append(things_by_patch(part.marks, count * parts, SIDE, SIDE, total))
        named.append(things[-1].any(1) if part.named is None else part.named)
        which += [KINDS.index(kind)] * (count * parts)
    every = Captioned(
        torch.cat(pixels).permute(0, 2, 3, 1),
        torch.cat(tokens),
        torch.tensor(which, device=codec.device),
        torch.cat(things),
        torch.cat(named),
    )
    return [every[slice(p, None, parts)] for p in range(parts)]


def caption_batches(
    codec: Codec, draws: Draws, rng: random.Random, n: int, split: str
) -> tuple[Tensor, Tensor]:
    """One batch as `harness.pocket.clip` takes it; else as `captioned`.

    Returns:
        Pictures, uint8 [n, SIDE, SIDE, 3], and captions, int64 [n, CONTEXT].
    """
    batch = captioned(codec, draws, rng, n, split)[0]
    return batch.pictures, batch.tokens


def caption_texts(tokens: Tensor) -> list[str]:
    """The captions of int64 [N, CONTEXT] as strings, for any tokenizer."""
    said = {character_id(c): c for c in (*map(chr, range(0x20, 0x7F)), *characters())}
    end = token_id(END)
    return ["".join(said[i] for i in row[: row.index(end)]) for row in tokens.tolist()]


def _counts(n: int, kinds: Sequence[str]) -> dict[str, int]:
    """How many pairs of each kind make n; every kind has its share, the first one what is left."""
    shares = {k: SHARES[KINDS.index(k)] for k in kinds}
    counts = {k: int(n * s / sum(shares.values())) for k, s in shares.items()}
    counts[kinds[0]] += n - sum(counts.values())
    return counts


def _ended(codec: Codec, pieces: Sequence[Piece]) -> Tensor:
    rows = len(pieces[0].length)
    ids = join([*pieces, codec.constant(END, rows)]).ids
    if ids.shape[1] > CONTEXT:
        raise ValueError(f"a caption of {ids.shape[1]} tokens is longer than {CONTEXT}")
    return functional.pad(ids, (0, CONTEXT - ids.shape[1]), value=PAD)


def _text(codec: Codec, text: str, rows: int) -> Piece:
    # Not `Codec.constant`, which would use a phrase's token, that the pocket CLIP does not have.
    return codec.said(codec.glyphs([text]).expand(rows, -1))


def _entry(codec: Codec, table: Sequence[str], index: Tensor) -> Piece:
    return codec.said(codec.glyphs(table)[index])


def _square(pixels: Tensor, marks: Marks) -> tuple[Tensor, Marks]:
    """Squash uint8 [N, 3, H, W] to a square, as a vision model's preprocessing does."""
    height, width = pixels.shape[2:]
    if (height, width) == (SIDE, SIDE):
        return pixels, marks
    scaled = functional.interpolate(
        pixels.float(), (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False
    )
    moved = replace(marks, x=marks.x * SIDE // width, y=marks.y * SIDE // height)
    return scaled.round().clamp(0, 255).to(torch.uint8), moved


def _centred(draws: Draws, pixels: Tensor, marks: Marks) -> tuple[Tensor, Marks]:
    """Put uint8 [N, 3, H, W] in the middle of a square of one random colour each."""
    n, _, height, width = pixels.shape
    ground = draws.integers(0, 256, n, 3, 1, 1).to(torch.uint8)
    canvas = ground.expand(-1, -1, SIDE, SIDE).clone()
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    canvas[:, :, top : top + height, left : left + width] = pixels
    return canvas, replace(marks, x=marks.x + left, y=marks.y + top)


def _scenes(codec: Codec, draws: Draws, rng: random.Random, split: str, chinese: Tensor) -> _Part:
    sheets, n, device = codec.sheets, len(chinese), codec.device
    s = cc.scene(codec, draws, n, split)
    pixels, marks = cc.painted(codec, draws, s, rng.choice(SCENE_CANVASES))
    things = things_of(sheets)
    there = s.slot_sort >= 0
    # Icons in a random order, those that are not there last.
    order = torch.where(there, draws.uniform(*there.shape), 2.0).argsort(1)[:, :MOST_FACTS]
    bounds = torch.tensor(FACTS, device=device).cumsum(0)[:-1]
    wanted = 1 + (draws.uniform(n)[:, None] >= bounds).sum(1)
    named = torch.minimum(wanted, there.sum(1))
    coloured = [
        (f"{'an' if en[0] in 'aeiou' else 'a'} {en} ", f"有{zh}色的")
        for en, zh, _ in sheets.colours
    ]
    pieces: list[Piece] = []
    # The last column takes what is not named.
    says = torch.zeros((n, things.total + 1), dtype=torch.bool, device=device)
    for i in range(MOST_FACTS):
        slot = order[:, i : i + 1]
        place, colour = s.place.gather(1, slot)[:, 0], s.colour.gather(1, slot)[:, 0]
        icon = s.sort.gather(1, s.slot_sort.gather(1, slot).clamp(min=0))[:, 0]
        english = [
            _entry(codec, [en for en, _ in coloured], colour),
            _entry(codec, sheets.icon_names_en, icon),
            _entry(codec, [f" at the {p}" for p in PLACES], place),
        ]
        other = [
            _entry(codec, PLACES_ZH, place),
            _entry(codec, [zh for _, zh in coloured], colour),
            _entry(codec, sheets.icon_names_zh, icon),
        ]
        if i:
            english.insert(0, _text(codec, ", ", n))
            other.insert(0, _text(codec, ",", n))
        pieces += _either(english, other, chinese, i < named)
        told = (things.icons + icon, things.colours + colour, things.places + place)
        fact = torch.where((i < named)[:, None], torch.stack(told, 1), things.total)
        says.scatter_(1, fact, value=True)
    square, marks = _square(pixels, marks)
    return _Part(square, pieces, marks, says[:, : things.total])


def _steps(codec: Codec, draws: Draws, rng: random.Random, split: str, chinese: Tensor) -> _Part:
    sheets, n = codec.sheets, len(chinese)
    icon = draws.integers(0, len(sheets.icon_names_en), n)
    step = draws.integers(0, rag.MOST_STEPS, n)
    canvas = rng.choice(rag.CANVASES)
    pixels, marks = rag.pictures(codec, draws, icon[:, None], step[:, None], canvas, split)
    # Captions do not tell its colour.
    marks = marks.only(marks.thing < things_of(sheets).colours)
    english = [
        _text(codec, "step ", n),
        _entry(codec, [str(i + 1) for i in range(rag.MOST_STEPS)], step),
        _text(codec, ": ", n),
        _entry(codec, sheets.icon_names_en, icon),
    ]
    other = [
        _entry(codec, sheets.icon_names_zh, icon),
        _entry(codec, [f"第{i + 1}步" for i in range(rag.MOST_STEPS)], step),
    ]
    squash = rng.random() < 0.6
    square, marks = _square(pixels, marks) if squash else _centred(draws, pixels, marks)
    return _Part(square, _either(english, other, chinese, torch.ones_like(chinese)), marks)


def _lines(codec: Codec, draws: Draws, rng: random.Random, split: str, chinese: Tensor) -> _Part:
    n = len(chinese)
    drawn = ocr.lines(
        codec, draws, n, canvas=rng.choice(LINE_CANVASES), split=split, bands=[ocr.LARGE]
    )
    head = _either(
        [_text(codec, "the text: ", n)], [_text(codec, "文字:", n)], chinese,
        torch.ones_like(chinese),
    )  # fmt: skip
    square, marks = _square(drawn.pixels, drawn.marks)
    return _Part(square, [*head, *drawn.turns[0].answer], marks)


def _either(
    english: Sequence[Piece], other: Sequence[Piece], chinese: Tensor, keep: Tensor
) -> list[Piece]:
    """One of two wordings where `keep` (bool [N]), else nothing."""
    return [p.where(keep & ~chinese) for p in english] + [p.where(keep & chinese) for p in other]


_MAKERS = {"scene": _scenes, "step": _steps, "line": _lines}
