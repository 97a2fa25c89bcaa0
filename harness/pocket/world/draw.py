"""What all tasks of the pocket world share: random draws, styles, splits, and the drawn batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.pocket.raster import Runs, advances
from harness.pocket.sheets import ASCII, Sheets
from harness.pocket.world.text import Codec, Joined, Piece, join

TRAIN, HELD_OUT = "train", "held_out"
MADE_UP = 0.6
"""Share of training words that are made up."""
NAMES = (
    "total", "date", "no", "tel", "price", "qty", "name", "time", "room", "code", "seat", "gate",
    "item", "turn", "press", "clean", "lift", "paint", "shake", "cut", "oil", "top", "left", "right",
    "bottom", "centre", "上面", "下面", "左边", "右边", "左上", "右上", "左下", "右下", "中间",
    "合计", "日期", "编号", "电话", "价格", "数量", "名称", "时间", "单价", "商品", "地址", "姓名",
)  # fmt: skip
"""Words that questions, slips and notes of every split use; none is held out."""
MERGED = 32
"""Side of what becomes one vision token [px]: two patches of 16."""


@dataclass(frozen=True)
class Draws:
    """Random tensors from one generator, on its device."""

    generator: torch.Generator

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, generator=self.generator, device=self.generator.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(
            low, high, shape, generator=self.generator, device=self.generator.device
        )

    def order(self, rows: int, n: int) -> Tensor:
        """A permutation of 0..n-1 for each row: int64 [rows, n]."""
        return self.uniform(rows, n).argsort(1)

    def below(self, bound: Tensor) -> Tensor:
        """int64 in [0, bound), 0 where bound < 1; shaped as `bound`."""
        u = torch.rand(bound.shape, generator=self.generator, device=self.generator.device)
        return (u * bound).long().clamp(min=0)


@dataclass(frozen=True)
class Marks:
    """What is where on the pictures, for an auxiliary loss: M things.

    Attributes:
        image: int64 [M], index of the picture; -1 for nothing.
        x, y: int64 [M], centre [px].
        thing: int64 [M], a glyph, or `len(Sheets.characters)` + an icon.
    """

    image: Tensor
    x: Tensor
    y: Tensor
    thing: Tensor

    def only(self, kept: Tensor) -> Marks:
        """Those where `kept` (bool [M]); nothing in place of the others."""
        return Marks(torch.where(kept, self.image, -1), self.x, self.y, self.thing)


@dataclass(frozen=True)
class Turn:
    """One question of a conversation and its answer.

    Attributes:
        question, answer: their pieces in order; the first question holds the images too.
        fields: what a data set's file says of it, by name: pieces without the images.
    """

    question: Sequence[Piece]
    answer: Sequence[Piece]
    fields: Mapping[str, Sequence[Piece]]


@dataclass(frozen=True)
class Drawn:
    """A batch of B items of one task, each with the same number of pictures of the same size.

    Attributes:
        pixels: uint8 [B * images, 3, H, W], an item's pictures next to each other.
        images: pictures of an item.
        turns: the conversation, the same number of turns for all.
        marks: what is on the pictures.
        kind: int64 [B], index into `kinds`.
        kinds: names of the categories.
        print_px: int64 [B], size of the print that is asked for; 0 where there is none.
    """

    pixels: Tensor
    images: int
    turns: Sequence[Turn]
    marks: Marks
    kind: Tensor
    kinds: tuple[str, ...]
    print_px: Tensor

    def conversation(self, codec: Codec, *, multiple: int = 1) -> Joined:
        """The token ids of the whole conversation, as the chat template writes it."""
        rows = len(self.kind)
        pieces = [p for t in self.turns for p in codec.turn(rows, t.question, t.answer)]
        return join(pieces, multiple=multiple)


@functools.lru_cache(maxsize=64)
def words_of(codec: Codec, split: str, *, chinese: bool = False, longest: int = 99) -> Tensor:
    """Glyphs of one split's words, int64 [W, C].

    Every fifth word is held out, unless it is also a name that the world uses for something else,
    such as an icon's.
    """
    sheets = codec.sheets
    words = sheets.words_zh if chinese else sheets.words_en
    used = {*NAMES, *sheets.icon_names_en, *sheets.icon_names_zh}
    used |= {name for colour in sheets.colours for name in colour[:2]}
    kept = [
        w
        for i, w in enumerate(words)
        if (i % 5 == 4 and w not in used) == (split == HELD_OUT) and len(w) <= longest
    ]
    return codec.glyphs(kept)


@functools.lru_cache(maxsize=64)
def _held_out_numbers(codec: Codec, chinese: bool) -> Tensor:
    return _number(words_of(codec, HELD_OUT, chinese=chinese))


def _number(glyphs: Tensor) -> Tensor:
    """A number for each string of up to 8 glyphs [..., C], different for different strings."""
    wide = torch.nn.functional.pad(glyphs, (0, 8 - glyphs.shape[-1]), value=-1) + 1
    number = torch.zeros_like(wide[..., 0])
    for c in range(8):
        number = number * 1_000_003 + wide[..., c]  # wraps around; a clash only drops a string
    return number


def a_word(
    draws: Draws, codec: Codec, n: int, split: str, *, chinese: bool = False, longest: int = 8
) -> Tensor:
    """N words: int64 [n, C].

    Held out: real words that training never sees. Training: more than half are made up, strings of
    letters or of Chinese characters; with real words only, a model this small learns the words
    instead of learning to read.
    """
    real = words_of(codec, split, chinese=chinese, longest=longest)
    word = pick(draws, real, n)
    if split == HELD_OUT:
        return word
    if chinese:
        first, letters, low, high = len(ASCII), _chinese_letters(codec), 1, min(4, longest)
    else:
        first, letters, low, high = ord("a") - 32, 26, 2, longest
    made = first + draws.integers(0, letters, n, high)
    length = draws.integers(low, high + 1, n)
    made = torch.where(torch.arange(high, device=codec.device) < length[:, None], made, -1)
    width = max(made.shape[1], word.shape[1])
    made, word = (
        torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in (made, word)
    )
    allowed = ~torch.isin(_number(made), _held_out_numbers(codec, chinese))
    chosen = (draws.uniform(n) < MADE_UP) & allowed
    return torch.where(chosen[:, None], made, word)


def _chinese_letters(codec: Codec) -> int:
    """How many of the characters, from the first after ASCII on, are no marks."""
    marks = "，。？：、（）"
    rest = codec.sheets.characters[len(ASCII) :]
    return next((i for i, c in enumerate(rest) if c in marks), len(rest))


def pick(draws: Draws, table: Tensor, *shape: int) -> Tensor:
    """Rows of a table [W, C] at random: [*shape, C]."""
    return table[draws.integers(0, len(table), *shape)]


def paper(draws: Draws, n: int) -> tuple[Tensor, Tensor]:
    """Colours of n pictures' ground and ink, float32 [n, 3] each: dark on light, or the reverse."""
    dark, light = draws.uniform(n, 3) * 90, 255 - draws.uniform(n, 3) * 80
    swap = (draws.uniform(n) < 0.3)[:, None]
    return torch.where(swap, dark, light), torch.where(swap, light, dark)


