"""Pocket CC: plain scenes of icons, and multiple-choice questions about them.

What is where, how many, which colour, where: four options each, in English and Chinese. Which places
are taken together in held-out scenes never occurs in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.pocket.raster import Icons, paint
from harness.pocket.world.draw import HELD_OUT, MERGED, Drawn, Draws, Marks, Turn, grain, together
from harness.pocket.world.text import Codec, Piece, choose
from harness.pocket.world.things import PLACES, PLACES_ZH, things_of

KINDS = ("what", "how_many", "colour", "where")
LETTERS = "ABCD"
SIDE = 40
"""Width and height of an icon [px]."""
MOST = 4
"""Most icons of one sort in a scene."""
OTHERS = 3
"""Most icons of other sorts, one of each."""


@dataclass(frozen=True)
class Scene:
    """B scenes on a grid of 3 × 3 places.

    Attributes:
        sort: int64 [B, 1 + OTHERS], icons, all different; the first may occur several times.
        count: int64 [B], how often the first occurs.
        others: int64 [B], how many of the others occur, once each.
        slot_sort: int64 [B, MOST + OTHERS], index into `sort` of each icon; -1 for none.
        place: int64 [B, MOST + OTHERS], 0 to 8 in reading order.
        colour: int64 [B, MOST + OTHERS], index into `Sheets.colours`.
    """

    sort: Tensor
    count: Tensor
    others: Tensor
    slot_sort: Tensor
    place: Tensor
    colour: Tensor


def scene(codec: Codec, draws: Draws, n: int, split: str) -> Scene:
    """Draw scenes of a split: a fifth of the sets of taken places are held out."""
    device, slots = codec.device, MOST + OTHERS
    sort = draws.order(n, len(codec.sheets.icon_names_en))[:, : 1 + OTHERS]
    count = draws.integers(1, MOST + 1, n)
    others = draws.integers(1, OTHERS + 1, n)
    step = torch.arange(slots, device=device)
    slot_sort = torch.where(
        step < MOST,
        torch.where(step < count[:, None], 0, -1),
        torch.where(step - MOST < others[:, None], step - MOST + 1, -1),
    )
    # Of several arrangements the first that belongs to the split.
    tries = 24
    place = draws.uniform(n, tries, 9).argsort(2)[:, :, :slots]
    taken = ((slot_sort >= 0)[:, None] * 2**place).sum(2)
    right = ((taken * 37 // 8) % 5 == 0) == (split == HELD_OUT)
    first = right.long().argmax(1)
    chosen = place[torch.arange(n, device=device), first]
    return Scene(sort, count, others, slot_sort, chosen, _colours(codec, draws, n, slots))


def _colours(codec: Codec, draws: Draws, n: int, slots: int) -> Tensor:
    return draws.integers(0, len(codec.sheets.colours), n, slots)


def scenes(
    codec: Codec,
    draws: Draws,
    n: int,
    *,
    canvas: tuple[int, int],
    split: str,
    chinese: bool,
    turns: int,
    open_share: float = 0.0,
) -> Drawn:
    """Scenes with `turns` questions each; every answer is the letter of an option.

    In training a share of the questions comes without options, and the answer is the thing itself:
    naming is learned first, and choosing among names builds on it.

    Args:
        codec: glyphs and tokens.
        draws: randomness.
        n: items.
        canvas: height and width [px], at least three icons each.
        split: train or held out.
        chinese: language of questions and options.
        turns: questions of an item.
        open_share: share of questions without options.
    """
    s = scene(codec, draws, n, split)
    pixels, marks = painted(codec, draws, s, canvas)
    made, kinds = [], []
    for t in range(turns):
        kind = _kinds(draws, n, split)
        ask, options, letter, thing, fields = _question(codec, draws, s, kind, chinese)
        framed = draws.uniform(n) >= open_share
        pieces = [codec.constant("Question: ", n).where(framed), *ask]
        pieces += [o.where(framed) for o in options]
        if t == 0:
            pieces = [codec.vision(n, canvas[0] // MERGED * (canvas[1] // MERGED)), *pieces]
        made.append(Turn(pieces, [letter.where(framed), thing.where(~framed)], fields))
        kinds.append(kind)
    none = torch.zeros(n, dtype=torch.int64, device=codec.device)
    return Drawn(pixels, 1, made, marks, kinds[0], KINDS, none)


def _kinds(draws: Draws, n: int, split: str) -> Tensor:
    """Kinds of questions, all as often when held out; colours more often in training.

    A colour is what is left to learn when all else is answered: the icon's, not another's.
    """
    shares = (0, 1, 2, 2, 2, 3) if split != HELD_OUT else (0, 1, 2, 3)
    return torch.tensor(shares, device=draws.generator.device)[draws.integers(0, len(shares), n)]


def painted(codec: Codec, draws: Draws, s: Scene, canvas: tuple[int, int]) -> tuple[Tensor, Marks]:
    """Pictures of scenes, uint8 [B, 3, height, width], and what is where on them.

    At the centre of an icon lie marks of what it is, of its colour and of its place: what belongs to
    one icon is to be told in one spot.
    """
    sheets, (height, width) = codec.sheets, canvas
    n, slots = s.place.shape
    tall, wide = height // 3, width // 3
    y = s.place // 3 * tall + draws.below(torch.full_like(s.place, tall - SIDE + 1))
    x = s.place % 3 * wide + draws.below(torch.full_like(s.place, wide - SIDE + 1))
    palette = torch.tensor([c[2] for c in sheets.colours], dtype=torch.float32, device=x.device)
    icon = torch.where(s.slot_sort >= 0, s.sort.gather(1, s.slot_sort.clamp(min=0)), -1)
    # Light and grey, so that every tint shows.
    ground = 205 + draws.uniform(n, 1) * 50 + draws.uniform(n, 3) * 20 - 20
    pixels = paint(
        sheets, ground, [], [Icons(icon, SIDE, x, y, palette[s.colour])],
        height=height, width=width, noise=grain(draws, n), generator=draws.generator,
    )  # fmt: skip
    image = torch.arange(n, device=x.device)[:, None].expand(-1, slots)
    there = torch.where(icon >= 0, image, -1).reshape(-1)
    middle = (x + SIDE // 2).reshape(-1), (y + SIDE // 2).reshape(-1)
    things = things_of(sheets)
    told = (things.icons + icon.clamp(min=0), things.colours + s.colour, things.places + s.place)
    return pixels, together([Marks(there, *middle, thing.reshape(-1)) for thing in told])


def _question(
    codec: Codec, draws: Draws, s: Scene, kind: Tensor, chinese: bool
) -> tuple[list[Piece], list[Piece], Piece, Piece, dict[str, Sequence[Piece]]]:
    """The question, the framed options, the right one's letter and text, the fields of a file."""
    sheets, n = codec.sheets, len(kind)
    device = kind.device
    row = torch.arange(n, device=device)
    names = codec.glyphs(sheets.icon_names_zh if chinese else sheets.icon_names_en)
    places = codec.glyphs(PLACES_ZH if chinese else PLACES)
    colours = codec.glyphs([zh if chinese else en for en, zh, _ in sheets.colours])
    numbers = codec.glyphs([str(i) for i in range(1, MOST + 1)])
    # An icon that occurs once, for questions on its colour and place: one of the others.
    alone = MOST + draws.below(s.others)
    alone_sort = s.sort[row, s.slot_sort[row, alone]]
    # Any icon, for the question what is at its place.
    any_slot = torch.where(draws.uniform(n) < 0.5, alone, draws.below(s.count))
    any_sort = s.sort[row, s.slot_sort[row, any_slot]]
    counted = s.sort[:, 0]
    truth = [any_sort, s.count - 1, s.colour[row, alone], s.place[row, alone]]
    tables = [names, numbers, colours, places]
    picked = []
    for right, table in zip(truth, tables, strict=True):
        rank = draws.uniform(n, len(table))
        rank[row, right] = -1
        picked.append(rank.argsort(1)[:, :4])
    order = draws.order(n, 4)
    letter_at = order.argmin(1)  # where option 0, the right one, went
    options = []
    for place in range(4):
        which = order[:, place]
        options.append(
            choose(
                [codec.said(t[p[row, which]]) for t, p in zip(tables, picked, strict=True)], kind
            )
        )
    what, many, colour, where = (kind == k for k in range(4))
    place_name = codec.said(places[s.place[row, any_slot]])
    asked = codec.said(names[torch.where(many, counted, alone_sort)])
    if chinese:
        ask = [
            place_name.where(what),
            codec.constant("是什么？", n).where(what),
            codec.constant("有几个", n).where(many),
            asked.where(~what),
            codec.constant("？", n).where(many),
            codec.constant("是什么颜色？", n).where(colour),
            codec.constant("在哪里？", n).where(where),
        ]
    else:
        ask = [
            codec.constant("what is at the ", n).where(what),
            codec.constant("how many ", n).where(many),
            codec.constant("what colour is the ", n).where(colour),
            codec.constant("where is the ", n).where(where),
            place_name.where(what),
            asked.where(~what),
            codec.constant(" are there?", n).where(many),
            codec.constant("?", n).where(~many),
        ]
    frame = ["\nOptions:\nA. ", "\nB. ", "\nC. ", "\nD. "]
    framed = [p for f, o in zip(frame, options, strict=True) for p in (codec.constant(f, n), o)]
    framed.append(
        codec.constant("\nPlease select the correct answer from the options above. \n", n)
    )
    letter = choose([codec.constant(c, n) for c in LETTERS], letter_at)
    fields: dict[str, Sequence[Piece]] = {"question": ask}
    fields |= {c: [o] for c, o in zip(LETTERS, options, strict=True)}
    named = zip(tables, truth, strict=True)
    thing = choose([codec.said(table[right]) for table, right in named], kind)
    return ask, framed, letter, thing, fields
