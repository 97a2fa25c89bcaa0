"""Arrival processes: when requests of an open loop arrive. Pure functions.

All return offsets [s] from the origin, float64 of shape (n,), not decreasing. Request i arrives at
the sum of the first i + 1 gaps, so a first gap precedes the first request, and `n` requests at rate
`qps` take n / qps seconds on average. Gaps are left as drawn: rescaling them so that the last
arrival falls on an exact instant would make another process of them, with less variance.

Gaps are drawn at unit rate and divided by `qps`: for one seed, two rates see the same pattern of
arrivals, only faster.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.float64]


def poisson(n: int, qps: float, rng: np.random.Generator) -> Offsets:
    """A Poisson process of rate `qps` [requests/s]: independent exponential gaps."""
    return np.cumsum(rng.standard_exponential(n)) / qps


def gamma(n: int, qps: float, burstiness: float, rng: np.random.Generator) -> Offsets:
    """Independent gamma gaps of shape `burstiness` and mean 1 / `qps` [s].

    The squared coefficient of variation of a gap is 1 / `burstiness`: 1 is Poisson, smaller is
    burstier, larger is more even.
    """
    return np.cumsum(rng.standard_gamma(burstiness, n)) / (burstiness * qps)


def constant(n: int, qps: float) -> Offsets:
    """Equal gaps of 1 / `qps` [s]."""
    return np.arange(1, n + 1, dtype=np.float64) / qps
