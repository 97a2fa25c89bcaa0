"""The bundled glyphs, icons and word lists, as tensors that a rasteriser can gather from.

The masters in ``assets/`` were drawn by `harness.pocket.draw_assets`: one grey grid per font at an
em of 48 px, one grid of icons at 64 px. Loading scales the glyphs to every size by exact area
weights; the arithmetic stays within integers, so the bytes are the same on every machine.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

ASSETS = Path(__file__).parent / "assets"

ASCII = "".join(map(chr, range(0x20, 0x7F)))
EM = 48
"""Em size of the masters [px]."""
CELL = 64
"""Side of a glyph's cell in the masters [px]."""
BASELINE = 48
"""Rows of a master's cell above the baseline. As many as the em has, so that it falls between two
rows at every size."""
GRID_COLUMNS = 20
"""Glyphs per row of a font's grid."""
ICON = 64
"""Side of an icon [px]."""
ICON_COLUMNS = 8
"""Icons per row of their grid."""

SIZES = (11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 32, 36, 40)

# A column fainter than this, of 255, is no ink: rounding would otherwise widen most letters.
_FAINT = 24

Colour = tuple[str, str, tuple[int, int, int]]

COLOURS: tuple[Colour, ...] = (
    ("red", "红", (222, 30, 38)),
    ("orange", "橙", (250, 134, 10)),
    ("yellow", "黄", (245, 222, 20)),
    ("green", "绿", (24, 150, 60)),
    ("blue", "蓝", (28, 92, 220)),
    ("purple", "紫", (134, 44, 182)),
    ("pink", "粉", (255, 140, 190)),
    ("gray", "灰", (140, 140, 140)),
)
"""English name, Chinese name (without 色), RGB. Each stays itself when darkened by an icon's luminance."""


