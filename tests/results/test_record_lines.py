from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.load.record import Chunk, ImageTokens, RequestRecord, RoutingCounts
from harness.results import records
from harness.results.errors import ResultsError

# Everything but NaN, which equals nothing, itself included.
numbers = st.floats(allow_nan=False, allow_infinity=True)
counts = st.integers(min_value=0, max_value=2**63)
# Half characters, line separators and all the rest.
texts = st.text(st.characters(exclude_categories=()), max_size=30)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def tuples(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=3).map(tuple)


any_record = st.builds(
    RequestRecord,
    request_id=texts,
    sample_id=texts,
    scheduled_s=numbers,
    sent_s=optional(numbers),
    headers_s=optional(numbers),
    first_token_s=optional(numbers),
    last_token_s=optional(numbers),
    end_s=optional(numbers),
    status=optional(counts),
    chunks=tuples(st.builds(Chunk, numbers, counts, texts)),
    text=texts,
    finish_reason=optional(texts),
    error=optional(texts),
    prompt_tokens=optional(counts),
    output_tokens=optional(counts),
    images=optional(tuples(st.builds(ImageTokens, counts, counts))),
    routing=optional(st.builds(RoutingCounts, counts, numbers, numbers, numbers, numbers)),
    scores=st.dictionaries(texts, numbers, max_size=3).map(MappingProxyType),
)

RECORD = RequestRecord("r-0", "s-0", 0.5, chunks=(Chunk(1.0, 2, "a"),), scores={"rouge1": 1.0})


@given(st.lists(any_record, max_size=3))
@settings(max_examples=150, deadline=None)
def test_round_trip(items: list[RequestRecord]) -> None:
    data = records.to_bytes(items)
    assert data.count(b"\n") == len(items)
    assert data.isascii()
    assert records.from_bytes(data, "x") == tuple(items)


def test_json_without_constants() -> None:
    record = RequestRecord("r", "s", math.nan, sent_s=math.inf, end_s=-math.inf)
    line = records.to_line(record)
    tree = json.loads(line, parse_constant=pytest.fail)
    assert tree["version"] == records.VERSION
    back = records.from_line(line)
    assert math.isnan(back.scheduled_s)
    assert (back.sent_s, back.end_s) == (math.inf, -math.inf)


def damaged(**changes: Any) -> str:
    tree = json.loads(records.to_line(RECORD))
    tree.update(changes)
    return json.dumps({k: v for k, v in tree.items() if v != "(drop)"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected a JSON object"),
        ("{}", "record version None; this program reads version 1"),
        (damaged(version=2), "record version 2"),
        (damaged(text=3), "record.text: cannot be 3"),
        (damaged(scheduled_s=None), "record.scheduled_s: cannot be None"),
        (damaged(scheduled_s=True), "record.scheduled_s: cannot be True"),
        (damaged(scheduled_s=10**400), "record.scheduled_s: cannot be"),
        (damaged(output_tokens=1.5), "record.output_tokens: cannot be 1.5"),
        (damaged(chunks={}), "record.chunks: cannot be {}"),
        (damaged(chunks=[3]), r"record.chunks\[0\]: cannot be 3"),
        (
            damaged(chunks=[{"at_s": "x", "tokens": 1, "text": ""}]),
            r"record.chunks\[0\].at_s: cannot be 'x'",
        ),
        (damaged(scores={"a": "b"}), r"record.scores\['a'\]: cannot be 'b'"),
        (damaged(images=[{"before": 1}]), r"record.images\[0\].after: missing"),
        (damaged(extra=1), "record.extra: no such field"),
        (damaged(error="(drop)"), "record.error: missing"),
    ],
)
def test_damage_is_named(line: str, message: str) -> None:
    data = records.to_bytes([RECORD]) + line.encode() + b"\n"
    with pytest.raises(ResultsError, match=r"^dir/records.jsonl, line 2: " + ".*" + message) as e:
        records.from_bytes(data, "dir/records.jsonl")
    assert "\n" not in str(e.value)


def test_cut_off_file() -> None:
    data = records.to_bytes([RECORD, RECORD])
    with pytest.raises(ResultsError, match="line 2: cut off"):
        records.from_bytes(data[:-20], "f")
    with pytest.raises(ResultsError, match=r"line 1: .*ascii"):
        records.from_bytes(b"\xff\n", "f")
