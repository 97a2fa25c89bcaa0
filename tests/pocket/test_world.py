"""The pocket world's batches: what is asked, what is drawn, and what keeps the splits apart."""

from __future__ import annotations

import functools
import json
import random

import pytest
import torch
from tokenizers import Tokenizer

from harness.pocket import sheets
from harness.pocket.raster import Icons, Runs, paint
from harness.pocket.tokenizer import tokenizer_json
from harness.pocket.world import cc, ocr, rag
from harness.pocket.world.batch import TASKS, Minibatch, draw, merged
from harness.pocket.world.draw import HELD_OUT, TRAIN, Draws, a_word, settle, words_of
from harness.pocket.world.text import Codec, join, stack
from harness.pocket.world.things import things_of

TOKENIZER = Tokenizer.from_str(json.dumps(tokenizer_json()))


@functools.cache
def codec() -> Codec:
    return Codec(sheets.load())


def draws(seed: int) -> Draws:
    return Draws(torch.Generator().manual_seed(seed))


def batch(task: str, seed: int, split: str = TRAIN, n: int = 16) -> Minibatch:
    return draw(codec(), draws(seed), random.Random(seed), task, n, split)


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
@pytest.mark.parametrize("task", TASKS)
def test_tokens_are_what_the_tokenizer_makes_of_their_text(task: str, split: str) -> None:
    """Pieces are joined as ids in training and as text in a benchmark: both must be the same."""
    for seed in range(4):
        b = batch(task, seed, split)
        for ids, valid in zip(b.tokens, b.valid, strict=True):
            said = ids[valid].tolist()
            text = TOKENIZER.decode(said, skip_special_tokens=False)
            assert TOKENIZER.encode(text).ids == said, text


@pytest.mark.parametrize("task", TASKS)
def test_only_answers_and_their_ends_are_learned(task: str) -> None:
    b = batch(task, 5)
    assert not (b.answer & ~b.valid).any()
    for ids, answer in zip(b.tokens, b.answer, strict=True):
        text = TOKENIZER.decode(ids.tolist(), skip_special_tokens=False)
        turns = [t.split("<|im_end|>")[0] for t in text.split("<|im_start|>assistant\n")[1:]]
        learned = TOKENIZER.decode(ids[answer].tolist(), skip_special_tokens=False)
        assert learned == "".join(f"{t}<|im_end|>" for t in turns)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_batch(task: str) -> None:
    a, b, other = batch(task, 6), batch(task, 6), batch(task, 7)
    assert torch.equal(a.pixels, b.pixels) and torch.equal(a.tokens, b.tokens)
    assert a.tokens.shape != other.tokens.shape or not torch.equal(a.tokens, other.tokens)


def test_parts_keep_an_items_pictures_with_it() -> None:
    b = batch("rag", 8)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    parts = b.parts(4, order)
    images = len(b.pixels) // 16
    assert torch.equal(torch.cat([p.tokens for p in parts]), b.tokens[order])
    first = parts[0]
    assert torch.equal(first.pixels[:images], b.pixels[order[0] * images : (order[0] + 1) * images])


def test_marks_lie_where_something_is_drawn() -> None:
    d = draws(9)
    drawn = cc.scenes(codec(), d, 32, canvas=(160, 192), split=TRAIN, chinese=False, turns=1)
    b = merged(codec(), [drawn])
    marked = b.things.any(-1)
    pixels = drawn.pixels.float()
    patches = pixels.unfold(2, 16, 16).unfold(3, 16, 16).flatten(2, 3)  # [N, 3, P, 16, 16]
    spread = patches.std((-2, -1)).amax(1)
    assert spread[marked].median() > 3 * spread[~marked].median()


def test_the_right_option_is_the_true_one() -> None:
    """Letters are answers only if the option that they name is what the scene holds."""
    d = draws(10)
    drawn = cc.scenes(codec(), d, 64, canvas=(160, 192), split=HELD_OUT, chinese=False, turns=1)
    fields = {k: join(v) for k, v in drawn.turns[0].fields.items()}

    def text(name: str, i: int) -> str:
        f = fields[name]
        return TOKENIZER.decode(f.ids[i, : f.length[i]].tolist())

    letters = join(drawn.turns[0].answer)
    counted = 0
    for i in range(64):
        options = [text(c, i) for c in cc.LETTERS]
        assert len(set(options)) == 4
        letter = TOKENIZER.decode(letters.ids[i, :1].tolist())
        if drawn.kinds[int(drawn.kind[i])] == "how_many":
            things = drawn.marks.thing[drawn.marks.image == i]
            most = int(things[things < things_of(sheets.load()).colours].bincount().max())
            assert options[cc.LETTERS.index(letter)] in {str(most), "1"}
            counted += 1
    assert counted > 5


