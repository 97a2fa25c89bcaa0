"""Kendall score: whether shared items come in the reference's order. Range 0..1, higher is better.

Over the items that both sequences have (each at its first occurrence), the share of pairs that
stand in the same order in both. It is Kendall's tau mapped from [−1, 1]: (tau + 1) / 2. 1 is the
same order, 0 the reverse, 0.5 no relation. It says nothing about items that one side lacks: read it
beside a metric that does.

Source: Kendall, "A New Measure of Rank Correlation", 1938; the share of concordant pairs is
equation 2 of RAG-IGBench (2025) where two or more items are shared. What that paper puts in its
place for fewer is left undefined here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np


def kendall(answer: Sequence[Hashable], reference: Sequence[Hashable]) -> float | None:
    """Share of concordant pairs of shared items; `None` if fewer than two are shared."""
    place = {item: i for i, item in reversed(list(enumerate(reference)))}
    ranks = np.array(
        [place[item] for item in dict.fromkeys(answer) if item in place], dtype=np.int64
    )
    n = ranks.size
    if n < 2:
        return None
    concordant = sum(int((ranks[i + 1 :] > ranks[i]).sum()) for i in range(n - 1))
    return concordant / (n * (n - 1) / 2)
