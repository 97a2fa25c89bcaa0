"""Random streams that are independent of each other, each drawn from one seed and a name."""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, name: str) -> np.random.Generator:
    """The stream called `name` of `seed`.

    The same pair always gives the same stream, on every machine; streams of one seed with other
    names are independent, so that drawing more of one concern never shifts another.

    Args:
        seed: a whole number >= 0.
        name: of the concern, such as ``load.arrivals``.
    """
    digest = hashlib.sha256(name.encode()).digest()
    words = tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=words)))
