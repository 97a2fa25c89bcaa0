"""Questions on several pictures of one line each: all are to be read, in order."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.pocket.world.draw import MERGED, Drawn, Marks, Turn
from harness.pocket.world.text import Codec, Piece, choose, join

QUESTION = "what is written in the images?"
QUESTION_ZH = "图中写了什么？"


def several(codec: Codec, drawn: Drawn, images: int, rows: Tensor | None = None) -> Drawn:
    """Put pictures of `harness.pocket.world.ocr.lines` together to items of several pictures.

    An answer is the strings in order, a space between them. The question is in Chinese where every
    picture is. An item's kind is that of its first picture, its print size the smallest.

    Args:
        codec: glyphs and tokens.
        drawn: items of one picture and one turn.
        images: pictures of an item; without `rows`, neighbours make one, and what is left over at
            the end is dropped.
        rows: int64 [n, images], which pictures make each item.
    """
    device = drawn.kind.device
    if rows is None:
        used = len(drawn.kind) // images * images
        rows = torch.arange(used, device=device).view(-1, images)
    n, (height, width) = len(rows), drawn.pixels.shape[2:]
    strings = join(drawn.turns[0].answer)
    step = torch.arange(strings.ids.shape[1], device=device)
    chinese = ((strings.ids >= 256) & (step < strings.length[:, None])).any(1)
    answer: list[Piece] = []
    for i in range(images):
        if i:
            answer.append(codec.constant(" ", n))
        answer.append(Piece(strings.ids[rows[:, i]], strings.length[rows[:, i]]))
    options = [codec.constant(q, n) for q in (QUESTION, QUESTION_ZH)]
    ask = choose(options, chinese[rows].all(1).long())
    picture = codec.vision(n, height // MERGED * (width // MERGED))
    turn = Turn([*[picture] * images, ask], answer, {"question": [ask]})
    # Where each old picture went; those left out lose their marks.
    went = torch.full((len(drawn.kind),), -1, dtype=torch.int64, device=device)
    went[rows.flatten()] = torch.arange(rows.numel(), device=device)
    m = drawn.marks
    image = torch.where(m.image >= 0, went[m.image.clamp(min=0)], -1)
    return Drawn(
        drawn.pixels[rows.flatten()],
        images,
        [turn],
        Marks(image, m.x, m.y, m.thing),
        drawn.kind[rows[:, 0]],
        drawn.kinds,
        drawn.print_px[rows].amin(1),
    )
