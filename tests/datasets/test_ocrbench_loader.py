"""OCRBench's published format: its quirks, and errors that say where to look."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PillowImage

from harness.datasets.errors import DatasetError
from harness.datasets.ocrbench import load, read_items
from harness.datasets.sample import Image, Text


def encoded(kind: str = "PNG", size: tuple[int, int] = (20, 10)) -> bytes:
    buffer = io.BytesIO()
    PillowImage.new("RGB", size, (200, 10, 10)).save(buffer, format=kind)
    return buffer.getvalue()


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "dataset_name": "IIIT5K",
        "id": 7,
        "image_path": "IIIT5K/test/1.png",
        "question": "what is written in the image?",
        "answers": "CENTRE",
        "type": "Regular Text Recognition",
    } | changes


def write(folder: Path, entries: Any, images: str = "") -> Path:
    file = folder / images / "IIIT5K" / "test" / "1.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encoded())
    path = folder / "OCRBench.json"
    path.write_text(json.dumps(entries))
    return path


def test_an_item_becomes_a_sample(tmp_path: Path) -> None:
    path = write(tmp_path, [entry()])
    (sample,) = load(path, samples=1, seed=0)
    assert sample.id == "IIIT5K/7"
    (message,) = sample.messages
    assert message.role == "user"
    picture, question = message.parts
    assert picture == Image(encoded(), "image/png", "IIIT5K/test/1.png")
    assert question == Text("what is written in the image?")
    assert sample.references == ("CENTRE",)
    assert (sample.scorer, sample.category) == ("ocrbench", "Regular Text Recognition")
    assert sample.metadata["dataset_name"] == "IIIT5K"
    json.dumps(dict(sample.metadata))


def test_answers_may_be_text_or_list(tmp_path: Path) -> None:
    path = write(tmp_path, [entry(answers="a"), entry(answers=["b", "c"], id="x")])
    assert [item.answers for item in read_items(path)] == [("a",), ("b", "c")]


def test_repeated_ids_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, [entry(), entry(dataset_name="svt"), entry(), entry()])
    assert [i.id for i in read_items(path)] == ["IIIT5K/7", "svt/7", "IIIT5K/7#2", "IIIT5K/7#3"]


@pytest.mark.parametrize("images", ["", "OCRBench_Images"])
def test_pictures_beside_the_file(tmp_path: Path, images: str) -> None:
    (sample,) = load(write(tmp_path, [entry()], images), samples=1, seed=0)
    assert sample.images[0].data == encoded()


def test_pictures_beside_the_folder(tmp_path: Path) -> None:
    write(tmp_path, [], "OCRBench_Images")
    (tmp_path / "json_files").mkdir()
    path = tmp_path / "json_files" / "OCRBench.json"
    path.write_text(json.dumps([entry()]))
    assert len(load(path, samples=1, seed=0)) == 1


def test_several_pictures_in_order_and_media_types_from_content(tmp_path: Path) -> None:
    path = write(tmp_path, [entry(image_paths=["b.bin", "a.bin"])])
    (tmp_path / "a.bin").write_bytes(encoded("JPEG"))
    (tmp_path / "b.bin").write_bytes(encoded("WEBP"))
    (sample,) = load(path, samples=1, seed=0)
    assert [i.name for i in sample.images] == ["b.bin", "a.bin"]
    assert [i.media_type for i in sample.images] == ["image/webp", "image/jpeg"]


def test_sampling_is_by_type(tmp_path: Path) -> None:
    kinds = ["A"] * 50 + ["B"] * 30 + ["C"] * 20
    path = write(tmp_path, [entry(id=i, type=k) for i, k in enumerate(kinds)])
    drawn = load(path, samples=10, seed=1)
    assert Counter(s.category for s in drawn) == {"A": 5, "B": 3, "C": 2}
    assert drawn == load(path, samples=10, seed=1)


def test_too_few_items(tmp_path: Path) -> None:
    path = write(tmp_path, [entry(), entry()])
    with pytest.raises(DatasetError, match="3 samples asked for, but it holds 2 items"):
        load(path, samples=3, seed=0)
    with pytest.raises(DatasetError, match="samples=0"):
        load(path, samples=0, seed=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset_name": None}, "item 1: dataset_name: expected a text"),
        ({"type": ""}, "item 1: type: expected a text"),
        ({"question": 3}, "item 1: question: expected a text, found 3"),
        ({"id": None}, "item 1: id: expected a number or a text"),
        ({"id": True}, "item 1: id"),
        ({"answers": []}, "item 1: answers: expected a text, or a list of texts"),
        ({"answers": ""}, "item 1: answers"),
        ({"answers": ["a", 2]}, "item 1: answers"),
        ({"image_path": None}, "item 1: image_path: expected a file name"),
        ({"image_paths": []}, "item 1: image_paths: expected a list of file names"),
        ({"image_paths": "a.png"}, "item 1: image_paths"),
    ],
)
def test_malformed_items_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write(tmp_path, [entry(), entry(**changes)])
    with pytest.raises(DatasetError) as caught:
        load(path, samples=1, seed=0)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_field_is_named(tmp_path: Path) -> None:
    broken = entry()
    del broken["answers"]
    with pytest.raises(DatasetError, match=r"item 0: answers: .* found 'nothing'"):
        load(write(tmp_path, [broken]), samples=1, seed=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "expected a list"), ("[1]", "item 0: expected an object"), ("[", "not JSON")],
)
def test_files_that_are_something_else(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match=words):
        load(path, samples=1, seed=0)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nowhere.json: cannot be read"):
        load(tmp_path / "nowhere.json", samples=1, seed=0)


def test_missing_picture_lists_where_it_was_sought(tmp_path: Path) -> None:
    path = write(tmp_path, [entry(image_path="gone.png")])
    with pytest.raises(DatasetError, match=r"gone.png not found; looked for .*OCRBench_Images"):
        load(path, samples=1, seed=0)


@pytest.mark.parametrize("data", [b"", b"not a picture", encoded(size=(300, 300))[:150]])
def test_broken_picture_is_named(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path, [entry(image_path="broken.png")])
    (tmp_path / "broken.png").write_bytes(data)
    with pytest.raises(DatasetError, match=r"broken.png: not a picture"):
        load(path, samples=1, seed=0)
