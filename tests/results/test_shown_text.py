from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.results.text import cut, one_line, spreadsheet_safe, visible

anything = st.text(st.characters(exclude_categories=()))


@given(anything)
def test_what_is_shown_can_be_written(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert not any(ord(c) < 0x20 and c not in "\t\n" for c in shown)
    assert visible(shown) == shown


@given(anything)
def test_one_line_is_one(text: str) -> None:
    assert len(one_line(text).splitlines()) <= 1


def test_examples() -> None:
    assert visible("a\r\nb\rc\x00\x1b\x7f\x9b") == "a\nb\nc␀␛␡\\x9b"
    assert visible("\ud83d") == "\\ud83d"
    assert one_line(" a\n\tb ") == "a b"
    assert cut("abcdef", 4) == "abcd… (2 more characters)"
    assert cut("abcd", 4) == "abcd"


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@a", "|a", "\t=1", " =1"])
def test_formulas_are_quoted(text: str) -> None:
    assert spreadsheet_safe(text) == "'" + text


def test_other_texts_are_not() -> None:
    assert spreadsheet_safe("a=1") == "a=1"
    assert spreadsheet_safe("") == ""
