"""The bundled glyphs, icons and lists."""

from __future__ import annotations

import dataclasses
import unicodedata

import pytest
import torch
from torch import Tensor

from harness.pocket import draw_assets, sheets
from harness.pocket.sheets import Sheets


@pytest.fixture(scope="module")
def loaded() -> Sheets:
    return sheets.load()


def bitmap(s: Sheets, size: int, font: int, character: str) -> Tensor:
    """A glyph's whole cell: uint8 [height, stride]."""
    z = s.sizes.index(size)
    height, stride = int(s.height[z]), int(s.stride[z])
    start = int(s.base[z, font, s.characters.index(character)])
    return s.flat[start : start + height * stride].view(height, stride)


def test_loading_twice_gives_the_same_bytes(loaded: Sheets) -> None:
    again = sheets.load()
    for field in dataclasses.fields(Sheets):
        a, b = getattr(loaded, field.name), getattr(again, field.name)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, field.name


def test_shapes_and_types_are_as_documented(loaded: Sheets) -> None:
    s, f, c = len(loaded.sizes), len(loaded.fonts), len(loaded.characters)
    assert (loaded.base.shape, loaded.base.dtype) == ((s, f, c), torch.int64)
    assert (loaded.advance.shape, loaded.advance.dtype) == ((s, f, c), torch.int64)
    assert (loaded.cjk.shape, loaded.cjk.dtype) == ((f,), torch.bool)
    assert loaded.stride.shape == loaded.height.shape == (s,)
    assert (loaded.flat.dim(), loaded.flat.dtype) == (1, torch.uint8)
    ends = loaded.base.amax(dim=(1, 2)) + loaded.height * loaded.stride
    assert int(ends.max()) == len(loaded.flat)
    assert loaded.cjk.tolist() == [False] * 6 + [True] * 3


def test_characters_are_distinct_and_cover_what_is_written(loaded: Sheets) -> None:
    assert len(set(loaded.characters)) == len(loaded.characters)
    assert loaded.characters.startswith("".join(chr(i) for i in range(0x20, 0x7F)))
    chinese = [c for c in loaded.characters if "\u4e00" <= c <= "\u9fff"]
    assert 180 <= len(chinese) <= 220
    texts = [*loaded.words_en, *loaded.words_zh, *loaded.icon_names_en, *loaded.icon_names_zh]
    texts += [text for en, zh, _ in loaded.colours for text in (en, zh)]
    texts += [draw_assets.TEMPLATES, draw_assets.COLOUR_CHARACTERS, draw_assets.MARKS]
    assert set("".join(texts)) <= set(loaded.characters)
    assert loaded.glyph_ids(" A图") == [0, 33, loaded.characters.index("图")]


def test_lists_keep_their_promised_form(loaded: Sheets) -> None:
    assert len(set(loaded.words_en)) == len(loaded.words_en) > 1500
    assert all(3 <= len(w) <= 8 and w.isascii() and w.islower() for w in loaded.words_en)
    assert 400 <= len(set(loaded.words_zh)) == len(loaded.words_zh) <= 1500
    assert {len(w) for w in loaded.words_zh} == {2, 3}
    assert len(set(loaded.icon_names_en)) == len(loaded.icon_names_en) == len(loaded.icons) == 48
    assert all(3 <= len(n) <= 9 and n.isalpha() and n.islower() for n in loaded.icon_names_en)
    assert len(set(loaded.icon_names_zh)) == 48
    assert all(1 <= len(n) <= 3 for n in loaded.icon_names_zh)


def test_every_owned_glyph_has_ink_and_every_other_none(loaded: Sheets) -> None:
    for size in (11, 40):
        for f in range(len(loaded.fonts)):
            for c in loaded.characters:
                owned = c.isascii() or bool(loaded.cjk[f])
                has_ink = bool(bitmap(loaded, size, f, c).max() >= 128)
                assert has_ink == (owned and c != " "), (size, loaded.fonts[f], c)


def test_ink_ends_before_the_advance(loaded: Sheets) -> None:
    for z, size in enumerate(loaded.sizes):
        for f in range(len(loaded.fonts)):
            for i, c in enumerate(loaded.characters):
                advance = int(loaded.advance[z, f, i])
                assert not bitmap(loaded, size, f, c)[:, advance:].any(), (size, f, c)
                owned = c.isascii() or bool(loaded.cjk[f])
                assert (advance > 0) == owned


def test_letters_stand_on_the_baseline(loaded: Sheets) -> None:
    for size in loaded.sizes:
        for f in range(len(loaded.fonts)):
            cell = bitmap(loaded, size, f, "E")
            assert cell[size - 1].max() >= 96
            assert cell[size:].max() < 96


def test_no_two_glyphs_of_a_font_look_alike(loaded: Sheets) -> None:
    for size in (12, 24):
        for f, name in enumerate(loaded.fonts):
            owned = [c for c in loaded.characters if c.isascii() or bool(loaded.cjk[f])]
            # The blank has no look, and these differ in height alone in a plain sans.
            owned = [c for c in owned if c not in " |lI"]
            cells = torch.stack([bitmap(loaded, size, f, c).flatten() for c in owned]).float()
            distance = torch.cdist(cells, cells) + 1e9 * torch.eye(len(owned))
            nearest = divmod(int(distance.argmin()), len(owned))
            pair = [unicodedata.name(owned[i]) for i in nearest]
            assert distance.min() > 130, (name, size, pair)
            if size == 24:
                for a, b in ("Il", "I1", "l1", "O0", "l|"):
                    assert not torch.equal(bitmap(loaded, 24, f, a), bitmap(loaded, 24, f, b))


def test_icons_differ_in_shape_whatever_their_size(loaded: Sheets) -> None:
    for size in (32, 48, 64):
        icons = loaded.icon_sheet(size)
        assert (icons.shape, icons.dtype) == ((48, 2, size, size), torch.uint8)
        look = icons.float().prod(dim=1).flatten(1) / 255
        look = look / look.norm(dim=1, keepdim=True)
        likeness = look @ look.T - torch.eye(48)
        assert likeness.max() < 0.95
    assert torch.equal(loaded.icon_sheet(64)[:, 0], loaded.icons[:, 0])
    # The corners are transparent, and something is opaque.
    assert not loaded.icons[:, 0, :2].any()
    assert (loaded.icons[:, 0].amax(dim=(1, 2)) > 250).all()


def test_area_weights_share_each_cell_out_whole() -> None:
    weights = sheets._area_weights(sheets.CELL, sheets.EM, 15, 11)
    assert (weights.sum(dim=0) == 11).all()
    assert (weights[:-1].sum(dim=1) == sheets.EM).all()
    assert torch.equal(weights, weights.round())


def test_the_assets_stay_small() -> None:
    files = [p for p in sheets.ASSETS.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 1_600_000
    assert not [p for p in files if p.suffix in (".ttf", ".otf", ".ttc")]
