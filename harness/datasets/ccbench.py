"""CCBench: multiple-choice questions on Chinese culture, and whatever shares its format.

The public file is ``CCBench.tsv`` of OpenCompass's VLMEvalKit (510 questions, answers public; md5
``f5dde47f24dc5a6fb6e595b409b466ac`` since noisy items were removed at the end of 2023), part of the
MMBench family: github.com/open-compass/MMBench (Apache-2.0), paper arXiv 2307.06281. Nothing of it
is bundled here; whoever downloads it accepts its terms.

Format: tab-separated, quoted as CSV, with the columns ``index``, ``question``, ``A`` … ``D``,
``answer``, ``category``, ``image``, and sometimes ``g_index``, ``hint`` and ``source``. Its quirks,
all accepted:

* Every question appears several times, its options rotated: pass k of question q has the index
  ``q + 1_000_000 k``, unless a column ``g_index`` names the question. CCBench's 2,040 rows are 510
  questions with four passes each.
* ``image`` holds the encoded picture in base64, or, in at most 64 characters, the index of the row
  that does. An older form of the file repeats the picture.
* An option that a question does not have is empty or ``nan``.
"""

from __future__ import annotations

import base64
import binascii
import csv
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from harness.datasets.draw import stratified
from harness.datasets.errors import DatasetError
from harness.datasets.pictures import picture
from harness.datasets.sample import Image, Message, Sample, Text

SCORER = "ccbench"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PASS_STEP = 1_000_000
LONGEST_REFERENCE = 64
REQUIRED = ("index", "question", "A", "B", "answer", "image")


@dataclass(frozen=True)
class Row:
    """One row, checked; its picture is not decoded yet.

    Attributes:
        index: unique within the file.
        question_id: shared by all passes of a question.
        turn: which pass it is, from 0.
        options: text of each option by its letter, in order.
        answer: the right option's letter.
        category: empty if the file has no such column.
        image_index: index of the row whose cell holds the picture.
        line: where the row ends in the file, from 1.
    """

    index: int
    question_id: int
    turn: int
    question: str
    hint: str
    options: Mapping[str, str]
    answer: str
    category: str
    image_index: int
    line: int


def load(path: Path, *, samples: int, seed: int, circular: bool = False) -> tuple[Sample, ...]:
    """Draw samples from a CCBench TSV file, stratified by ``category``.

    Questions, not rows, are drawn, each category getting its share (see
    `harness.datasets.draw.stratified`). The same file, number and seed give the same samples in the
    same order.

    Args:
        path: the TSV file.
        samples: how many rows, >= 1.
        seed: draws them.
        circular: whole questions with all their passes, side by side, as circular evaluation needs
            them; `samples` must then be a multiple of the number of passes. If false, a question's
            second pass is used only when all questions have given their first, and so on: pictures
            repeat as little as they can.

    Returns:
        One user turn each: the picture, then the text (see `prompt`). ``metadata`` has ``index``,
        ``question_id``, ``pass``, ``options`` and ``answer``.

    Raises:
        DatasetError: the file cannot be read, a row is malformed (line and column are named), it
            holds fewer rows than asked for, or a drawn picture is missing or broken.
    """
    if samples < 1:
        raise DatasetError(f"samples={samples}: takes a whole number >= 1")
    rows = read_rows(path)
    if len(rows) < samples:
        raise DatasetError(f"{path}: {samples} samples asked for, but it holds {len(rows)} rows")
    drawn = _circles(path, rows, samples, seed) if circular else _spread(rows, samples, seed)
    pictures = _pictures(path, drawn)
    return tuple(_sample(row, pictures[row.image_index]) for row in drawn)


def read_rows(path: Path) -> tuple[Row, ...]:
    """All rows of the file, checked, in order, without their pictures.

    Raises:
        DatasetError: as `load`, except for pictures, which are not decoded.
    """
    rows: dict[int, Row] = {}
    turns: Counter[int] = Counter()
    for line, cells in _lines(path):
        row = _row(path, line, cells, turns)
        if row.index in rows:
            raise DatasetError(
                f"{path}: line {line}: index: {row.index} is that of line {rows[row.index].line}"
            )
        rows[row.index] = row
    holders = {row.index for row in rows.values() if row.image_index == row.index}
    for row in rows.values():
        if row.image_index not in holders:
            raise DatasetError(
                f"{path}: line {row.line}: image: refers to row {row.image_index}, "
                "which holds no picture"
            )
    return tuple(rows.values())


