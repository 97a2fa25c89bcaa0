"""Exact match is the whole answer."""

from __future__ import annotations

import pytest

from metrics.exact import exact


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42", 1.0),
        (" 42\n", 1.0),
        ("forty-two", 1.0),
        ("It is 42", 0.0),
        ("42.", 0.0),
        ("Forty-two", 0.0),
        ("4 2", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_whole_answer_counts(answer: str, value: float) -> None:
    assert exact(answer, ("42 ", "forty-two")) == value
