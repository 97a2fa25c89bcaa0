"""Comparing a server's answers with the oracle's, so that near-ties are told from errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.engine.oracle import Expected
from tests.engine.requests_under_test import Answer

# Two implementations of the same sums in fp32 differ by about 1e-5 here; below these distances they
# may decide differently, and only there.
LOGIT_TIE = 1e-4
SCORE_TIE = 1e-5

T = TypeVar("T")
R = TypeVar("R")


def together(do: Callable[[T], R], items: Iterable[T], at_once: int = 6) -> list[R]:
    """Do all items, some at once, and return their results in order."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(do, items))


def is_tie(got: Answer, want: Expected) -> bool:
    """False if the server said what the oracle says; True if both are right at a near-tie.

    Anything else is a wrong answer, and fails.
    """
    assert got.prompt_tokens == want.prompt_tokens
    assert got.finish_reason == "length"
    if got.ids == want.ids:
        assert got.logprobs == pytest.approx(want.logprobs, abs=LOGIT_TIE)
        return False
    if want.margin < SCORE_TIE:
        return True
    step = next(i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b)
    assert got.logprobs[:step] == pytest.approx(want.logprobs[:step], abs=LOGIT_TIE)
    assert want.gaps[step] < LOGIT_TIE, (
        f"token {step} is {got.ids[step]} and not {want.ids[step]}, which lies {want.gaps[step]} "
        f"ahead; kept tokens were chosen by a margin of {want.margin}"
    )
    return True
