"""Percentiles over requests, by nearest rank.

The q-th percentile of n values is the ceil(n q / 100)-th smallest (inverted distribution function,
type 1 of Hyndman and Fan, 1996): always a value that some request had. Interpolation is ruled out,
because failed requests count as inf, and between a number and inf there is nothing to take.
Failures thus only ever push a percentile up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np


def percentile(values: Iterable[float | None], q: float) -> float | None:
    """The q-th percentile, 0 <= q <= 100, of any number of values.

    Args:
        values: one for each request: a number, inf if it failed, `None` if the metric is undefined
            for it (then it is left out).
        q: rank in percent; 0 is the smallest value, 100 the largest.

    Returns:
        A value, which is inf where failures reach down to that rank; `None` if there are no values,
        or if one of them is not a number.

    Raises:
        ValueError: q is out of range.
    """
    return percentiles(values, (q,))[q]


def percentiles(values: Iterable[float | None], qs: Sequence[float]) -> dict[float, float | None]:
    """Several percentiles of the same values: q → `percentile`."""
    defined = np.array([v for v in values if v is not None], dtype=np.float64)
    if any(not 0 <= q <= 100 for q in qs):
        raise ValueError(f"percentiles {tuple(qs)}: each takes a number in [0, 100]")
    if defined.size == 0 or np.isnan(defined).any():
        return dict.fromkeys(qs)
    defined.sort()
    return {q: float(defined[_rank(q, defined.size) - 1]) for q in qs}


def _rank(q: float, n: int) -> int:
    # Rounded first: 100 × 0.07 is a hair above 7 in binary, and would skip a rank.
    return max(1, math.ceil(round(q * n / 100, 9)))
