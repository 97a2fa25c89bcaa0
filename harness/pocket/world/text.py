"""Ragged text as tensors: pieces of different lengths, joined for a whole batch at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.pocket.phrases import PHRASES
from harness.pocket.sheets import Sheets
from harness.pocket.special import token_id
from harness.pocket.tokenizer import character_id, phrase_id

PAD = token_id("<|endoftext|>")


@dataclass(frozen=True)
class Piece:
    """Token ids of a part of B texts.

    Attributes:
        ids: int64 [B, L]; only the first `length` of a row count.
        length: int64 [B].
        answer: whether the model is to learn to say it.
    """

    ids: Tensor
    length: Tensor
    answer: bool = False

    def as_answer(self) -> Piece:
        """The same, to be said by the model."""
        return Piece(self.ids, self.length, True)

    def where(self, keep: Tensor) -> Piece:
        """The same where `keep` (bool [B]), elsewhere empty."""
        return Piece(self.ids, torch.where(keep, self.length, 0), self.answer)


@dataclass(frozen=True)
class Joined:
    """Pieces put together: ids int64 [B, L] padded at the end, answer bool [B, L], length int64 [B]."""

    ids: Tensor
    answer: Tensor
    length: Tensor


@dataclass(frozen=True)
class Stack:
    """Pieces to choose from: ids int64 [O, B, L], length int64 [O, B]."""

    ids: Tensor
    length: Tensor

    def at(self, index: Tensor) -> Piece:
        """The piece that `index` (int64 [B]) names, row by row."""
        row = torch.arange(len(index), device=index.device)
        return Piece(self.ids[index, row], self.length[index, row])


def stack(options: Sequence[Piece]) -> Stack:
    """Pieces of the same number of rows, to choose from."""
    width = max(p.ids.shape[1] for p in options)
    ids = [torch.nn.functional.pad(p.ids, (0, width - p.ids.shape[1]), value=PAD) for p in options]
    return Stack(torch.stack(ids), torch.stack([p.length for p in options]))


def choose(options: Sequence[Piece], index: Tensor) -> Piece:
    """Of several pieces the one that `index` (int64 [B]) names, row by row."""
    return stack(options).at(index)


def join(pieces: Sequence[Piece], *, multiple: int = 1) -> Joined:
    """The pieces one after the other; the length is rounded up to a `multiple` by padding."""
    lengths = torch.stack([p.length for p in pieces])
    total = lengths.sum(0)
    longest = int(total.max())
    longest = -(-longest // multiple) * multiple
    starts = lengths.cumsum(0) - lengths
    device, rows = total.device, len(total)
    # The last column takes what does not count.
    place, value, said = [], [], []
    for piece, start in zip(pieces, starts, strict=True):
        step = torch.arange(piece.ids.shape[1], device=device)
        inside = step < piece.length[:, None]
        place.append(torch.where(inside, start[:, None] + step, longest))
        value.append(piece.ids)
        said.append(inside & piece.answer)
    where = torch.cat(place, 1)
    ids = torch.full((rows, longest + 1), PAD, dtype=torch.int64, device=device)
    ids.scatter_(1, where, torch.cat(value, 1))
    answer = torch.zeros((rows, longest + 1), dtype=torch.bool, device=device)
    answer.scatter_(1, where, torch.cat(said, 1))
    ids[:, longest] = PAD
    return Joined(ids[:, :longest], answer[:, :longest], total)


class Codec:
    """Strings as glyphs and tokens, on one device.

    Attributes:
        sheets: what is drawn.
        token: int64 [C], the token of each glyph.
    """

    def __init__(self, sheets: Sheets) -> None:
        self.sheets = sheets
        self.device = sheets.flat.device
        self.token = torch.tensor([character_id(c) for c in sheets.characters], device=self.device)
        self._glyph = {c: i for i, c in enumerate(sheets.characters)}

    def glyphs(self, strings: Sequence[str]) -> Tensor:
        """Glyph indices, int64 [len(strings), longest], -1 at the ends."""
        return self._glyphs(tuple(strings))

    @functools.cache  # noqa: B019  one codec lives as long as the program that draws
    def _glyphs(self, strings: tuple[str, ...]) -> Tensor:
        longest = max(len(s) for s in strings)
        rows = [[self._glyph[c] for c in s] + [-1] * (longest - len(s)) for s in strings]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def said(self, glyphs: Tensor) -> Piece:
        """The tokens of glyphs int64 [B, C]."""
        return Piece(self.token[glyphs.clamp(min=0)], (glyphs >= 0).sum(1))

    @functools.cache  # noqa: B019
    def fixed(self, text: str) -> Tensor:
        """Token ids [L] of a fixed text that is one phrase or special token, or else characters."""
        if text.startswith("<|"):
            ids = [token_id(text)]
        elif text in PHRASES:
            ids = [phrase_id(text)]
        else:
            ids = [character_id(c) for c in text]
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def constant(self, text: str, rows: int, *, answer: bool = False) -> Piece:
        """The same text for every row."""
        ids = self.fixed(text)
        return Piece(ids.expand(rows, -1), self._lengths(rows, len(ids)), answer)

    @functools.cache  # noqa: B019
    def _lengths(self, rows: int, length: int) -> Tensor:
        return torch.full((rows,), length, dtype=torch.int64, device=self.device)

    def vision(self, rows: int, tokens: int) -> Piece:
        """An image: its start, `tokens` pads, its end."""
        ids = [token_id("<|vision_start|>"), *[token_id("<|image_pad|>")] * tokens]
        return Piece(
            self._row(*ids, token_id("<|vision_end|>")).expand(rows, -1),
            self._lengths(rows, tokens + 2),
        )

    @functools.cache  # noqa: B019
    def _row(self, *ids: int) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    def turn(self, rows: int, question: Sequence[Piece], answer: Sequence[Piece]) -> list[Piece]:
        """A user's turn and the answer that the model is to learn, as the chat template writes it."""
        return [
            self.constant("<|im_start|>", rows),
            self.constant("user\n", rows),
            *question,
            self.constant("<|im_end|>", rows),
            self.constant("\n", rows),
            self.constant("<|im_start|>", rows),
            self.constant("assistant\n", rows),
            *(p.as_answer() for p in answer),
            self.constant("<|im_end|>", rows, answer=True),
            self.constant("\n", rows),
        ]


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Glyph strings int64 [B, Ci], -1 at their ends, one directly after the other: [B, sum Ci]."""
    joined = torch.cat(list(parts), 1)
    # A stable sort by "is absent" moves the gaps to the end.
    order = (joined < 0).to(torch.uint8).argsort(stable=True, dim=1)
    return joined.gather(1, order)
