"""OCRBench (version 1): 1,000 questions about text in pictures, and whatever shares its format.

The public file is ``OCRBench/OCRBench/OCRBench.json`` of github.com/Yuliang-Liu/MultimodalOCR
(MIT licence); its pictures are a separate archive linked there, unpacked as ``OCRBench_Images``.
Paper: arXiv 2305.07895. Questions and pictures were taken from other data sets, each under terms
of its own. Nothing of it is bundled here; whoever downloads it accepts those terms.

Format: a list of objects with ``dataset_name``, ``id``, ``type``, ``question``, ``answers`` and
``image_path``. Its quirks, all accepted: ``answers`` is a string in most items and a list in the
others; ``id`` is a number that repeats across source data sets; items are grouped by type, so that
the first hundreds are of one kind. An addition of ours: ``image_paths``, a list, for items with
several pictures; it then takes the place of ``image_path``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.datasets.draw import distinct, stratified
from harness.datasets.errors import DatasetError
from harness.datasets.pictures import read_picture
from harness.datasets.sample import Image, Message, Sample, Text

SCORER = "ocrbench"
IMAGE_FOLDER = "OCRBench_Images"


@dataclass(frozen=True)
class Item:
    """One entry of the JSON file, checked; pictures are not read yet.

    Attributes:
        id: unique within the file: ``dataset_name/id``, and ``#2``, ``#3`` … on repeats.
        image_paths: as written in the file, in order; at least one.
    """

    id: str
    dataset_name: str
    type: str
    question: str
    answers: tuple[str, ...]
    image_paths: tuple[str, ...]


def load(path: Path, *, samples: int, seed: int) -> tuple[Sample, ...]:
    """Draw samples from an OCRBench JSON file, stratified by ``type``.

    Every type gets its share of `samples`, rounded so that the sum is exact; within a type, and for
    the order of the result, items are ranked by a hash of seed and id. The same file, number and
    seed give the same samples in the same order.

    Args:
        path: the JSON file. Pictures are looked up relative to its folder, then to an
            ``OCRBench_Images`` folder beside it or beside its folder.
        samples: how many, >= 1.
        seed: draws them.

    Returns:
        One user turn each: the pictures in order, then the question.

    Raises:
        DatasetError: the file cannot be read, an item is malformed (its index and field are named),
            it holds fewer items than asked for, or a drawn picture is missing or broken.
    """
    if samples < 1:
        raise DatasetError(f"samples={samples}: takes a whole number >= 1")
    items = read_items(path)
    if len(items) < samples:
        raise DatasetError(f"{path}: {samples} samples asked for, but it holds {len(items)} items")
    drawn = stratified(items, samples, seed, name=lambda i: i.id, stratum=lambda i: i.type)
    return tuple(_sample(path, item) for item in drawn)


def read_items(path: Path) -> tuple[Item, ...]:
    """All entries of the file, checked.

    Raises:
        DatasetError: as `load`, except for pictures, which are not opened.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: not JSON in UTF-8 ({error})") from error
    if not isinstance(entries, list):
        raise DatasetError(f"{path}: expected a list of items, found {type(entries).__name__}")
    seen: Counter[str] = Counter()
    return tuple(_item(path, index, entry, seen) for index, entry in enumerate(entries))


def _item(path: Path, index: int, entry: Any, seen: Counter[str]) -> Item:
    def wrong(field: str, takes: str) -> DatasetError:
        found = entry.get(field, "nothing")
        return DatasetError(f"{path}: item {index}: {field}: expected {takes}, found {found!r:.80}")

    if not isinstance(entry, Mapping):
        raise DatasetError(f"{path}: item {index}: expected an object, found {entry!r:.80}")
    for field in ("dataset_name", "type", "question"):
        if not isinstance(entry.get(field), str) or not entry[field].strip():
            raise wrong(field, "a text")
    number = entry.get("id")
    if isinstance(number, bool) or not isinstance(number, int | str) or number == "":
        raise wrong("id", "a number or a text")
    answers: Any = entry.get("answers")
    answers = [answers] if isinstance(answers, str) else answers
    if not _texts(answers):
        raise wrong("answers", "a text, or a list of texts")
    if "image_paths" in entry:
        images: Any = entry["image_paths"]
        if not _texts(images):
            raise wrong("image_paths", "a list of file names")
    else:
        images = [entry.get("image_path")]
        if not _texts(images):
            raise wrong("image_path", "a file name")
    return Item(
        id=distinct(f"{entry['dataset_name']}/{number}", seen),
        dataset_name=entry["dataset_name"],
        type=entry["type"],
        question=entry["question"],
        answers=tuple(answers),
        image_paths=tuple(images),
    )


def _texts(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(v, str) and v for v in value)


def _sample(path: Path, item: Item) -> Sample:
    images = tuple(_image(path, item, name) for name in item.image_paths)
    return Sample(
        id=item.id,
        messages=(Message("user", (*images, Text(item.question))),),
        references=item.answers,
        scorer=SCORER,
        category=item.type,
        metadata=MappingProxyType(
            {
                "dataset_name": item.dataset_name,
                "type": item.type,
                "image_paths": list(item.image_paths),
            }
        ),
    )


def _image(path: Path, item: Item, name: str) -> Image:
    folder = path.parent
    places = [folder / name, folder / IMAGE_FOLDER / name, folder.parent / IMAGE_FOLDER / name]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        looked = ", ".join(str(place) for place in places)
        raise DatasetError(f"{path}: {item.id}: picture {name} not found; looked for {looked}")
    return read_picture(file, name)