def test_notes_cite_the_pictures_that_show_the_steps() -> None:
    d = draws(11)
    steps, documents = rag.arrangements(HELD_OUT)[40]
    drawn = rag.notes(
        codec(), d, 12, canvas=(96, 96), split=HELD_OUT, chinese=False,
        steps=steps, documents=documents,
    )  # fmt: skip
    answers = join(drawn.turns[0].answer)
    names = sheets.load().icon_names_en
    characters = len(codec().sheets.characters)
    for i in range(12):
        lines = TOKENIZER.decode(answers.ids[i, : answers.length[i]].tolist()).split("\n")
        assert len(lines) == steps[0]
        for number, line in enumerate(lines, 1):
            image = i * drawn.images + int(line.split("(IMG#")[1].rstrip(")")) - 1
            name = line.split("![")[1].split("]")[0]
            marked = drawn.marks.thing[drawn.marks.image == image]
            shown = set(marked[marked < things_of(codec().sheets).colours].tolist())
            assert shown == {characters + names.index(name), ord(str(number)) - 32}


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_answers_of_one_batch_of_notes_end_after_different_steps(split: str) -> None:
    """Else when to stop could be known without reading the notes."""
    b = batch("rag", 3, n=24, split=split)
    steps = (b.tokens == TOKENIZER.encode("\n").ids[0]) & b.answer
    assert len(set(steps.sum(1).tolist())) > 1
    assert len(b.tokens) == 24


def test_splits_do_not_meet() -> None:
    for chinese in (False, True):
        kept = [
            {tuple(g for g in w if g >= 0) for w in words_of(codec(), s, chinese=chinese).tolist()}
            for s in (TRAIN, HELD_OUT)
        ]
        assert not kept[0] & kept[1]
        said = a_word(draws(1), codec(), 20_000, TRAIN, chinese=chinese)
        assert not {tuple(g for g in w if g >= 0) for w in said.tolist()} & kept[1]
    assert not set(rag.arrangements(TRAIN)) & set(rag.arrangements(HELD_OUT))


def test_settle_puts_every_layout_on_its_side() -> None:
    g = torch.Generator().manual_seed(2)
    y = torch.randint(0, 101, (5_000,), generator=g)
    code = torch.randint(0, 1_000, (5_000,), generator=g)
    for split, held in ((TRAIN, False), (HELD_OUT, True)):
        moved = settle(y, torch.full_like(y, 100), code, split)
        assert (((moved // 4 + code) % 8 == 0) == held).all()
        assert ((moved >= 0) & (moved <= 100)).all()


def test_stack_and_join_are_ragged() -> None:
    c = codec()
    pieces = [c.said(c.glyphs([w, "x"])) for w in ("abc", "de")]
    chosen = stack(pieces).at(torch.tensor([1, 0]))
    joined = join([chosen, c.constant("what is the ", 2), chosen.as_answer()], multiple=4)
    assert [
        TOKENIZER.decode(i[:n].tolist()) for i, n in zip(joined.ids, joined.length, strict=True)
    ] == ["dewhat is the de", "xwhat is the x"]
    assert joined.answer.sum(1).tolist() == [2, 1]
    assert joined.ids.shape[1] % 4 == 0


def test_paint_puts_ink_where_it_is_told() -> None:
    c, s = codec(), codec().sheets
    size = s.sizes.index(24)
    one = torch.zeros((1, 1), dtype=torch.int64)
    runs = Runs(c.glyphs(["H"])[None], one, one + size, one + 30, one + 40, torch.zeros(1, 1, 3))
    icons = Icons(one + 3, 40, one + 100, one + 60, torch.tensor([[[255.0, 0, 0]]]))
    picture = paint(
        s, torch.full((1, 3), 255.0), [runs], [icons], height=128, width=160,
        noise=torch.zeros(1), generator=torch.Generator(),
    )[0]  # fmt: skip
    ink = (picture != 255).any(0)
    rows, columns = torch.nonzero(ink[:, :90], as_tuple=True)
    assert rows.min() >= 40 and rows.max() < 40 + s.height[size]
    assert columns.min() >= 30 and columns.max() < 30 + s.advance[size, 0, ord("H") - 32]
    red = picture[:, 60:100, 100:140]
    assert red[0].float().mean() > red[1].float().mean() + 20
    ink[:, :90] = False
    ink[60:100, 100:140] = False
    assert not ink.any()


def test_print_sizes_are_within_their_bands() -> None:
    for band, (low, high) in ocr.BANDS.items():
        drawn = ocr.lines(codec(), draws(3), 64, canvas=(192, 192), split=TRAIN, bands=[band])
        assert ((drawn.print_px >= low) & (drawn.print_px <= high)).float().mean() > 0.95
