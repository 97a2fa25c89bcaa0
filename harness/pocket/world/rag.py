"""Pocket RAG-IG: a question, notes with pictures, and an answer that cites the right ones in order.

Each picture shows an icon, what it is about, and a number, which step it shows; each sentence of a note
says what to do in one step. Pictures stand in another order than the sentences, so that only
reading them tells which is which. The question names a thing and how many steps it has; the answer
goes through them.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from harness.pocket.raster import Icons, Runs, paint, widths
from harness.pocket.world.draw import (
    HELD_OUT,
    MERGED,
    Drawn,
    Draws,
    Marks,
    Turn,
    a_word,
    fonts_for,
    grain,
    marks_of_runs,
    paper,
    together,
)
from harness.pocket.world.text import Codec, Piece, choose, stack
from harness.pocket.world.things import things_of

KINDS = ("how-to", "how-to_zh")
CANVASES: tuple[tuple[int, int], ...] = ((64, 96), (96, 64), (96, 96))
"""Height and width of pictures [px]."""
VERBS = ("turn", "press", "clean", "lift", "paint", "shake", "cut", "oil")
VERBS_ZH = ("看", "找", "读", "选", "做", "写", "有", "和")
MOST_STEPS = 4
PRINT = (18, 28)
"""Font sizes of the numbers [px], both ends included."""


@functools.cache
def arrangements(split: str) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """(steps of each topic, pictures of each note) of a split: 3 to 12 pictures, 2 to 4 topics.

    Every fifth is held out.
    """
    found = []
    for topics in (2, 3, 4):
        for steps in itertools.product(range(1, MOST_STEPS + 1), repeat=topics):
            total = sum(steps)
            if not 3 <= total <= 12:
                continue
            for notes_ in (1, 2, 3):
                for cut in itertools.combinations(range(1, total), notes_ - 1):
                    ends = (0, *cut, total)
                    found.append((steps, tuple(b - a for a, b in itertools.pairwise(ends))))
    return tuple(f for i, f in enumerate(found) if (i % 5 == 4) == (split == HELD_OUT))


def notes(
    codec: Codec,
    draws: Draws,
    n: int,
    *,
    canvas: tuple[int, int],
    split: str,
    chinese: bool,
    steps: tuple[int, ...],
    documents: tuple[int, ...],
    asides: int = 0,
) -> Drawn:
    """Questions with `sum(steps)` pictures each.

    In training the answer is followed by a few questions on single pictures, what they show: reading
    them is learned there, and finding the right ones builds on it.

    Args:
        codec: glyphs and tokens.
        draws: randomness.
        n: items.
        canvas: height and width of every picture [px].
        split: train or held out.
        chinese: language of all text.
        steps: how many steps each topic has, 1 to `MOST_STEPS`; the first topic is asked for.
        documents: how many sentences and pictures each note has; the same sum.
        asides: questions on single pictures after the answer.

    Raises:
        ValueError: the sums differ.
    """
    total = sum(steps)
    if total != sum(documents):
        raise ValueError(f"steps {steps} and documents {documents} have different sums")
    sheets, device = codec.sheets, codec.device
    row = torch.arange(n, device=device)
    topic = draws.order(n, len(sheets.icon_names_en))[:, : len(steps)]
    # The pair (topic, step) number j, in order of topics.
    pair_topic = torch.tensor([t for t, m in enumerate(steps) for _ in range(m)], device=device)
    pair_step = torch.tensor([s for m in steps for s in range(m)], device=device)
    shown = draws.order(n, total)  # picture i shows pair shown[:, i]
    icon = topic.gather(1, pair_topic[shown])
    pixels, marks = pictures(codec, draws, icon, pair_step[shown], canvas, split)

    names = codec.glyphs(sheets.icon_names_zh if chinese else sheets.icon_names_en)
    verbs = [codec.constant(v, n) for v in (VERBS_ZH if chinese else VERBS)]
    todo = [
        _sentence(
            codec,
            choose(verbs, draws.integers(0, len(verbs), n)),
            a_word(draws, codec, n, split, chinese=chinese, longest=6),
        )
        for _ in range(total)
    ]
    digit = [codec.constant(str(i + 1), n) for i in range(MOST_STEPS)]
    title = [codec.said(names[topic[row, t]]) for t in range(len(steps))]
    # The number of steps is told: what is asked here is which pictures, not when to stop.
    before, after = ("步：", "怎么做"), "？"
    if not chinese:
        before, after = (" steps: ", "how do I fix the "), "?"
    told = [codec.constant(text, n) for text in before]
    ask = [digit[steps[0] - 1], *told, title[0], codec.constant(after, n)]
    heads = [
        _head(codec, title[t], digit[s], chinese) for t, m in enumerate(steps) for s in range(m)
    ]
    head = [stack([h[part] for h in heads]) for part in range(len(heads[0]))]
    sentence = [stack([w[part] for w in todo]) for part in range(len(todo[0]))]
    question: list[Piece] = [*ask, codec.constant("\n", n)]
    fields = {"query": ask}
    tokens = canvas[0] // MERGED * (canvas[1] // MERGED)
    first = 0
    for d, size in enumerate(documents):
        inside = shown[:, first : first + size]
        # The sentences of a note in another order than its pictures.
        said = inside.gather(1, draws.order(n, size))
        body: list[Piece] = []
        for i in range(size):
            body += [part.at(said[:, i]) for part in (*head, *sentence)]
            last = i == size - 1
            body.append(codec.constant("。" if chinese else "." if last else ". ", n))
        fields[f"document {d}"] = body
        question += [codec.constant("DOC#", n), codec.constant(str(d + 1), n)]
        question += [codec.constant(": ", n), *body, codec.constant("\n", n)]
        for i in range(first, first + size):
            question += [codec.constant("(IMG#", n), codec.constant(str(i + 1), n)]
            question += [codec.constant(")", n), codec.vision(n, tokens)]
        question.append(codec.constant("\n", n))
        first += size
    answer: list[Piece] = []
    ids = stack([codec.constant(str(i + 1), n) for i in range(total)])
    for s in range(steps[0]):
        if s:
            answer.append(codec.constant("\n", n))
        at = (shown == s).long().argmax(1)  # topic 0's pairs come first
        answer += [digit[s], codec.constant(".", n), codec.constant(" ", n), *todo[s]]
        answer += [codec.constant(" ", n), codec.constant("![", n), title[0]]
        answer += [codec.constant("](IMG#", n), ids.at(at), codec.constant(")", n)]
    kind = torch.full((n,), int(chinese), device=device)
    turns = [Turn(question, answer, fields)]
    for _ in range(asides):
        at = draws.integers(0, total, n)
        which = [codec.constant("(IMG#", n), ids.at(at), codec.constant(")", n)]
        # Without the colon that ends a sentence's head.
        shows = [part.at(shown[row, at]) for part in (head[:3] if not chinese else head)]
        turns.append(Turn(which, shows, {}))
    return Drawn(pixels, total, turns, marks, kind, KINDS, torch.zeros_like(kind))


def _sentence(codec: Codec, verb: Piece, word: Tensor) -> list[Piece]:
    return [verb, codec.constant(" ", len(word)), codec.said(word)]


def _head(codec: Codec, title: Piece, digit: Piece, chinese: bool) -> list[Piece]:
    n = len(title.length)
    if chinese:
        return [title, codec.constant("第", n), digit, codec.constant("步：", n)]
    return [title, codec.constant(" step ", n), digit, codec.constant(": ", n)]


def pictures(
    codec: Codec,
    draws: Draws,
    icon: Tensor,
    step: Tensor,
    canvas: tuple[int, int],
    split: str,
) -> tuple[Tensor, Marks]:
    """Pictures of an icon and a number, one for each entry of `icon` and `step` (int64 [n, N])."""
    sheets, (height, width) = codec.sheets, canvas
    icon, step = icon.flatten(), step.flatten()
    m, side = len(icon), 40
    inside = [i for i, s in enumerate(sheets.sizes) if PRINT[0] <= s <= PRINT[1]]
    size = draws.integers(inside[0], inside[-1] + 1, m)
    font = fonts_for(draws, sheets, torch.zeros(m, dtype=torch.bool, device=codec.device))
    glyphs = codec.glyphs([str(i + 1) for i in range(MOST_STEPS)])[step][:, None]
    taken = widths(sheets, glyphs, font[:, None])[:, 0].gather(1, size[:, None])[:, 0]
    # Icon and number side by side where the picture is wide, else one above the other.
    across = torch.full_like(size, width > height)
    if width == height:
        across = draws.integers(0, 2, m)
    flip = draws.integers(0, 2, m)
    tall = sheets.height[size]
    wide_room = torch.where(across == 1, width - side - taken, width - taken.clamp(min=side))
    tall_room = torch.where(across == 1, height - tall.clamp(min=side), height - side - tall)
    left, top = draws.below(wide_room + 1), draws.below(tall_room.clamp(min=0) + 1)
    icon_x = left + torch.where((across == 1) & (flip == 1), taken, 0)
    icon_y = top + torch.where((across == 0) & (flip == 1), tall, 0)
    text_x = left + torch.where((across == 1) & (flip == 0), side, 0)
    text_y = top + torch.where((across == 0) & (flip == 0), side, 0)
    # The cell of large print is taller than what is left of a small picture; its ink is not.
    icon_y = icon_y.clamp(max=height - side)
    ground, ink = paper(draws, m)
    palette = torch.tensor([c[2] for c in sheets.colours], dtype=torch.float32, device=size.device)
    colour = draws.integers(0, len(palette), m)
    tint = palette[colour]
    # A tint that the ground would swallow gives way to the ink.
    swallowed = (tint - ground).abs().sum(1) < 160
    tint = torch.where(swallowed[:, None], ink, tint)
    runs = Runs(
        glyphs, font[:, None], size[:, None], text_x[:, None], text_y[:, None], ink[:, None]
    )
    icons = Icons(icon[:, None], side, icon_x[:, None], icon_y[:, None], tint[:, None])
    pixels = paint(
        sheets, ground, [runs], [icons], height=height, width=width,
        noise=grain(draws, m), generator=draws.generator,
    )  # fmt: skip
    image, things = torch.arange(m, device=size.device), things_of(sheets)
    middle = icon_x + side // 2, icon_y + side // 2
    seen = Marks(image, *middle, things.icons + icon)
    tinted = Marks(torch.where(swallowed, -1, image), *middle, things.colours + colour)
    return pixels, together([marks_of_runs(sheets, runs), seen, tinted])
