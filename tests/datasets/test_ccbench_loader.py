"""CCBench's published format: its quirks, and errors that say where to look."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from PIL import Image as PillowImage

from harness.datasets.ccbench import load, prompt, read_rows
from harness.datasets.errors import DatasetError
from harness.datasets.sample import Image, Text

COLUMNS = ("index", "question", "A", "B", "C", "D", "answer", "category", "image")
OPTIONS = ("天坛", "故宫", "长城", "颐和园")


def encoded(shade: int = 0, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    PillowImage.new("RGB", (20, 10), (shade, 10, 10)).save(buffer, format=kind)
    return buffer.getvalue()


def cell(shade: int = 0, kind: str = "PNG") -> str:
    return base64.b64encode(encoded(shade, kind)).decode()


def question(q: int, category: str = "scenery_building", passes: int = 4) -> list[dict[str, str]]:
    """A question and its rotations as the public file has them."""
    rows = []
    for k in range(passes):
        turned = OPTIONS[-k:] + OPTIONS[:-k] if k else OPTIONS
        rows.append(
            {
                "index": str(q + k * 1_000_000),
                "question": f"图中是什么？ 第{q}题",
                **dict(zip("ABCD", turned, strict=True)),
                "answer": "ABCD"[(1 + k) % 4],
                "category": category,
                "image": str(q) if k else cell(q),
            }
        )
    return rows


def write(
    folder: Path, rows: Sequence[Mapping[str, str]], columns: Sequence[str] = COLUMNS
) -> Path:
    path = folder / "CCBench.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, delimiter="\t", lineterminator="\n", restval="")
        table.writeheader()
        table.writerows(rows)
    return path


def write_questions(folder: Path, n: int, passes: int = 4) -> Path:
    sets = [question(q, "abc"[q % 3], passes) for q in range(n)]
    # All first passes, then all second ones: as in the public file.
    return write(folder, [group[k] for k in range(passes) for group in sets])


def test_a_row_becomes_a_sample(tmp_path: Path) -> None:
    (sample,) = load(write(tmp_path, question(7)), samples=1, seed=0)
    assert sample.id == "7"
    (message,) = sample.messages
    assert message.role == "user"
    assert message.parts == (
        Image(encoded(7), "image/png", "row 7"),
        Text(
            "Question: 图中是什么？ 第7题\nOptions:\nA. 天坛\nB. 故宫\nC. 长城\nD. 颐和园\n"
            "Please select the correct answer from the options above. \n"
        ),
    )
    assert sample.references == ("B",)
    assert (sample.scorer, sample.category) == ("ccbench", "scenery_building")
    assert sample.metadata["options"]["B"] == "故宫"
    json.dumps(dict(sample.metadata))


def test_rotated_rows_share_the_picture_and_keep_the_answer(tmp_path: Path) -> None:
    samples = load(write(tmp_path, question(7)), samples=4, seed=0, circular=True)
    assert [s.id for s in samples] == ["7", "1000007", "2000007", "3000007"]
    assert {s.images[0].data for s in samples} == {encoded(7)}
    assert {s.metadata["options"][s.references[0]] for s in samples} == {"故宫"}
    assert [s.references[0] for s in samples] == ["B", "C", "D", "A"]
    assert [s.metadata["pass"] for s in samples] == [0, 1, 2, 3]
    assert {s.metadata["question_id"] for s in samples} == {7}


def test_the_older_file_repeats_the_picture(tmp_path: Path) -> None:
    rows = [row | {"image": cell(3, "JPEG")} for row in question(3)]
    samples = load(write(tmp_path, rows), samples=4, seed=0)
    assert {s.images[0].media_type for s in samples} == {"image/jpeg"}
    assert [s.images[0].name for s in samples] == [
        "row 3",
        "row 1000003",
        "row 2000003",
        "row 3000003",
    ]


def test_pictures_repeat_as_little_as_they_can(tmp_path: Path) -> None:
    path = write_questions(tmp_path, 12)
    ids = [s.metadata["question_id"] for s in load(path, samples=12, seed=1)]
    assert sorted(ids) == list(range(12))
    ids = [s.metadata["question_id"] for s in load(path, samples=30, seed=1)]
    assert sorted(Counter(ids).values()) == [2] * 6 + [3] * 6
    assert len(load(path, samples=48, seed=1)) == 48


def test_draws_are_stratified_and_reproducible(tmp_path: Path) -> None:
    path = write_questions(tmp_path, 30)
    drawn = load(path, samples=6, seed=1)
    assert Counter(s.category for s in drawn) == {"a": 2, "b": 2, "c": 2}
    assert drawn == load(path, samples=6, seed=1)
    assert drawn != load(path, samples=6, seed=2)


def test_circular_draws_whole_questions(tmp_path: Path) -> None:
    path = write_questions(tmp_path, 6)
    drawn = load(path, samples=12, seed=1, circular=True)
    ids = [s.metadata["question_id"] for s in drawn]
    assert [len(set(ids[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert [s.metadata["pass"] for s in drawn] == [0, 1, 2, 3] * 3
    assert Counter(s.category for s in drawn) == {"a": 4, "b": 4, "c": 4}
    with pytest.raises(DatasetError, match="samples=10 is no multiple of the 4 passes"):
        load(path, samples=10, seed=1, circular=True)
    path = write(tmp_path, question(1) + question(2, passes=3))
    with pytest.raises(DatasetError, match="3 to 4 passes"):
        load(path, samples=4, seed=1, circular=True)


def test_further_columns(tmp_path: Path) -> None:
    row = question(1)[0] | {"g_index": "99", "hint": "看屋顶", "source": "x", "C": "nan", "D": ""}
    columns = (*COLUMNS, "g_index", "hint", "source")
    (sample,) = load(write(tmp_path, [row], columns), samples=1, seed=0)
    assert sample.metadata["question_id"] == 99
    (text,) = (p.text for p in sample.messages[0].parts if isinstance(p, Text))
    assert text.startswith("Hint: 看屋顶\nQuestion: ")
    assert "B. 故宫\nPlease" in text


def test_no_category(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        [{k: v for k, v in row.items() if k != "category"} for row in question(1)],
        [c for c in COLUMNS if c != "category"],
    )
    assert load(path, samples=1, seed=0)[0].category == ""


def test_quotes_tabs_and_newlines_inside_cells(tmp_path: Path) -> None:
    row = question(1)[0] | {"question": 'a "quoted"\tquestion\nof two lines'}
    path = write(tmp_path, [row, *question(2)])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n")
    assert read_rows(path)[0].question == 'a "quoted"\tquestion\nof two lines'
    assert [r.line for r in read_rows(path)] == [3, 4, 5, 6, 7]


def test_the_prompt_has_as_many_options_as_the_question() -> None:
    assert prompt("q", {"A": "x", "B": "y"}).count("\n") == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index": "seven"}, "line 3: index: expected a whole number, found 'seven'"),
        ({"index": ""}, "line 3: index"),
        ({"index": "1", "image": cell()}, "line 3: index: 1 is that of line 2"),
        ({"question": " "}, "line 3: question: expected a text"),
        ({"A": ""}, "line 3: A: expected a text"),
        ({"B": "nan"}, "line 3: B: expected a text"),
        ({"answer": "E"}, "line 3: answer: expected one of A, B, C, D, found 'E'"),
        ({"answer": ""}, "line 3: answer"),
        ({"D": "", "answer": "D"}, "line 3: answer: expected one of A, B, C, found 'D'"),
        ({"image": ""}, "line 3: image: expected a picture in base64"),
        ({"image": "cat.png"}, "line 3: image: expected a picture in base64"),
        ({"image": "77"}, "line 3: image: refers to row 77, which holds no picture"),
        ({"image": "1000001"}, "line 3: image: expected a picture in base64"),
        ({"image": "2000001"}, "line 3: image: refers to row 2000001, which holds no picture"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    rows = question(1)
    rows[1] |= changes
    path = write(tmp_path, rows)
    with pytest.raises(DatasetError) as caught:
        load(path, samples=1, seed=0)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("image", "words"),
    [("?" * 80, "not base64"), ("A" * 81, "not base64"), ("A" * 80, "not a picture")],
)
def test_broken_pictures_are_named(tmp_path: Path, image: str, words: str) -> None:
    path = write(tmp_path, [question(1)[0] | {"image": image}])
    with pytest.raises(DatasetError, match=rf"line 2: image: {words}"):
        load(path, samples=1, seed=0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "line 1: column index is missing"),
        (b"index,question\n", "line 1: column index is missing"),
        (b"index\tquestion\tA\tB\tanswer\timage\n1\tq\n", "line 2: expected 6 columns, found 2"),
        (b'index\tquestion\tA\tB\tanswer\timage\n1\t"q\n', "line 2: not tab-separated"),
        (b"\xff\xfe", "not UTF-8"),
        (b"index\tquestion\tA\tB\tanswer\timage\n", "1 samples asked for, but it holds 0 rows"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "x.tsv"
    path.write_bytes(data)
    with pytest.raises(DatasetError) as caught:
        load(path, samples=1, seed=0)
    assert words in str(caught.value)


def test_no_file_and_no_samples(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nowhere.tsv: cannot be read"):
        load(tmp_path / "nowhere.tsv", samples=1, seed=0)
    with pytest.raises(DatasetError, match="samples=0"):
        load(write(tmp_path, question(1)), samples=0, seed=0)
    with pytest.raises(DatasetError, match="5 samples asked for, but it holds 4 rows"):
        load(write(tmp_path, question(1)), samples=5, seed=0)
