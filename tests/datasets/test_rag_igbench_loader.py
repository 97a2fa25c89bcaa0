"""RAG-IGBench's published format: its quirks, and errors that say where to look."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PillowImage

from harness.datasets.errors import DatasetError
from harness.datasets.rag_igbench import load, prompt_parts, read_items
from harness.datasets.sample import Image, Text


def encoded(shade: int = 0) -> bytes:
    buffer = io.BytesIO()
    PillowImage.new("RGB", (20, 10), (shade, 10, 10)).save(buffer, format="PNG")
    return buffer.getvalue()


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "id": "17",
        "query": "怎么开门？",
        "documents": ["第一步", "第二步"],
        "images": [["p/0.png", "p/1.png"], ["p/2.png"]],
        "gt_raw_answer": '{"reason": "…"}',
        "gt_clean_answer": "转![钥匙](IMG#1)推![门](IMG#3)",
        "category": ["Family", "how-to"],
        "split": "dev",
    } | changes


def write(folder: Path, entries: Sequence[Any]) -> Path:
    (folder / "p").mkdir(exist_ok=True)
    for i in range(3):
        (folder / "p" / f"{i}.png").write_bytes(encoded(i))
    path = folder / "RAG_IG_CH.jsonl"
    path.write_text("\n".join(json.dumps(e, ensure_ascii=False) for e in entries) + "\n", "utf-8")
    return path


def test_a_line_becomes_a_sample(tmp_path: Path) -> None:
    (sample,) = load(write(tmp_path, [entry()]), samples=1, seed=0)
    assert sample.id == "17"
    (message,) = sample.messages
    assert message.role == "user"
    assert message.parts == (
        Text("怎么开门？\n"),
        Text("DOC#1: 第一步\n"),
        Text("(IMG#1)"),
        Image(encoded(0), "image/png", "p/0.png"),
        Text("(IMG#2)"),
        Image(encoded(1), "image/png", "p/1.png"),
        Text("\n"),
        Text("DOC#2: 第二步\n"),
        Text("(IMG#3)"),
        Image(encoded(2), "image/png", "p/2.png"),
        Text("\n"),
    )
    assert sample.references == ("转![钥匙](IMG#1)推![门](IMG#3)",)
    assert (sample.scorer, sample.category) == ("rag_igbench", "how-to")
    assert sample.metadata["topic"] == "Family"
    json.dumps(dict(sample.metadata))


def test_documents_without_pictures() -> None:
    image = Image(b"", "image/png", "x")
    parts = prompt_parts("q", ["a", "b"], [[], [image]])
    assert parts == (
        *(Text("q\n"), Text("DOC#1: a\n"), Text("\n"), Text("DOC#2: b\n"), Text("(IMG#1)")),
        *(image, Text("\n")),
    )
    with pytest.raises(ValueError, match="zip"):
        prompt_parts("q", ["a"], [])


def test_ids_may_repeat_or_be_numbers(tmp_path: Path) -> None:
    # The two languages carry the same ids, and some copies join them.
    path = write(tmp_path, [entry(), entry(), entry(id=17), entry(id=18)])
    assert [i.id for i in read_items(path)] == ["17", "17#2", "17#3", "18"]


def test_draws_are_stratified_and_reproducible(tmp_path: Path) -> None:
    kinds = ["what-is"] * 20 + ["how-to"] * 10
    path = write(tmp_path, [entry(id=i, category=["T", k]) for i, k in enumerate(kinds)])
    drawn = load(path, samples=6, seed=1)
    assert Counter(s.category for s in drawn) == {"what-is": 4, "how-to": 2}
    assert drawn == load(path, samples=6, seed=1)
    assert drawn != load(path, samples=6, seed=2)


def test_a_split_alone(tmp_path: Path) -> None:
    path = write(tmp_path, [entry(id=1), entry(id=2, split="train")])
    assert [s.id for s in load(path, samples=1, seed=0, split="train")] == ["2"]
    with pytest.raises(
        DatasetError, match="2 samples asked for, but it holds 1 items of split 'dev'"
    ):
        load(path, samples=2, seed=0, split="dev")


def test_blank_lines_a_mark_and_missing_extras(tmp_path: Path) -> None:
    bare = entry()
    del bare["gt_raw_answer"], bare["split"]
    path = write(tmp_path, [bare])
    path.write_bytes(b"\xef\xbb\xbf\n" + path.read_bytes() + b"\n")
    assert [i.line for i in read_items(path)] == [2]


@pytest.mark.parametrize("url", ["https://x.org/a.jpg", "http://x.org/a", "//x.org/a.jpg"])
def test_a_url_says_what_to_do(tmp_path: Path, url: str) -> None:
    path = write(tmp_path, [entry(images=[["p/0.png"], ["p/1.png", url]])])
    assert len(read_items(path)) == 1
    with pytest.raises(
        DatasetError, match=r"line 1: images\[1\]\[1\]: .* is a URL; download first"
    ):
        load(path, samples=1, seed=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": None}, "line 2: id: expected a text or a number, found None"),
        ({"id": True}, "line 2: id"),
        ({"query": ""}, "line 2: query: expected a text"),
        ({"gt_clean_answer": 3}, "line 2: gt_clean_answer: expected a text, found 3"),
        ({"documents": "a"}, "line 2: documents: expected a list of texts"),
        ({"documents": []}, "line 2: documents: expected a list of texts"),
        ({"documents": ["a", 2]}, "line 2: documents"),
        ({"images": ["p/0.png"]}, "line 2: images: expected a list of lists"),
        (
            {"images": [["p/0.png"]]},
            "line 2: images: expected one list for each of the 2 documents",
        ),
        ({"images": [[""], []]}, "line 2: images"),
        ({"category": "how-to"}, "line 2: category: expected a topic and a type"),
        ({"category": ["how-to"]}, "line 2: category"),
        ({"split": 1}, "line 2: split"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write(tmp_path, [entry(), entry(**changes)])
    with pytest.raises(DatasetError) as caught:
        load(path, samples=1, seed=0)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_field_is_named(tmp_path: Path) -> None:
    broken = entry()
    del broken["gt_clean_answer"]
    with pytest.raises(DatasetError, match=r"line 1: gt_clean_answer: .* found 'nothing'"):
        load(write(tmp_path, [broken]), samples=1, seed=0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[\n", "line 1: not JSON"),
        (b"[1]\n", "line 1: expected one object a line"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "1 samples asked for, but it holds 0 items"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(DatasetError) as caught:
        load(path, samples=1, seed=0)
    assert words in str(caught.value)


def test_missing_and_broken_pictures(tmp_path: Path) -> None:
    path = write(tmp_path, [entry(images=[["gone.png"], []])])
    with pytest.raises(DatasetError, match=r"line 1: images\[0\]\[0\]: picture gone.png not found"):
        load(path, samples=1, seed=0)
    path = write(tmp_path, [entry()])
    (tmp_path / "p" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(DatasetError, match=r"1.png: not a picture"):
        load(path, samples=1, seed=0)
    with pytest.raises(DatasetError, match=r"nowhere: cannot be read"):
        load(tmp_path / "nowhere", samples=1, seed=0)
