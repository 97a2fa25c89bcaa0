"""Pocket OCR: text to read, in large and in fine print.

Lines (a word, a number, a code, a date), key-value slips and small tables, in English and Chinese.
Words and layouts of the held-out split never occur in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.pocket.raster import Runs, advances, paint, widths
from harness.pocket.world.draw import (
    HELD_OUT,
    MERGED,
    Drawn,
    Draws,
    Turn,
    a_word,
    fonts_for,
    grain,
    marks_of_runs,
    paper,
    settle,
    together,
)
from harness.pocket.world.text import Codec, Piece, choose, packed

LARGE, FINE, MIDDLE = "large", "fine", "middle"
BANDS: dict[str, tuple[int, int]] = {LARGE: (20, 40), MIDDLE: (16, 18), FINE: (12, 15)}
"""Font sizes [px], both ends included. The middle one occurs only in training."""

CANVASES: tuple[tuple[int, int], ...] = (
    (192, 192), (160, 224), (224, 160), (128, 256), (160, 192), (192, 160),
)  # fmt: skip
"""Height and width of pictures [px]."""

KINDS = ("word", "word_zh", "digits", "code", "date", "slip", "slip_zh", "table", "table_zh")
CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
KEYS = (
    "Total",
    "Date",
    "No",
    "Tel",
    "Price",
    "Qty",
    "Name",
    "Time",
    "Room",
    "Code",
    "Seat",
    "Gate",
)
KEYS_ZH = (
    "合计",
    "日期",
    "编号",
    "电话",
    "价格",
    "数量",
    "名称",
    "时间",
    "单价",
    "商品",
    "地址",
    "姓名",
)
COLUMNS = ("item", "qty", "price")
COLUMNS_ZH = ("商品", "数量", "价格")
MARGIN = 4


def digits(draws: Draws, codec: Codec, n: int, low: int, high: int) -> Tensor:
    """Glyphs of `low` to `high` random digits, the first not 0: int64 [n, high]."""
    table = codec.glyphs(list("0123456789"))[:, 0]
    drawn = draws.integers(0, 10, n, high)
    drawn[:, 0] = draws.integers(1, 10, n)
    length = draws.integers(low, high + 1, n)
    step = torch.arange(high, device=codec.device)
    return torch.where(step < length[:, None], table[drawn], -1)


def code(draws: Draws, codec: Codec, n: int, low: int, high: int) -> Tensor:
    """Glyphs of `low` to `high` capitals and digits that no font confuses: int64 [n, high]."""
    table = codec.glyphs(list(CODE_LETTERS))[:, 0]
    length = draws.integers(low, high + 1, n)
    step = torch.arange(high, device=codec.device)
    drawn = table[draws.integers(0, len(table), n, high)]
    return torch.where(step < length[:, None], drawn, -1)


def price(draws: Draws, codec: Codec, n: int) -> Tensor:
    """Glyphs of an amount such as 7.50 or 38.05: int64 [n, 5]."""
    point = codec.glyphs(["."]).expand(n, 1)
    cents = codec.glyphs(list("0123456789"))[:, 0][draws.integers(0, 10, n, 2)]
    return packed([digits(draws, codec, n, 1, 2), point, cents])


def date(draws: Draws, codec: Codec, n: int, chinese: Tensor) -> Tensor:
    """Glyphs of a date, as 2031-05-09, 2031/05/09 or, where `chinese`, 2031年05月09日: [n, 11]."""
    two = codec.glyphs([f"{i:02d}" for i in range(32)])
    year = torch.cat([two[torch.full((n,), 20)], two[draws.integers(0, 32, n)]], 1)
    month, day = two[draws.integers(1, 13, n)], two[draws.integers(1, 29, n)]
    dash = codec.glyphs(["-", "/"])[draws.integers(0, 2, n)]
    signs = codec.glyphs(["年", "月", "日"])[:, 0]
    zh = chinese[:, None]
    return packed(
        [
            year,
            torch.where(zh, signs[0], dash),
            month,
            torch.where(zh, signs[1], dash),
            day,
            torch.where(zh, signs[2], -1),
        ]
    )


def _padded(glyphs: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(glyphs, (0, width - glyphs.shape[-1]), value=-1)


def _sizes(codec: Codec, band: str) -> tuple[int, int]:
    low, high = BANDS[band]
    inside = [i for i, s in enumerate(codec.sheets.sizes) if low <= s <= high]
    return inside[0], inside[-1]


def _size(draws: Draws, wide: Tensor, room: int, low: Tensor, high: Tensor) -> Tensor:
    """A size between `low` and `high` at which `wide` (int64 [n, S], px) fits into `room`."""
    fits = (wide <= room).sum(1) - 1
    top = torch.minimum(high, fits)
    return torch.where(top >= low, low + draws.below(top - low + 1), fits.clamp(min=0))


def lines(
    codec: Codec, draws: Draws, n: int, *, canvas: tuple[int, int], split: str, bands: Sequence[str]
) -> Drawn:
    """Pictures of one line each; the question asks what is written.

    Args:
        codec: glyphs and tokens.
        draws: randomness.
        n: items.
        canvas: height and width [px].
        split: train or held out.
        bands: print sizes, of which each item takes one.
    """
    sheets, (height, width) = codec.sheets, canvas
    kind = draws.integers(0, 5, n)
    chinese_date = draws.uniform(n) < 0.3
    options = [
        a_word(draws, codec, n, split),
        a_word(draws, codec, n, split, chinese=True),
        digits(draws, codec, n, 3, 8),
        code(draws, codec, n, 3, 6),
        date(draws, codec, n, chinese_date),
    ]
    table = torch.stack([_padded(o, 11) for o in options])
    glyphs = table[kind, torch.arange(n, device=codec.device)]
    chinese = (kind == 1) | ((kind == 4) & chinese_date)
    font = fonts_for(draws, sheets, chinese)
    limits = torch.tensor([_sizes(codec, b) for b in bands], device=codec.device)
    low, high = limits[draws.integers(0, len(bands), n)].unbind(1)
    wide = widths(sheets, glyphs[:, None], font[:, None])[:, 0]
    size = _size(draws, wide, width - 2 * MARGIN, low, high)
    x = MARGIN + draws.below(width - 2 * MARGIN - wide.gather(1, size[:, None])[:, 0] + 1)
    room = height - sheets.height[size] - MARGIN
    y = settle(MARGIN + draws.below(room - MARGIN + 1), room, x // 4 + size, split)
    ground, ink = paper(draws, n)
    runs = Runs(glyphs[:, None], font[:, None], size[:, None], x[:, None], y[:, None], ink[:, None])
    pixels = paint(
        sheets, ground, [runs], [], height=height, width=width,
        noise=grain(draws, n), generator=draws.generator,
    )  # fmt: skip
    ask = choose(
        [
            codec.constant("what is written in the image?", n),
            codec.constant("图中写了什么？", n),
        ],
        (chinese | (draws.uniform(n) < 0.15)).long(),
    )
    answer = codec.said(glyphs)
    turn = Turn([codec.vision(n, _tokens(canvas)), ask], [answer], {"question": [ask]})
    px = torch.tensor(sheets.sizes, device=codec.device)[size]
    return Drawn(pixels, 1, [turn], marks_of_runs(sheets, runs), kind, KINDS, px)


def _tokens(canvas: tuple[int, int]) -> int:
    return canvas[0] // MERGED * (canvas[1] // MERGED)


def _values(
    codec: Codec, draws: Draws, n: int, rows: int, *, split: str, band: str, chinese: bool
) -> Tensor:
    """Glyphs of slips' values: [n, rows, 11]. Large print has the shorter ones, which fit."""
    total, large = n * rows, band == LARGE
    zh = torch.full((total,), chinese, device=codec.device)
    options = [
        a_word(draws, codec, total, split, chinese=chinese, longest=5 if large else 8),
        digits(draws, codec, total, 2, 5 if large else 8),
        code(draws, codec, total, 3, 4 if large else 6),
        price(draws, codec, total),
        price(draws, codec, total) if large else date(draws, codec, total, zh),
    ]
    table = torch.stack([_padded(o, 11) for o in options])
    which = draws.integers(0, len(options), total)
    return table[which, torch.arange(total, device=codec.device)].view(n, rows, -1)


