"""RAG-IGBench: questions answered from notes with pictures, by text that shows the right pictures.

The public files are ``RAG_IG_CH.jsonl`` (6,057 Chinese questions) and ``RAG_IG_EN.json`` (their
machine translation, lines as well) of github.com/USTC-StarTeam/RAG-IGBench and of the Hugging Face
data set ``Muyi13/RAG-IGBench``; paper arXiv 2512.05119. The published statements on the licence
differ (CC BY-NC 4.0 in the repository, CC BY 4.0 in the paper); the pictures belong to users of the
platform they come from. Nothing of it is bundled here; whoever downloads it accepts its terms.

Format: one JSON object a line, with ``id``, ``query``, ``documents`` (a list of texts), ``images``
(a list for each document, in which every picture is named by its URL), ``gt_clean_answer`` (the
gold answer: Markdown in which ``![alt](IMG#k)`` shows picture k), ``gt_raw_answer``, ``category`` (topic
and type of question) and ``split``. Pictures are numbered from 1 through all documents of a question.
Here a picture may also be a path relative to the file's folder, and has to be one to be read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.datasets.draw import distinct, stratified
from harness.datasets.errors import DatasetError
from harness.datasets.pictures import read_picture
from harness.datasets.sample import Image, Message, Sample, Text

SCORER = "rag_igbench"


@dataclass(frozen=True)
class Item:
    """One line of the file, checked; pictures are not read yet.

    Attributes:
        id: unique within the file: as written, and ``#2``, ``#3`` … on repeats.
        images: for each document, its pictures as written in the file.
        answer: the gold answer.
        topic, type: the two parts of ``category``.
        split: empty if the line has none.
        line: its number, from 1.
    """

    id: str
    query: str
    documents: tuple[str, ...]
    images: tuple[tuple[str, ...], ...]
    answer: str
    topic: str
    type: str
    split: str
    line: int


def load(path: Path, *, samples: int, seed: int, split: str | None = None) -> tuple[Sample, ...]:
    """Draw samples from a RAG-IGBench file, stratified by type of question.

    Each type gets its share (see `harness.datasets.draw.stratified`). The same file, number and seed
    give the same samples in the same order.

    Args:
        path: the file of JSON lines. Pictures are looked up relative to its folder.
        samples: how many, >= 1.
        seed: draws them.
        split: only lines of this split, such as ``dev``; `None` takes all.

    Returns:
        One user turn each (see `prompt_parts`); the clean gold answer is its reference.

    Raises:
        DatasetError: the file cannot be read, a line is malformed (its number and field are named),
            it holds fewer items than asked for, or a drawn picture is a URL, missing or broken.
    """
    if samples < 1:
        raise DatasetError(f"samples={samples}: takes a whole number >= 1")
    items = [item for item in read_items(path) if split is None or item.split == split]
    if len(items) < samples:
        of_split = "" if split is None else f" of split {split!r}"
        raise DatasetError(
            f"{path}: {samples} samples asked for, but it holds {len(items)} items{of_split}"
        )
    drawn = stratified(items, samples, seed, name=lambda i: i.id, stratum=lambda i: i.type)
    return tuple(_sample(path, item) for item in drawn)


def read_items(path: Path) -> tuple[Item, ...]:
    """All items of the file, checked, in order.

    Raises:
        DatasetError: as `load`, except for pictures, which are not opened.
    """
    seen: Counter[str] = Counter()
    items = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    items.append(_item(path, number, line, seen))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 ({error})") from error
    return tuple(items)


def prompt_parts(
    query: str, documents: Sequence[str], images: Sequence[Sequence[Image]]
) -> tuple[Text | Image, ...]:
    """The parts of the user's turn: question, then each document followed by its pictures.

    It keeps the published input's structure (question, numbered documents, a mark ``(IMG#k)`` before
    each picture, k through all documents) and leaves out its instructions, several hundred words.

    Args:
        query: the question.
        documents: their texts.
        images: the pictures of each document; as many lists as documents.
    """
    parts: list[Text | Image] = [Text(f"{query}\n")]
    k = 0
    for d, (document, pictures) in enumerate(zip(documents, images, strict=True), 1):
        parts.append(Text(f"DOC#{d}: {document}\n"))
        for image in pictures:
            k += 1
            parts += [Text(f"(IMG#{k})"), image]
        parts.append(Text("\n"))
    return tuple(parts)


def _item(path: Path, number: int, line: str, seen: Counter[str]) -> Item:
    def wrong(field: str, takes: str) -> DatasetError:
        found = entry.get(field, "nothing")
        return DatasetError(
            f"{path}: line {number}: {field}: expected {takes}, found {found!r:.80}"
        )

    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: line {number}: not JSON ({error})") from error
    if not isinstance(entry, Mapping):
        raise DatasetError(f"{path}: line {number}: expected one object a line, found {line!r:.80}")
    name = entry.get("id")
    if isinstance(name, bool) or not isinstance(name, int | str) or name == "":
        raise wrong("id", "a text or a number")
    for field in ("query", "gt_clean_answer"):
        if not isinstance(entry.get(field), str) or not entry[field].strip():
            raise wrong(field, "a text")
    documents: Any = entry.get("documents")
    if not _texts(documents) or not documents:
        raise wrong("documents", "a list of texts")
    images: Any = entry.get("images")
    if not isinstance(images, list) or not all(map(_texts, images)):
        raise wrong("images", "a list of lists of URLs or paths")
    if len(images) != len(documents):
        raise wrong("images", f"one list for each of the {len(documents)} documents")
    category: Any = entry.get("category")
    if not _texts(category) or len(category) != 2:
        raise wrong("category", "a topic and a type")
    split = entry.get("split", "")
    if not isinstance(split, str):
        raise wrong("split", "a text")
    return Item(
        id=distinct(str(name), seen),
        query=entry["query"],
        documents=tuple(documents),
        images=tuple(tuple(names) for names in images),
        answer=entry["gt_clean_answer"],
        topic=category[0],
        type=category[1],
        split=split,
        line=number,
    )


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) and v for v in value)


def _sample(path: Path, item: Item) -> Sample:
    images = [
        [_image(path, item, f"images[{d}][{i}]", name) for i, name in enumerate(names)]
        for d, names in enumerate(item.images)
    ]
    return Sample(
        id=item.id,
        messages=(Message("user", prompt_parts(item.query, item.documents, images)),),
        references=(item.answer,),
        scorer=SCORER,
        category=item.type,
        metadata=MappingProxyType(
            {
                "topic": item.topic,
                "type": item.type,
                "split": item.split,
                "images": [list(names) for names in item.images],
            }
        ),
    )


def _image(path: Path, item: Item, field: str, name: str) -> Image:
    if "//" in name[:9]:
        raise DatasetError(
            f"{path}: line {item.line}: {field}: {name} is a URL; download first: save the pictures "
            "beside the file and write their paths, relative to its folder, in place of the URLs"
        )
    file = path.parent / name
    if not file.is_file():
        raise DatasetError(
            f"{path}: line {item.line}: {field}: picture {name} not found; looked for {file}"
        )
    return read_picture(file, name)
