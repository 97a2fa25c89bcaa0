"""Texts, prompts and answers from files, and as token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from harness.calibration.samples import (
    Encoded,
    Sample,
    encode_samples,
    encode_texts,
    paragraphs,
    read_samples,
    read_texts,
    samples_hash,
    texts_hash,
)
from harness.calibration.similarity import CalibrationError


class Words:
    """A tokenizer: one id for each word, a first one of its own for special tokens."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [len(word) for word in text.split()]}

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "user: " + messages[0]["content"] + " assistant:"


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_paragraphs_are_what_blank_lines_separate(tmp_path: Path) -> None:
    text = "\n\none\ntwo\n \t\nthree  \n\n\n\nfour\n"
    assert paragraphs(text) == ["one\ntwo", "three", "four"]
    file = written(tmp_path / "a.txt", text)
    assert read_texts(file) == ["one\ntwo", "three", "four"]
    assert read_texts(file, 2) == ["one\ntwo", "three"]


def test_json_lines(tmp_path: Path) -> None:
    separator = "\u2028"  # ends a line for str.splitlines, and not in JSON
    lines = (
        json.dumps({"text": f"a{separator}b"}, ensure_ascii=False) + '\n\n{"text": "c", "x": 1}\n'
    )
    assert read_texts(written(tmp_path / "a.jsonl", lines)) == [f"a{separator}b", "c"]
    records = [
        {"prompt": "p", "answer": "a"},
        {"prompt": [{"role": "user", "content": "q"}], "answer": "b"},
    ]
    file = written(tmp_path / "b.jsonl", "\n".join(map(json.dumps, records)))
    assert read_samples(file) == [Sample("p", "a"), Sample([{"role": "user", "content": "q"}], "b")]
    assert len(read_samples(file, 1)) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"txt": "b"}', "line 2: has no text in its field 'text'"),
        ('{"text": " "}', "line 1: has no text in its field 'text'"),
        ('{"text": 3}', "line 1: has no text"),
        ("[1]", "line 1: is not a JSON object"),
        ("{", "line 1: is not JSON"),
        ("\n\n", "has no text in it"),
    ],
)
def test_texts_that_are_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        read_texts(written(tmp_path / "a.jsonl", content))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "p"}', "line 1: has no text in its field 'answer'"),
        ('{"answer": "a"}', "line 1: has no text in its field 'prompt'"),
        ('{"prompt": [], "answer": "a"}', "not of messages with role and content"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}', "not of messages"),
        ("", "has no lines in it"),
    ],
)
def test_samples_that_are_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        read_samples(written(tmp_path / "a.jsonl", content))


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"data=.*none: cannot be read \(No such file"):
        read_texts(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(CalibrationError, match="is not UTF-8"):
        read_texts(tmp_path / "latin")
    with pytest.raises(CalibrationError, match=r"takes a .jsonl file whose lines have a prompt"):
        read_samples(written(tmp_path / "a.txt", "hello"))


def test_token_ids() -> None:
    assert encode_texts(Words(), ["a bb ccc", "dd"], 3) == [[0, 1, 2], [0, 2]]
    chat: Any = [{"role": "user", "content": "aa"}]
    found = encode_samples(Words(), [Sample("a bb", "ccc"), Sample(chat, "d ee")], None)
    # A template brings its own special tokens.
    assert found == [Encoded((0, 1, 2), (3,)), Encoded((5, 2, 10), (1, 2))]


def test_longer_samples_are_left_out_whole() -> None:
    samples = [Sample("a a a", "b"), Sample("a", "b b")]
    assert encode_samples(Words(), samples, 4) == [Encoded((0, 1), (1, 1))]
    with pytest.raises(CalibrationError, match="max_tokens=3: the shortest sample has 4 tokens"):
        encode_samples(Words(), samples, 3)
    with pytest.raises(CalibrationError, match="the answer of sample 1 has no tokens"):
        encode_samples(Words(), [Sample("a", " ")], None)


def test_hash_is_of_the_ids_as_json() -> None:
    sequences = [[1, 2], [], [3]]
    assert texts_hash(sequences) == hashlib.sha256(json.dumps(sequences).encode()).hexdigest()
    assert texts_hash([]) == hashlib.sha256(b"[]").hexdigest()
    one, other = Encoded((1,), (2, 3)), Encoded((1, 2), (3,))
    assert samples_hash([one]) != samples_hash([other])