def slips(
    codec: Codec,
    draws: Draws,
    n: int,
    *,
    canvas: tuple[int, int],
    split: str,
    band: str,
    chinese: bool,
    rows: int,
    turns: int,
) -> Drawn:
    """Key-value slips of `rows` lines; each turn asks for one key's value. Else as `lines`."""
    names = codec.glyphs(KEYS_ZH if chinese else KEYS)
    keys = names[draws.order(n, len(names))[:, :rows]]
    mark = codec.glyphs(["："] if chinese else [": "])
    shown = packed([keys.flatten(0, 1), mark.expand(n * rows, -1)]).view(n, rows, -1)
    values = _values(codec, draws, n, rows, split=split, band=band, chinese=chinese)
    columns = [shown, values]
    aligned = draws.uniform(n) < 0.5
    pixels, runs = _page(codec, draws, columns, canvas, split, band, chinese, aligned)
    order = draws.order(n, rows)[:, :turns]
    made = []
    for t in range(turns):
        key = codec.said(_row(keys, order[:, t]))
        ask = (
            [key, codec.constant("是什么？", n)]
            if chinese
            else [codec.constant("what is the ", n), key, codec.constant("?", n)]
        )
        made.append((ask, codec.said(_row(values, order[:, t]))))
    kind = torch.full((n,), KINDS.index("slip_zh" if chinese else "slip"), device=codec.device)
    return _asked(codec, canvas, pixels, made, runs, kind)