@dataclass(frozen=True)
class Sheets:
    """Everything that can be printed. S sizes, F fonts, C characters, I icons.

    Attributes:
        characters: printable ASCII, then the Chinese characters and full-width marks; a glyph's id
            is its index here.
        fonts: names of the fonts.
        cjk: bool [F]; whether the font has the Chinese glyphs. Every font has ASCII.
        sizes: em sizes [px]. The baseline is below the first ``size`` rows of a cell.
        flat: uint8 [N]; coverage of all bitmaps, row by row, 0 to 255.
        base: int64 [S, F, C]; where a glyph's bitmap starts in `flat`. Glyphs that a font lacks
            share one empty bitmap.
        stride: int64 [S]; columns of a cell [px].
        height: int64 [S]; rows of a cell [px], about 4/3 of the size.
        advance: int64 [S, F, C]; distance to the next glyph [px]; no ink lies at or beyond it. 0
            where the font lacks the glyph.
        icons: uint8 [I, 2, 64, 64]; alpha, then luminance, from 80 to 255 where
            opaque. Meant to be tinted: ``colour * luminance / 255``.
        icon_names_en: one word each, 3 to 9 lower-case letters.
        icon_names_zh: 1 to 3 characters each.
        colours: English name, Chinese name, RGB.
        words_en: 3 to 8 lower-case letters each.
        words_zh: 2 or 3 characters each, most frequent first.
    """

    characters: str
    fonts: tuple[str, ...]
    cjk: Tensor
    sizes: tuple[int, ...]
    flat: Tensor
    base: Tensor
    stride: Tensor
    height: Tensor
    advance: Tensor
    icons: Tensor
    icon_names_en: tuple[str, ...]
    icon_names_zh: tuple[str, ...]
    colours: tuple[Colour, ...]
    words_en: tuple[str, ...]
    words_zh: tuple[str, ...]

    def to(self, device: torch.device | str) -> Sheets:
        """The same, with every tensor on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved)

    def glyph_ids(self, text: str) -> list[int]:
        """Ids of `text`'s characters.

        Raises:
            ValueError: a character is not among `characters`.
        """
        return [self.characters.index(c) for c in text]

    def icon_sheet(self, size: int) -> Tensor:
        """All icons scaled to a square of `size` px by area.

        Returns:
            uint8 [I, 2, size, size]: alpha, luminance; on the device of `icons`.
        """
        weights = _area_weights(ICON, ICON, size, size).to(self.icons.device, torch.float64)
        alpha, light = self.icons.to(torch.float64).unbind(1)
        # Luminance under transparent pixels means nothing and must not bleed in.
        opacity, lit = (weights @ plane @ weights.T for plane in (alpha, alpha * light))
        shade = torch.where(opacity > 0, lit / opacity.clamp(min=1), 0)
        return torch.stack([opacity / ICON**2, shade], dim=1).round().to(torch.uint8)


def load(device: torch.device | str = "cpu") -> Sheets:
    """Read the assets and scale the glyphs to all sizes, on the CPU; then move them to `device`."""
    chinese = _text("characters.txt").rstrip("\n")
    characters = ASCII + chinese
    records = json.loads(_text("glyphs/fonts.json"))
    fonts = tuple(record["name"] for record in records)
    cjk = torch.tensor([record["chinese"] for record in records])
    counts = [len(record["advances"]) for record in records]
    faces = [_cells(f, n) for f, n in zip(fonts, counts, strict=True)]
    masters = torch.cat(faces).float()
    boost = torch.cat([torch.full((len(f),), _boost(f), dtype=torch.int32) for f in faces])
    nominal = torch.tensor([a for record in records for a in record["advances"]])
    # Which master, in order of font and character, is which glyph; the rest have none.
    owned = torch.zeros(len(fonts), len(characters), dtype=torch.bool)
    for f, n in enumerate(counts):
        owned[f, :n] = True

    flats, bases, strides, advances = [], [], [], []
    start = 0
    for size in SIZES:
        side = -(-CELL * size // EM)
        bitmaps, ink = _scaled(masters, boost, size, side)
        base = torch.full(owned.shape, start, dtype=torch.int64)
        base[owned] = start + (torch.arange(len(masters)) + 1) * side * side
        advance = torch.zeros(owned.shape, dtype=torch.int64)
        advance[owned] = torch.maximum((nominal * size / EM).round().long(), ink)
        flats += [torch.zeros(side * side, dtype=torch.uint8), bitmaps.flatten()]
        start += (len(masters) + 1) * side * side
        bases.append(base)
        strides.append(side)
        advances.append(advance)

    names_en, names_zh = _icon_names()
    sheets = Sheets(
        characters=characters,
        fonts=fonts,
        cjk=cjk,
        sizes=SIZES,
        flat=torch.cat(flats),
        base=torch.stack(bases),
        stride=torch.tensor(strides),
        height=torch.tensor(strides),
        advance=torch.stack(advances),
        icons=_icons(len(names_en)),
        icon_names_en=names_en,
        icon_names_zh=names_zh,
        colours=COLOURS,
        words_en=tuple(_text("words_en.txt").split()),
        words_zh=tuple(_text("words_zh.txt").split()),
    )
    return sheets.to(device)


def _boost(masters: Tensor) -> int:
    """What to add to a font's coverage at 11 px [%]; at larger sizes less, from 26 px on nothing.

    Thin strokes lose contrast to averaging. Heavy ones do not, and would close the dot of an i.
    """
    letters = masters[: len(ASCII)].long()
    return max(0, 110 - 5 * int(letters.sum()) // letters.numel())


def _scaled(masters: Tensor, boost: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """Glyphs at `size`: uint8 [n, side, side], and int64 [n], the columns that their ink needs.

    Args:
        masters: float32 [n, CELL, CELL].
        boost: int32 [n]; see `_boost`.
        size: em [px].
        side: of the cells [px].
    """
    weights = _area_weights(CELL, EM, side, size)
    # Sums stay below 2**24, where float32 still counts every integer.
    total = (weights @ masters @ weights.T).to(torch.int32)
    percent = 100 + boost[:, None, None] * max(0, 26 - size) // 15
    scale = 100 * EM * EM
    bitmaps = ((total * percent + scale // 2) // scale).clamp(max=255).to(torch.uint8)
    strong = bitmaps.amax(dim=1) >= _FAINT
    columns = torch.arange(1, side + 1)
    ink = (strong * columns).amax(dim=1)
    bitmaps = bitmaps * (columns <= ink[:, None])[:, None, :]
    return bitmaps, ink


def _area_weights(cells: int, unit: int, pixels: int, per_unit: int) -> Tensor:
    """How much of each source cell lies in each pixel, where `unit` cells make `per_unit` pixels.

    Returns:
        float32 [pixels, cells], whole numbers; a row that lies within the source sums to `unit`.
    """
    # Measured in 1/per_unit of a cell, both kinds of border are whole numbers.
    p = np.arange(pixels)[:, None] * unit
    c = np.arange(cells)[None, :] * per_unit
    overlap = np.minimum(p + unit, c + per_unit) - np.maximum(p, c)
    return torch.from_numpy(overlap.clip(0).astype(np.float32))


def _cells(font: str, count: int) -> Tensor:
    """A font's masters: uint8 [count, CELL, CELL]."""
    with Image.open(ASSETS / "glyphs" / f"{font}.png") as image:
        return _cut(np.asarray(image.convert("L"))[..., None], CELL, GRID_COLUMNS, count)[:, 0]


def _icons(count: int) -> Tensor:
    """The icons' masters: uint8 [count, 2, ICON, ICON], alpha before luminance."""
    with Image.open(ASSETS / "icons.png") as image:
        return _cut(np.asarray(image.convert("LA"))[..., ::-1], ICON, ICON_COLUMNS, count)


def _cut(grid: Any, side: int, columns: int, count: int) -> Tensor:
    """The first `count` cells of a grid [rows, columns, channels]: [count, channels, side, side]."""
    channels = grid.shape[2]
    cells = grid.reshape(-1, side, columns, side, channels).transpose(0, 2, 4, 1, 3)
    return torch.from_numpy(cells.reshape(-1, channels, side, side)[:count].copy())


def _icon_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """English names, Chinese names."""
    rows = list(csv.DictReader(_text("icons.csv").splitlines()))
    return tuple(r["name_en"] for r in rows), tuple(r["name_zh"] for r in rows)


def _text(name: str) -> str:
    """An asset's text."""
    return (ASSETS / name).read_text(encoding="utf-8")
