"""Latency, rate and percentile metrics against values worked out by hand."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics import e2e, rates, ttft
from metrics.dispatch_lag import dispatch_lag
from metrics.percentiles import percentile, percentiles
from metrics.registry import METRICS
from metrics.tpot import tpot


@dataclass(frozen=True)
class Asked:
    scheduled_s: float = 1.0
    sent_s: float | None = 1.25
    first_token_s: float | None = 2.0
    last_token_s: float | None = 5.0
    end_s: float | None = 5.5
    output_tokens: int | None = 7
    good: bool = True


GOOD = Asked()
FAILED = replace(GOOD, good=False)
NEVER_SENT = Asked(2.0, None, None, None, None, None, False)


def test_latencies_from_both_instants() -> None:
    assert (ttft.from_sent(GOOD), ttft.from_scheduled(GOOD)) == (0.75, 1.0)
    assert (e2e.from_sent(GOOD), e2e.from_scheduled(GOOD)) == (3.75, 4.0)
    assert tpot(GOOD) == 0.5
    assert dispatch_lag(GOOD) == 0.25


@pytest.mark.parametrize("request_", [FAILED, NEVER_SENT])
def test_a_failure_takes_forever(request_: Asked) -> None:
    for metric in (ttft.from_sent, ttft.from_scheduled, e2e.from_sent, e2e.from_scheduled, tpot):
        assert metric(request_) == math.inf


def test_tpot_is_undefined_without_an_interval() -> None:
    assert tpot(replace(GOOD, output_tokens=1, last_token_s=2.0)) is None
    assert tpot(replace(GOOD, last_token_s=2.0)) is None


def test_the_lag_of_what_was_not_sent_is_undefined() -> None:
    assert dispatch_lag(NEVER_SENT) is None
    assert dispatch_lag(FAILED) == 0.25


def test_rates_by_hand() -> None:
    asked = [
        Asked(1.0, 1.0, 1.5, 2.0, 2.0, 10),
        Asked(2.0, 2.5, 3.0, 4.0, 4.0, 6),
        Asked(4.0, 5.0, 6.0, 7.0, 8.0, 9, good=False),
        NEVER_SENT,
    ]
    assert rates.offered(asked) == 4 / 4.0
    assert rates.sent(asked) == 3 / 5.0
    assert rates.answered(asked) == 2 / 8.0
    assert rates.output_tokens(asked) == 16 / 8.0


def test_rates_without_a_window() -> None:
    for rate in (rates.offered, rates.sent, rates.answered, rates.output_tokens):
        assert rate([]) is None
    assert rates.answered([NEVER_SENT]) is None
    assert rates.sent([NEVER_SENT]) is None


def test_percentiles_by_hand() -> None:
    values = [15.0, 20.0, 35.0, 40.0, 50.0]
    assert [percentile(values, q) for q in (0, 5, 30, 40, 50, 100)] == [15, 15, 20, 20, 35, 50]
    assert percentile(range(1, 101), 7) == 7  # 7 × 100 / 100 is not 7 in every order of operations
    assert percentiles(range(1, 1001), (50, 90, 99)) == {50: 500, 90: 900, 99: 990}
    assert percentile([3.0], 99) == 3.0


def test_failures_count_at_the_top() -> None:
    values = [1.0, 2.0, 3.0, math.inf]
    assert percentile(values, 75) == 3.0
    assert percentile(values, 76) == math.inf
    assert percentile([math.inf] * 3, 50) == math.inf


def test_undefined_values_are_left_out_and_nothing_is_none() -> None:
    assert percentile([None, 1.0, None], 50) == 1.0
    assert percentile([], 50) is None
    assert percentile([None], 50) is None
    assert percentile([1.0, math.nan], 50) is None


@pytest.mark.parametrize("q", [-1, 100.5, math.nan])
def test_a_rank_out_of_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="percentiles"):
        percentile([1.0], q)


NUMBERS = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)
RANKS = st.integers(1, 99)


@given(NUMBERS, RANKS, st.integers(0, 60))
def test_failing_never_makes_a_percentile_better(
    values: list[float], q: int, failures: int
) -> None:
    before = percentile(values, q)
    failed: list[float] = [math.inf if i < failures else v for i, v in enumerate(values)]
    after, more = percentile(failed, q), percentile([*values, *[math.inf] * failures], q)
    assert before is not None and after is not None and more is not None
    assert before <= after
    assert before <= more


@given(NUMBERS, RANKS)
def test_percentiles_agree_with_numpy(values: list[float], q: int) -> None:
    assert percentile(values, q) == np.percentile(values, q, method="inverted_cdf")


def test_the_registry_names_what_exists() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)
    for metric in METRICS:
        function = getattr(importlib.import_module(metric.module), metric.function)
        assert function.__doc__