def prompt(question: str, options: Mapping[str, str], hint: str = "") -> str:
    """The published prompt: that of VLMEvalKit's multiple-choice sets, which puts the picture first.

    Source: ``ImageMCQDataset.build_prompt`` in ``vlmeval/dataset/image_mcq.py`` of
    github.com/open-compass/VLMEvalKit (Apache-2.0). Its last line ends in a space and a newline.
    """
    lines = [f"Hint: {hint}"] if hint else []
    lines += [f"Question: {question}", "Options:"]
    lines += [f"{letter}. {text}" for letter, text in options.items()]
    lines += ["Please select the correct answer from the options above. ", ""]
    return "\n".join(lines)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells by column of each row."""
    # A picture's cell exceeds the default limit of 128 KiB; the limit is one for the process.
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t", strict=True)
            header = next(reader, [])
            missing = [column for column in REQUIRED if column not in header]
            if missing:
                raise DatasetError(
                    f"{path}: line 1: column {missing[0]} is missing; found {header!r:.200}"
                )
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise DatasetError(
                        f"{path}: line {reader.line_num}: expected {len(header)} columns, "
                        f"found {len(cells)}"
                    )
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 ({error})") from error
    except csv.Error as error:
        raise DatasetError(
            f"{path}: line {reader.line_num}: not tab-separated ({error})"
        ) from error


def _row(path: Path, line: int, cells: Mapping[str, str], turns: Counter[int]) -> Row:
    def wrong(column: str, takes: str) -> DatasetError:
        found = cells.get(column, "nothing")
        return DatasetError(f"{path}: line {line}: {column}: expected {takes}, found {found!r:.80}")

    index = _whole_number(cells["index"])
    if index is None:
        raise wrong("index", "a whole number")
    question_id = index % PASS_STEP
    if "g_index" in cells:
        group = _whole_number(cells["g_index"])
        if group is None:
            raise wrong("g_index", "a whole number")
        question_id = group
    if not _given(cells["question"]):
        raise wrong("question", "a text")
    options = {letter: cells[letter] for letter in LETTERS if _given(cells.get(letter, ""))}
    for letter in ("A", "B"):
        if letter not in options:
            raise wrong(letter, "a text: every question has two options or more")
    answer = cells["answer"].strip()
    if answer not in options:
        raise wrong("answer", f"one of {', '.join(options)}")
    image = cells["image"]
    if not _given(image):
        raise wrong("image", "a picture in base64, or the index of a row that has one")
    image_index = index
    if len(image) <= LONGEST_REFERENCE:
        reference = _whole_number(image)
        if reference is None or reference == index:
            raise wrong("image", "a picture in base64, or the index of a row that has one")
        image_index = reference
    turns[question_id] += 1
    hint = cells.get("hint", "")
    category = cells.get("category", "")
    return Row(
        index=index,
        question_id=question_id,
        turn=turns[question_id] - 1,
        question=cells["question"],
        hint=hint if _given(hint) else "",
        options=MappingProxyType(options),
        answer=answer,
        category=category if _given(category) else "",
        image_index=image_index,
        line=line,
    )


def _whole_number(text: str) -> int | None:
    text = text.strip()
    # A column that once had a gap comes back from pandas as 12.0.
    text = text.removesuffix(".0")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _given(text: str) -> bool:
    return text.strip() not in ("", "nan", "NaN")


def _by_question(rows: Sequence[Row]) -> dict[int, list[Row]]:
    passes: dict[int, list[Row]] = {}
    for row in rows:
        passes.setdefault(row.question_id, []).append(row)
    return passes


def _ranked(passes: Mapping[int, list[Row]], questions: int, seed: int) -> list[list[Row]]:
    return list(
        stratified(
            list(passes.values()),
            questions,
            seed,
            name=lambda rows: str(rows[0].question_id),
            stratum=lambda rows: rows[0].category,
        )
    )


def _spread(rows: Sequence[Row], samples: int, seed: int) -> list[Row]:
    passes = _by_question(rows)
    chosen: list[Row] = []
    turn = 0
    while len(chosen) < samples:
        left = {key: group for key, group in passes.items() if len(group) > turn}
        ranked = _ranked(left, min(len(left), samples - len(chosen)), seed)
        chosen += [group[turn] for group in ranked]
        turn += 1
    return chosen


def _circles(path: Path, rows: Sequence[Row], samples: int, seed: int) -> list[Row]:
    passes = _by_question(rows)
    sizes = sorted({len(group) for group in passes.values()})
    if len(sizes) > 1:
        raise DatasetError(
            f"{path}: circular: questions have {sizes[0]} to {sizes[-1]} passes; "
            "they must all have the same number"
        )
    if samples % sizes[0]:
        raise DatasetError(
            f"{path}: circular: samples={samples} is no multiple of the {sizes[0]} passes "
            "of a question"
        )
    return [row for group in _ranked(passes, samples // sizes[0], seed) for row in group]


def _pictures(path: Path, rows: Sequence[Row]) -> dict[int, Image]:
    """Pictures by the index of the row that holds them, read again: most of the file is pictures."""
    wanted = {row.image_index for row in rows}
    pictures: dict[int, Image] = {}
    for line, cells in _lines(path):
        index = _whole_number(cells["index"])
        if index is None or index not in wanted:
            continue
        source = f"{path}: line {line}: image"
        try:
            data = base64.b64decode("".join(cells["image"].split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise DatasetError(f"{source}: not base64 ({error})") from error
        pictures[index] = picture(data, f"row {index}", source)
    return pictures


def _sample(row: Row, image: Image) -> Sample:
    text = Text(prompt(row.question, row.options, row.hint))
    return Sample(
        id=str(row.index),
        messages=(Message("user", (image, text)),),
        references=(row.answer,),
        scorer=SCORER,
        category=row.category,
        metadata=MappingProxyType(
            {
                "index": row.index,
                "question_id": row.question_id,
                "pass": row.turn,
                "options": dict(row.options),
                "answer": row.answer,
            }
        ),
    )
