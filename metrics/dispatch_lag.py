"""Dispatch lag: how late a request left [s]. Lower is better; range [0, inf).

It says whether the client kept up, not how the server did: event-loop delay, connecting, and
waiting for the processor. A run whose lag is not small against its TTFT (1–2 %) measured its own
client.
"""

from __future__ import annotations

from metrics.protocols import Request


def dispatch_lag(request: Request) -> float | None:
    """First byte sent − scheduled instant [s]; `None` for a request that was never sent."""
    return None if request.sent_s is None else request.sent_s - request.scheduled_s
