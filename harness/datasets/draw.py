"""Which items of a data set are asked: stratified, reproducible, the same on every machine."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def stratified(
    items: Sequence[T],
    samples: int,
    seed: int,
    *,
    name: Callable[[T], str],
    stratum: Callable[[T], str],
) -> tuple[T, ...]:
    """`samples` of the items, each stratum in proportion to its size (largest remainder).

    Within a stratum, and for the order of the result, items are ranked by a hash of seed and name.
    Ties in the rounding go to the stratum that comes first among `items`.

    Args:
        items: no fewer than `samples`.
        samples: how many, >= 0.
        seed: draws them.
        name: unique and stable for each item.
        stratum: the group that gets its share.
    """
    sizes = Counter(map(stratum, items))
    shares = {kind: samples * size / len(items) for kind, size in sizes.items()}
    quota = {kind: int(share) for kind, share in shares.items()}
    by_remainder = sorted(quota, key=lambda kind: quota[kind] - shares[kind])
    for kind in by_remainder[: samples - sum(quota.values())]:
        quota[kind] += 1
    chosen = []
    for item in sorted(items, key=lambda item: _rank(seed, name(item))):
        kind = stratum(item)
        if quota[kind] > 0:
            quota[kind] -= 1
            chosen.append(item)
    return tuple(chosen)


def distinct(name: str, seen: Counter[str]) -> str:
    """`name` at its first use, then ``name#2``, ``name#3`` …; `seen` counts the uses."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def _rank(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()
