"""Single items of the pocket world, as texts and pictures: what a data set's file is made of.

The world draws batches. Here they become items, one after the other, balanced over kinds, print
sizes and languages. Item i follows from its number and the arguments, however many are taken: every
source is drawn in chunks of one size, each from a seed of its own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.pocket import sheets
from harness.pocket.phrases import PHRASES
from harness.pocket.tokenizer import character_id, characters, phrase_id
from harness.pocket.world import cc, ocr, rag
from harness.pocket.world.draw import HELD_OUT, TRAIN, Drawn, Draws
from harness.pocket.world.several import several
from harness.pocket.world.text import Codec, Joined, Piece, join

TASKS = ("ocr", "cc", "rag")
SPLITS = (HELD_OUT, TRAIN)
BANDS = (ocr.LARGE, ocr.FINE)
LANGUAGES = ("en", "zh")
BOTH = "both"

# Items of one chunk: few, because a chunk has one picture size, one number of lines, and so on.
_LINES, _PAGES, _SCENES, _NOTES = 20, 4, 8, 1
_PATIENCE = 400

Source = Callable[[Draws, random.Random], "list[Item]"]


@dataclass(frozen=True)
class Item:
    """One question, of the first turn of a drawn conversation.

    Attributes:
        pictures: uint8 [K, H, W, 3].
        fields: texts by name, as `harness.pocket.world.draw.Turn.fields`.
        answer: what the model is to say.
        kind: name of the category.
        print_px: size of the print that is asked for; 0 where there is none.
        documents: how many pictures each note has; all in one where there are no notes.
        ids: tokens of the turn and its answer, as training has them.
    """

    pictures: Tensor
    fields: Mapping[str, str]
    answer: str
    kind: str
    print_px: int
    documents: tuple[int, ...]
    ids: tuple[int, ...]


def items(
    task: str,
    seed: int,
    *,
    split: str = HELD_OUT,
    band: str = BOTH,
    language: str = BOTH,
    images: int = 1,
) -> Iterator[Item]:
    """Items of one task without end; the same arguments give the same ones.

    Args:
        task: one of `TASKS`.
        seed: draws them.
        split: one of `SPLITS`.
        band: of the print in "ocr": one of `BANDS`, or both in turns.
        language: of what is asked: one of `LANGUAGES`, or both in turns. Numbers and codes are
            asked for in English.
        images: pictures of an item in "ocr"; above 1 each shows one line.
    """
    name = f"pocket {task}/{seed}/{split}/{language}/{images}"
    languages = LANGUAGES if language == BOTH else (language,)
    if task == "cc":
        return _cc(_codec(), name, split, languages)
    if task == "rag":
        return _rag(_codec(), name, split, languages)
    bands = BANDS if band == BOTH else (band,)
    return _ocr(_codec(), name, split, bands, language, images)


def text_of(ids: Sequence[int]) -> str:
    """The text of tokens that the world composes.

    Raises:
        KeyError: a token is neither a character nor a phrase.
    """
    table = _texts()
    return "".join(table[i] for i in ids)


@functools.cache
def _texts() -> dict[int, str]:
    known = ["\n", *sheets.ASCII, *characters()]
    return {character_id(c): c for c in known} | {phrase_id(p): p for p in PHRASES}


@functools.cache
def _codec() -> Codec:
    return Codec(sheets.load())


class _Chunks:
    """The items of one source, chunk after chunk, waiting by kind."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.source, self.chunk = name, source, 0
        self.waiting: dict[str, deque[Item]] = defaultdict(deque)

    def take(self, kind: str) -> Item:
        """The next of a kind.

        Raises:
            RuntimeError: hundreds of chunks had none.
        """
        last = self.chunk + _PATIENCE
        while not self.waiting[kind]:
            if self.chunk == last:
                raise RuntimeError(f"{self.name}: no item of kind {kind} in {_PATIENCE} chunks")
            digest = hashlib.sha256(f"{self.name}/{self.chunk}".encode()).digest()
            number = int.from_bytes(digest[:7], "big")
            generator = torch.Generator().manual_seed(number)
            for item in self.source(Draws(generator), random.Random(number)):
                self.waiting[item.kind].append(item)
            self.chunk += 1
        return self.waiting[kind].popleft()


def _turns(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[str, str]]:
    """All pairs in turns: each side is balanced to within one as soon as `first` is through."""
    for i in itertools.count():
        lap, place = divmod(i, len(first))
        yield first[place], second[(place + lap) % len(second)]


def _ocr(
    codec: Codec, name: str, split: str, bands: Sequence[str], language: str, images: int
) -> Iterator[Item]:
    sources: dict[tuple[str, str], _Chunks] = {}
    for band in bands:
        found: dict[str, Source] = {"line": _lines(codec, split, band, language, images)}
        for kind, make in (("slip", ocr.slips), ("table", ocr.tables)):
            found[kind] = _pages(codec, make, split, band, chinese=False)
            found[f"{kind}_zh"] = _pages(codec, make, split, band, chinese=True)
        sources |= {(k, band): _Chunks(f"{name}/{k}/{band}", s) for k, s in found.items()}
    skipped = {BOTH: (), "en": ("word_zh", "slip_zh", "table_zh")}.get(
        language, ("word", "digits", "code", "slip", "table")
    )
    pages = {k for k, _ in sources} - {"line"}
    kinds = [k for k in ocr.KINDS if k not in skipped and (images == 1 or k not in pages)]
    for kind, band in _turns(kinds, bands):
        yield sources[kind if kind in pages else "line", band].take(kind)


