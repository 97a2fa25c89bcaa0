"""95 % intervals: how far a score of a sample of questions may be from the score of all questions.

Proportions get Wilson's interval (1927), which stays inside [0, 1] and says something at 0 and 1.
Everything else gets the percentile bootstrap (Efron, 1979): questions are drawn again, with
replacement, as often as there are, and the interval holds the middle 95 % of what comes out. All
values of one question stay together, so that a difference between two answers to the same questions
is judged as such. The draws come from a fixed seed: the same values give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054
"""The standard normal distribution has 95 % within this many standard deviations."""
_RESAMPLES = 4000
_AT_ONCE = 200
_SEED = 0

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A number, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, n: int) -> Estimate:
    """The proportion of `successes` among `n`.

    Raises:
        ValueError: `n` is not positive, or `successes` is not in [0, n].
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} successes of {n}")
    p, z2 = successes / n, _Z * _Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At the ends they meet 0 and 1 exactly, but for rounding.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Estimate(p, low, high)


def mean(values: Sequence[float] | Array) -> Estimate:
    """The mean of one value a question.

    Raises:
        ValueError: there are none.
    """
    return of_means(lambda group: group[..., 0], np.asarray(values, dtype=np.float64)[:, None])


def of_means(statistic: Callable[..., Array], *groups: Array) -> Estimate:
    """A statistic of means over questions.

    Args:
        statistic: given for each group its columns' means, [..., columns], it returns [...].
        groups: [questions, columns] each: values of the same question side by side. Questions of
            different groups are drawn independently.

    Raises:
        ValueError: a group has no questions.
    """
    if any(g.ndim != 2 or not len(g) for g in groups):
        raise ValueError(f"groups of shapes {[g.shape for g in groups]}: no questions in one")
    value = float(statistic(*(g.mean(axis=0) for g in groups)))
    streams = np.random.SeedSequence(_SEED).spawn(len(groups))
    drawn = statistic(
        *(_resampled(g, np.random.default_rng(s)) for g, s in zip(groups, streams, strict=True))
    )
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def _resampled(group: Array, rng: np.random.Generator) -> Array:
    """Means of as many questions, drawn anew. [_RESAMPLES, columns]."""
    n = len(group)
    return np.concatenate(
        [
            group[rng.integers(n, size=(_AT_ONCE, n))].mean(axis=1)
            for _ in range(_RESAMPLES // _AT_ONCE)
        ]
    )
