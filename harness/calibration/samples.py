"""What is run through a model: texts, or prompts with their answers, from files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from harness.calibration.similarity import CalibrationError

Messages: TypeAlias = list[dict[str, str]]
"""A conversation as chat templates take it: ``role`` and ``content`` each."""


@dataclass(frozen=True)
class Sample:
    """One answer that was asked for.

    Attributes:
        prompt: as the model is to read it, special tokens and all; or messages for its chat template.
        answer: what a server would decode after it.
    """

    prompt: str | Messages
    answer: str


@dataclass(frozen=True)
class Encoded:
    """A `Sample` as token ids, neither part empty."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        """Of both [tokens]."""
        return len(self.prompt) + len(self.answer)


def paragraphs(text: str) -> list[str]:
    """What blank lines separate, without space around it."""
    return [part.strip() for part in re.split(r"\n[^\S\n]*\n", text) if part.strip()]


def read_texts(path: Path, most: int | None = None) -> list[str]:
    """The first `most` texts of a file, all with None.

    Args:
        path: JSON lines with a ``text`` field (``.jsonl``), or plain text whose paragraphs blank lines
            separate (any other name).
        most: >= 1.

    Raises:
        CalibrationError: it cannot be read, holds no text, or a line has no such field.
    """
    content = _content(path)
    if path.suffix == ".jsonl":
        texts = [_text(record, "text", where) for where, record in _records(path, content)]
    else:
        texts = paragraphs(content)
    if not texts:
        raise CalibrationError(f"data={path}: has no text in it")
    return texts[:most]


def read_samples(path: Path, most: int | None = None) -> list[Sample]:
    """The first `most` prompts and answers of a file, all with None.

    Args:
        path: JSON lines with ``prompt``, a string or messages, and ``answer``, a string.
        most: >= 1.

    Raises:
        CalibrationError: it cannot be read, is empty, or a line lacks a field.
    """
    if path.suffix != ".jsonl":
        raise CalibrationError(
            f"data={path}: takes a .jsonl file whose lines have a prompt and an answer field"
        )
    samples = [
        Sample(_prompt(record, where), _text(record, "answer", where))
        for where, record in _records(path, _content(path))
    ]
    if not samples:
        raise CalibrationError(f"data={path}: has no lines in it")
    return samples[:most]


def encode_texts(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of each text, cut to `max_tokens`."""
    return [list(tokenizer(text)["input_ids"][:max_tokens]) for text in texts]


def encode_samples(
    tokenizer: Any, samples: Sequence[Sample], max_tokens: int | None
) -> list[Encoded]:
    """Token ids of each sample that is no longer than `max_tokens`; None takes all.

    Longer ones are left out rather than cut: half an answer says little of what re-routing does to it.

    Raises:
        CalibrationError: none is left, one has no tokens, or there is no chat template for messages.
    """
    found = [_encoded(tokenizer, number, sample) for number, sample in enumerate(samples, 1)]
    kept = [e for e in found if max_tokens is None or e.length <= max_tokens]
    if not kept:
        shortest = min(e.length for e in found)
        raise CalibrationError(
            f"max_tokens={max_tokens}: the shortest sample has {shortest} tokens, so none is left"
        )
    return kept


def texts_hash(sequences: Sequence[Sequence[int]]) -> str:
    """SHA-256, in hex, of token ids as a JSON list of lists."""
    digest = hashlib.sha256(b"[")
    for number, ids in enumerate(sequences):
        digest.update((", " if number else "").encode() + json.dumps(list(ids)).encode())
    digest.update(b"]")
    return digest.hexdigest()


def samples_hash(samples: Sequence[Encoded]) -> str:
    """SHA-256, in hex, of prompts and answers."""
    return texts_hash([ids for sample in samples for ids in (sample.prompt, sample.answer)])


def _encoded(tokenizer: Any, number: int, sample: Sample) -> Encoded:
    prompt, templated = sample.prompt, not isinstance(sample.prompt, str)
    if templated:
        try:
            prompt = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs: they raise whatever they like
            raise CalibrationError(
                f"data: the chat template does not take the prompt of sample {number}: {error}"
            ) from error
    ids = tokenizer(prompt, add_special_tokens=not templated)["input_ids"]
    answer = tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
    if not ids or not answer:
        raise CalibrationError(
            f"data: the {'answer' if ids else 'prompt'} of sample {number} has no tokens"
        )
    return Encoded(tuple(ids), tuple(answer))


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"data={path}: is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise CalibrationError(f"data={path}: cannot be read ({error.strerror})") from error


def _records(path: Path, content: str) -> list[tuple[str, dict[str, Any]]]:
    """Each line's object, with the words for where it is. Blank lines are passed over."""
    found = []
    # Not splitlines(): JSON may hold the other line ends that Unicode knows.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"data={path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CalibrationError(f"{where}: is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise CalibrationError(f"{where}: is not a JSON object")
        found.append((where, record))
    return found


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise CalibrationError(f"{where}: has no text in its field {field!r}")
    return value


def _prompt(record: dict[str, Any], where: str) -> str | Messages:
    prompt = record.get("prompt")
    if isinstance(prompt, list) and prompt and all(_is_message(m) for m in prompt):
        return prompt
    if isinstance(prompt, list):
        raise CalibrationError(
            f"{where}: prompt is a list, but not of messages with role and content"
        )
    return _text(record, "prompt", where)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    return all(isinstance(message.get(field), str) for field in ("role", "content"))