def _in_band(drawn: Drawn, band: str) -> Tensor:
    low, high = ocr.BANDS[band]
    return (drawn.print_px >= low) & (drawn.print_px <= high)


def _lines(codec: Codec, split: str, band: str, language: str, images: int) -> Source:
    def draw(draws: Draws, rng: random.Random) -> list[Item]:
        canvas, n = rng.choice(ocr.CANVASES), _LINES * images
        drawn = ocr.lines(codec, draws, n, canvas=canvas, split=split, bands=[band])
        found = _items(codec, drawn)
        right = _in_band(drawn, band).tolist()
        kept = [r for r in range(n) if right[r] and _is_in(found[r], language)]
        if images == 1:
            return [found[r] for r in kept]
        by_kind: dict[str, list[int]] = defaultdict(list)
        for r in kept:
            by_kind[found[r].kind].append(r)
        rows = [
            group[at : at + images]
            for group in by_kind.values()
            for at in range(0, len(group) - images + 1, images)
        ]
        return _items(codec, several(codec, drawn, images, torch.tensor(rows))) if rows else []

    return draw


def _is_in(item: Item, language: str) -> bool:
    if language == BOTH:
        return True
    if language == "zh":
        return not item.answer.isascii()
    return (item.fields["question"] + item.answer).isascii()


def _pages(
    codec: Codec, make: Callable[..., Drawn], split: str, band: str, *, chinese: bool
) -> Source:
    def draw(draws: Draws, rng: random.Random) -> list[Item]:
        drawn = make(
            codec, draws, _PAGES, canvas=rng.choice(ocr.CANVASES), split=split, band=band,
            chinese=chinese, rows=rng.randint(2, 3) if band == ocr.LARGE else rng.randint(4, 7),
            turns=1,
        )  # fmt: skip
        right = _in_band(drawn, band).tolist()
        return [item for item, r in zip(_items(codec, drawn), right, strict=True) if r]

    return draw


def _cc(codec: Codec, name: str, split: str, languages: Sequence[str]) -> Iterator[Item]:
    canvases = [c for c in ocr.CANVASES if min(c) >= 3 * cc.SIDE]

    def source(chinese: bool) -> Source:
        def draw(draws: Draws, rng: random.Random) -> list[Item]:
            drawn = cc.scenes(
                codec, draws, _SCENES, canvas=rng.choice(canvases), split=split, chinese=chinese,
                turns=1,
            )  # fmt: skip
            return _items(codec, drawn)

        return draw

    sources = {k: _Chunks(f"{name}/{k}", source(k == "zh")) for k in languages}
    for kind, language in _turns(cc.KINDS, languages):
        yield sources[language].take(kind)


def _rag(codec: Codec, name: str, split: str, languages: Sequence[str]) -> Iterator[Item]:
    def source(chinese: bool) -> Source:
        def draw(draws: Draws, rng: random.Random) -> list[Item]:
            steps, documents = rng.choice(rag.arrangements(split))
            drawn = rag.notes(
                codec, draws, _NOTES, canvas=rng.choice(rag.CANVASES), split=split,
                chinese=chinese, steps=steps, documents=documents,
            )  # fmt: skip
            return _items(codec, drawn, documents)

        return draw

    sources = {k: _Chunks(f"{name}/{k}", source(k == "zh")) for k in languages}
    for i in itertools.count():
        language = languages[i % len(languages)]
        yield sources[language].take(rag.KINDS[int(language == "zh")])


def _items(codec: Codec, drawn: Drawn, documents: tuple[int, ...] | None = None) -> list[Item]:
    turn, n = drawn.turns[0], len(drawn.kind)
    pictures = drawn.pixels.unflatten(0, (n, drawn.images)).movedim(2, -1)
    fields = {name: _said(pieces) for name, pieces in turn.fields.items()}
    answers = _said(turn.answer)
    ids = _rows(join(codec.turn(n, turn.question, turn.answer)))
    kinds, print_px = drawn.kind.tolist(), drawn.print_px.tolist()
    return [
        Item(
            pictures[i],
            {name: texts[i] for name, texts in fields.items()},
            answers[i],
            drawn.kinds[kinds[i]],
            print_px[i],
            documents or (drawn.images,),
            tuple(ids[i]),
        )
        for i in range(n)
    ]


def _rows(joined: Joined) -> list[list[int]]:
    pairs = zip(joined.ids.tolist(), joined.length.tolist(), strict=True)
    return [ids[:length] for ids, length in pairs]


def _said(pieces: Sequence[Piece]) -> list[str]:
    return [text_of(ids) for ids in _rows(join(pieces))]
