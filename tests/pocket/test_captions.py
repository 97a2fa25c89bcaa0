"""Captioned pictures: their shapes, what they say, and that both tokenizers agree."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from harness.pocket import clip
from harness.pocket import sheets as sheets_of
from harness.pocket.world import captions, cc
from harness.pocket.world.captions import CONTEXT, KINDS, SIDE, Captioned, caption_texts
from harness.pocket.world.draw import HELD_OUT, TRAIN, Draws, Marks
from harness.pocket.world.text import Codec
from harness.pocket.world.things import PLACES, PLACES_ZH, things_of

COUNT = 24


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(sheets_of.load())


def drawn(codec: Codec, seed: int, split: str = TRAIN, parts: int = 3) -> list[Captioned]:
    draws = Draws(torch.Generator().manual_seed(seed))
    return captions.captioned(codec, draws, random.Random(seed), COUNT, split, parts=parts)


def test_batches_have_all_kinds_and_one_language_for_each(codec: Codec) -> None:
    seen = set()
    for seed in range(4):
        for batch in drawn(codec, seed):
            assert batch.pictures.shape == (COUNT, SIDE, SIDE, 3)
            assert batch.pictures.dtype == torch.uint8
            assert batch.tokens.shape == (COUNT, CONTEXT)
            assert batch.kind.bincount().tolist() == [14, 6, 4]
            texts = caption_texts(batch.tokens)
            for k, kind in enumerate(KINDS):
                own = [t for t, i in zip(texts, batch.kind.tolist(), strict=True) if i == k]
                heads = {
                    "scene": r"an? \w+ \w+ at the [a-z ]+", "step": r"step [1-4]: \w+",
                    "line": r"the text: .+",
                }  # fmt: skip
                english = {bool(re.match(heads[kind], t)) for t in own}
                assert len(english) == 1
                seen.add((kind, english.pop()))
    assert len(seen) == 6


def test_the_same_seed_gives_the_same_pairs(codec: Codec) -> None:
    a, b = drawn(codec, 3), drawn(codec, 3)
    assert all(torch.equal(x.pictures, y.pictures) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))
    draws = Draws(torch.Generator().manual_seed(3))
    pictures, tokens = captions.caption_batches(codec, draws, random.Random(3), 9, HELD_OUT)
    assert (len(pictures), len(tokens)) == (9, 9)


def test_a_scene_shows_what_its_caption_says(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = []

    def noted(*args: object) -> cc.Scene:
        scenes.append(real(*args))  # type: ignore[arg-type]
        return scenes[-1]

    real = cc.scene
    monkeypatch.setattr(cc, "scene", noted)
    draws = Draws(torch.Generator().manual_seed(0))
    batch = captions.captioned(codec, draws, random.Random(1), 40, TRAIN, kinds=["scene"], parts=4)
    s, sheets, numbers = scenes[0], codec.sheets, set()
    for part, found in enumerate(batch):
        for i, text in enumerate(caption_texts(found.tokens)):
            row, facts = i * 4 + part, set()
            for slot, sort in enumerate(s.slot_sort[row].tolist()):
                if sort < 0:
                    continue
                icon, place = int(s.sort[row, sort]), int(s.place[row, slot])
                en, zh, _ = sheets.colours[int(s.colour[row, slot])]
                article = "an" if en == "orange" else "a"
                name = sheets.icon_names_en[icon]
                facts.add(f"{article} {en} {name} at the {PLACES[place]}")
                facts.add(f"{PLACES_ZH[place]}有{zh}色的{sheets.icon_names_zh[icon]}")
            said = re.split(", ?", text)
            assert facts.issuperset(said)
            numbers.add(len(said))
    assert numbers == {1, 2, 3}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_marked_is_there_and_what_is_named_is_said(codec: Codec, kind: str) -> None:
    sheets, side = codec.sheets, SIDE // 16
    names = [(c, c) for c in sheets.characters]
    names += list(zip(sheets.icon_names_en, sheets.icon_names_zh, strict=True))
    names += [(en, f"{zh}色") for en, zh, _ in sheets.colours]
    names += list(zip(PLACES, PLACES_ZH, strict=True))
    places = len(names) - len(PLACES)
    assert len(names) == things_of(sheets).total
    draws = Draws(torch.Generator().manual_seed(2))
    batches = captions.captioned(codec, draws, random.Random(2), 24, TRAIN, kinds=[kind], parts=4)
    for batch in batches:
        assert batch.things.shape == (24, side * side, len(names))
        assert not (batch.named & ~batch.things.any(1)).any()
        for text, named in zip(caption_texts(batch.tokens), batch.named, strict=True):
            said = [names[i] for i in named.nonzero()[:, 0].tolist()]
            assert len(said) >= {"scene": 3, "step": 2, "line": 1}[kind]
            assert all(en in text or zh in text for en, zh in said)
        # A place is marked within its own third of the picture.
        for _, patch, thing in batch.things[:, :, places:].nonzero().tolist():
            for at, third in ((patch // side, thing // 3), (patch % side, thing % 3)):
                assert SIDE * third < 3 * 16 * (at + 1) and 3 * 16 * at < SIDE * (third + 1)
        if kind == "step":
            found = batch.things.any(1)
            assert (found[:, : len(sheets.characters)].sum(1) == 1).all()
            assert (found.sum(1) == 2).all()


def test_marks_follow_a_picture_that_is_made_square(codec: Codec) -> None:
    pixels = torch.zeros(1, 3, 64, 96, dtype=torch.uint8)
    pixels[:, :, 48:56, 80:88] = 255
    marks = Marks(*(torch.tensor([v]) for v in (0, 84, 52, 7)))
    draws = Draws(torch.Generator().manual_seed(0))
    squashed = captions._square(pixels, marks)
    framed = captions._centred(draws, pixels, marks)
    for picture, moved in (squashed, framed):
        assert picture.shape == (1, 3, SIDE, SIDE)
        assert (picture[0, :, int(moved.y), int(moved.x)] == 255).all()


def test_open_clip_reads_the_captions_as_the_same_tokens(codec: Codec, tmp_path: Path) -> None:
    pytest.importorskip("open_clip", reason="the extra clip is not installed")
    assert clip.END == captions.END and clip.ClipRecipe().context == CONTEXT
    clip.write_folder(tmp_path, clip.ClipRecipe())
    tokens = torch.cat([b.tokens for s in range(4) for b in drawn(codec, s, HELD_OUT)])
    assert torch.equal(clip.tokenize(caption_texts(tokens), tmp_path), tokens)


def test_no_caption_is_too_long(codec: Codec) -> None:
    sheets = codec.sheets
    colour = max(len(c[0]) for c in sheets.colours)
    name, place = max(map(len, sheets.icon_names_en)), max(map(len, PLACES))
    assert 3 * len("an   at the , ") + 3 * (colour + name + place) < CONTEXT
