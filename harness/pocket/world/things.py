"""What marks on pictures tell of, for auxiliary losses: glyphs, icons, their colours and places."""

from __future__ import annotations

from dataclasses import dataclass

from harness.pocket.sheets import Sheets

PLACES = (
    "top left", "top", "top right", "left", "centre", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
PLACES_ZH = ("左上", "上面", "右上", "左边", "中间", "右边", "左下", "下面", "右下")


@dataclass(frozen=True)
class Things:
    """The numbers by which marks name what they mark: where each sort begins.

    Attributes:
        icons: the first icon; glyphs come before it, from 0.
        colours: the first colour of an icon.
        places: the first of `PLACES`.
        total: of all.
    """

    icons: int
    colours: int
    places: int
    total: int


def things_of(sheets: Sheets) -> Things:
    """How the marks of all tasks are numbered."""
    icons = len(sheets.characters)
    colours = icons + len(sheets.icon_names_en)
    places = colours + len(sheets.colours)
    return Things(icons, colours, places, places + len(PLACES))