def tables(
    codec: Codec,
    draws: Draws,
    n: int,
    *,
    canvas: tuple[int, int],
    split: str,
    band: str,
    chinese: bool,
    rows: int,
    turns: int,
) -> Drawn:
    """Tables of two or three columns under a header; each turn asks for one cell. Else as `lines`."""
    total = n * rows
    # Large print has room for two columns.
    use = (0, 2) if band == LARGE else (0, 1, 2)
    longest = 6 if band == LARGE else 8
    items = a_word(draws, codec, total, split, chinese=chinese, longest=longest)
    cells = [items, digits(draws, codec, total, 1, 2), price(draws, codec, total)]
    cells = [_padded(cells[c], 11).view(n, rows, -1) for c in use]
    head = codec.glyphs(COLUMNS_ZH if chinese else COLUMNS)
    columns = [
        torch.cat([_padded(head[c], 11).expand(n, 1, -1), cell], 1)
        for c, cell in zip(use, cells, strict=True)
    ]
    aligned = torch.ones(n, dtype=torch.bool, device=codec.device)
    pixels, runs = _page(codec, draws, columns, canvas, split, band, chinese, aligned)
    titles = COLUMNS_ZH if chinese else COLUMNS
    names = [codec.constant(titles[c], n) for c in use]
    numbers = [codec.constant(str(r + 1), n) for r in range(rows)]
    asked = draws.order(n, len(use) * rows)[:, :turns]
    grid = torch.stack(cells, 2)  # [n, rows, columns, 11]
    made = []
    for t in range(turns):
        row, column = asked[:, t] // len(use), asked[:, t] % len(use)
        number, name = choose(numbers, row), choose(names, column)
        ask = (
            [codec.constant("第", n), number, codec.constant("行的", n), name]
            if chinese
            else [codec.constant("what is the ", n), name, codec.constant(" in row ", n), number]
        )
        ask.append(codec.constant("是什么？" if chinese else "?", n))
        at = torch.arange(n, device=codec.device)
        made.append((ask, codec.said(grid[at, row, column])))
    kind = torch.full((n,), KINDS.index("table_zh" if chinese else "table"), device=codec.device)
    return _asked(codec, canvas, pixels, made, runs, kind)


