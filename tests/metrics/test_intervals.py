"""Intervals: known values, right coverage, the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from metrics.intervals import mean, of_means, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (190, 200, 0.9104, 0.9726),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_gives_published_values(successes: int, n: int, low: float, high: float) -> None:
    found = wilson(successes, n)
    assert found.value == successes / n
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5), (0, 0)])
def test_wilson_refuses_what_is_no_proportion(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes of"):
        wilson(successes, n)


def test_a_bootstrapped_mean_is_near_the_normal_interval_of_many_values() -> None:
    values = np.random.default_rng(1).uniform(size=400)
    found = mean(values)
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(found.value - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.value + half, abs=0.1 * half)
    assert found == mean(list(values))


def test_equal_values_leave_no_doubt() -> None:
    found = mean([0.5] * 7)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(2)
    held = [e.low <= 0.5 <= e.high for e in (mean(rng.uniform(size=60)) for _ in range(200))]
    assert 0.90 <= np.mean(held) <= 0.99


def test_questions_stay_together() -> None:
    base = np.random.default_rng(3).uniform(size=100)
    both = np.stack([base + 0.1, base], axis=1)
    paired = of_means(lambda g: g[..., 0] - g[..., 1], both)
    assert (paired.low, paired.high) == pytest.approx((0.1, 0.1))
    apart = of_means(lambda a, b: a[..., 0] - b[..., 0], both[:, :1], both[:, 1:])
    assert apart.value == pytest.approx(0.1)
    assert apart.high - apart.low > 0.1


def test_nothing_has_no_interval() -> None:
    with pytest.raises(ValueError, match="no questions"):
        mean([])