def grain(draws: Draws, n: int) -> Tensor:
    """Standard deviation of n pictures' pixel noise, 0 to 14 of 255; a third have none."""
    return (draws.uniform(n) * 21 - 7).clamp(min=0)


def fonts_for(draws: Draws, sheets: Sheets, chinese: Tensor) -> Tensor:
    """A font for each row of `chinese` (bool [n]) that has the characters: int64 [n]."""
    cjk = torch.nonzero(sheets.cjk).flatten()
    any_font = draws.integers(0, len(sheets.fonts), len(chinese))
    return torch.where(chinese, cjk[draws.integers(0, len(cjk), len(chinese))], any_font)


def settle(y: Tensor, room: Tensor, code: Tensor, split: str) -> Tensor:
    """Move layouts vertically so that those of the two splits never meet.

    A layout is held out if ``(y // 4 + code) % 8 == 0``.

    Args:
        y: int64, upper edges [px].
        room: int64, how far down `y` may be at most; at least 28.
        code: int64, what else makes the layout: places, sizes, counts.
        split: which side to be on.
    """
    rest = (y // 4 + code) % 8
    if split == HELD_OUT:
        down, up = y + 4 * ((8 - rest) % 8), y - 4 * rest
        return torch.where(down <= room, down, up)
    near = torch.where(y + 4 <= room, y + 4, y - 4)
    return torch.where(rest == 0, near, y)


def marks_of_runs(sheets: Sheets, runs: Runs) -> Marks:
    """The centre of every glyph of the runs."""
    advance = advances(sheets, runs.glyphs, runs.font, runs.size)
    x = runs.x[..., None] + advance.cumsum(-1) - advance // 2
    y = (runs.y + sheets.height[runs.size] // 2)[..., None].expand_as(x)
    image = torch.arange(len(x), device=x.device)[:, None, None].expand_as(x)
    image = torch.where(runs.glyphs > 0, image, -1)  # glyph 0 is the space
    return Marks(*(t.reshape(-1) for t in (image, x, y, runs.glyphs.clamp(min=0))))


def together(parts: Sequence[Marks]) -> Marks:
    """All marks of the parts."""
    return Marks(
        *(
            torch.cat(list(t))
            for t in zip(*((m.image, m.x, m.y, m.thing) for m in parts), strict=True)
        )
    )


def things_by_patch(marks: Marks, n: int, height: int, width: int, things: int) -> Tensor:
    """Which things have their centre in which patch of 16 px: bool [n, patches, things], raster."""
    columns = width // 16
    inside = (
        (marks.image >= 0)
        & (marks.x >= 0)
        & (marks.x < width)
        & (marks.y >= 0)
        & (marks.y < height)
    )
    patch = (marks.y // 16) * columns + marks.x // 16
    patches = (height // 16) * columns
    found = torch.zeros(n * patches * things + 1, dtype=torch.bool, device=marks.x.device)
    where = (marks.image * patches + patch) * things + marks.thing
    found[torch.where(inside, where, n * patches * things)] = True
    return found[:-1].view(n, patches, things)