def _row(table: Tensor, index: Tensor) -> Tensor:
    return table[torch.arange(len(index), device=index.device), index]


def _asked(
    codec: Codec,
    canvas: tuple[int, int],
    pixels: Tensor,
    made: Sequence[tuple[list[Piece], Piece]],
    runs: Sequence[Runs],
    kind: Tensor,
) -> Drawn:
    n = len(kind)
    turns = [
        Turn(
            [codec.vision(n, _tokens(canvas)), *ask] if i == 0 else ask, [answer], {"question": ask}
        )
        for i, (ask, answer) in enumerate(made)
    ]
    marks = together([marks_of_runs(codec.sheets, r) for r in runs])
    px = torch.tensor(codec.sheets.sizes, device=codec.device)[runs[0].size[:, 0]]
    return Drawn(pixels, 1, turns, marks, kind, KINDS, px)


def _page(
    codec: Codec,
    draws: Draws,
    columns: Sequence[Tensor],
    canvas: tuple[int, int],
    split: str,
    band: str,
    chinese: bool,
    aligned: Tensor,
) -> tuple[Tensor, list[Runs]]:
    """Paint columns of cells, glyphs int64 [n, rows, C] each, one print size a page.

    Where `aligned` (bool [n]) a column starts at one place for all rows, else where its row's
    previous cell ends.
    """
    sheets, (height, width) = codec.sheets, canvas
    n, rows, _ = columns[0].shape
    zh = torch.full((n,), chinese, device=codec.device)
    font = fonts_for(draws, sheets, zh)
    at_size = [widths(sheets, c, font[:, None].expand(-1, rows)) for c in columns]
    gap = draws.integers(6, 13, n)
    wide = sum(w.amax(1) for w in at_size) + (gap * (len(columns) - 1))[:, None]
    low, high = (torch.full((n,), s, device=codec.device) for s in _sizes(codec, band))
    tall = sheets.height * rows + 2 * MARGIN + 28
    size = _size(
        draws,
        torch.where(tall <= height, wide, width + 1),
        width - 2 * MARGIN,
        low,
        high,
    )
    cell = [
        (advances(sheets, c, font[:, None].expand(-1, rows), size[:, None].expand(-1, rows))).sum(2)
        for c in columns
    ]
    used = wide.gather(1, size[:, None])[:, 0]
    x = (MARGIN + draws.below(width - 2 * MARGIN - used + 1))[:, None].expand(-1, rows)
    line = sheets.height[size]
    slack = (height - 2 * MARGIN - 28 - rows * line) // max(rows - 1, 1)
    pitch = line + draws.below(slack.clamp(0, 12) + 1)
    room = height - MARGIN - line - (rows - 1) * pitch
    y0 = settle(
        MARGIN + draws.below(room - MARGIN + 1), room, x[:, 0] // 4 + size + 3 * pitch + rows, split
    )
    y = y0[:, None] + pitch[:, None] * torch.arange(rows, device=codec.device)
    ground, ink = paper(draws, n)
    groups = []
    for glyphs, taken in zip(columns, cell, strict=True):
        shape = (n, rows)
        groups.append(
            Runs(
                glyphs, font[:, None].expand(shape), size[:, None].expand(shape), x, y,
                ink[:, None].expand(-1, rows, -1),
            )
        )  # fmt: skip
        step = torch.where(aligned[:, None], taken.amax(1, keepdim=True) + gap[:, None], taken)
        x = x + step
    pixels = paint(
        sheets, ground, groups, [], height=height, width=width,
        noise=grain(draws, n), generator=draws.generator,
    )  # fmt: skip
    return pixels, groups


__all__ = [
    "BANDS",
    "CANVASES",
    "FINE",
    "HELD_OUT",
    "KINDS",
    "LARGE",
    "MIDDLE",
    "lines",
    "slips",
    "tables",
]
