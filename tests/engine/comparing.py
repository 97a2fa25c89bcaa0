"""Comparing a server's answers with the oracle's, so that near-ties are told from errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tests.engine.oracle import Expected
from tests.engine.requests_under_test import Answer

# Two implementations of the same sums in fp32 differ by about 1e-5 in log-probabilities here, and by
# 1e-7 in a router's. Closer to a decision than this, they may decide differently; nowhere else.
LOGPROB_ERROR = 1e-4
LOGIT_TIE = 1e-4
SCORE_TIE = 1e-5
ROUTE_TIE = 1e-7

T = TypeVar("T")
R = TypeVar("R")


def together(do: Callable[[T], R], items: Iterable[T], at_once: int = 6) -> list[R]:
    """Do all items, some at once, and return their results in order."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(do, items))


def is_tie(got: Answer, want: Expected) -> bool:
    """False if the server said what the oracle says; True if they part at a near-tie.

    They may part over which token is likeliest, over which vision tokens to keep, or over an expert
    (which changes what follows by far more than rounding does).

    Raises:
        AssertionError: they part where there is no near-tie; one of them is wrong.
    """
    assert got.finish_reason == "length", got.finish_reason
    assert got.prompt_tokens == want.prompt_tokens, (got.prompt_tokens, want.prompt_tokens)
    assert len(got.ids) == len(want.ids), (got.ids, want.ids)
    for step in range(len(want.ids)):
        other_token = got.ids[step] != want.ids[step]
        error = abs(got.logprobs[step] - want.logprobs[step])
        if not other_token and error < LOGPROB_ERROR:
            continue
        route_gap = min(want.route_gaps[: step + 1])
        assert (
            want.margin < SCORE_TIE
            or route_gap < ROUTE_TIE
            or (other_token and error < LOGPROB_ERROR and want.gaps[step] < LOGIT_TIE)
        ), (
            f"step {step}: token {got.ids[step]} where {want.ids[step]} lies {want.gaps[step]} ahead; "
            f"log-probability off by {error}; vision tokens were kept by a margin of {want.margin}, "
            f"experts chosen by one of {route_gap}"
        )
        return True
    return False
