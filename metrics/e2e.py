"""E2E, end-to-end latency of an answer [s]. Lower is better; range (0, inf].

It ends with the last token: usage and ``[DONE]`` frames that follow are not the answer. A request
that failed has an infinite latency. For `from_sent` and `from_scheduled` see `metrics.ttft`.
"""

from __future__ import annotations

import math

from metrics.protocols import Request


def from_sent(request: Request) -> float:
    """Last token − first byte sent [s]; inf for a failed request."""
    if not request.good or request.last_token_s is None or request.sent_s is None:
        return math.inf
    return request.last_token_s - request.sent_s


def from_scheduled(request: Request) -> float:
    """Last token − scheduled instant [s]; inf for a failed request."""
    if not request.good or request.last_token_s is None:
        return math.inf
    return request.last_token_s - request.scheduled_s
