"""TTFT, time to first token [s]. Lower is better; range (0, inf].

The first token is the first frame that carries one: a role-only or empty frame is none. A request
that failed has an infinite TTFT, so that failures can only make a percentile worse.

`from_sent` is what the server and the network took. `from_scheduled` adds what the request waited
on the client's side: with it, a client that falls behind cannot hide a slow server (the
"coordinated omission" of Gil Tene). Publish both.
"""

from __future__ import annotations

import math

from metrics.protocols import Request


def from_sent(request: Request) -> float:
    """First token − first byte sent [s]; inf for a failed request."""
    if not request.good or request.first_token_s is None or request.sent_s is None:
        return math.inf
    return request.first_token_s - request.sent_s


def from_scheduled(request: Request) -> float:
    """First token − scheduled instant [s]; inf for a failed request."""
    if not request.good or request.first_token_s is None:
        return math.inf
    return request.first_token_s - request.scheduled_s
