"""The clock of a measurement, and what keeps the interpreter from disturbing it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator

now = time.perf_counter
"""Monotonic instant [s], of the same clock as the stamps of `harness.engine.stream`."""


async def sleep_until(instant_s: float) -> None:
    """Sleep until an absolute instant of `now`; return at once if it has passed.

    The event loop wakes up to about 1 ms late, never early. Lateness does not add up, since the
    next call aims at its own instant again.
    """
    while (left_s := instant_s - now()) > 0:
        await asyncio.sleep(left_s)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cyclic garbage collector from stopping the loop; put it back afterwards.

    Existing objects are collected once, then set aside, so that the collection which follows the
    measurement is short as well.
    """
    was_enabled = gc.isenabled()
    froze = gc.get_freeze_count() == 0  # else somebody else's frozen objects would be thawed
    gc.collect()
    if froze:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if froze:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
