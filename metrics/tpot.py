"""TPOT, time per output token after the first [s/token]. Lower is better; range (0, inf].

    TPOT = (last token − first token) / (output tokens − 1)

One value a request, so that long answers weigh no more than short ones. A request that failed has
an infinite TPOT. It is undefined for a single token, and where all tokens came in one read: no
interval was seen then, and 0 would pass for speed.
"""

from __future__ import annotations

import math

from metrics.protocols import Request


def tpot(request: Request) -> float | None:
    """TPOT [s/token]; inf for a failed request, `None` where it is undefined."""
    first_s, last_s, tokens = request.first_token_s, request.last_token_s, request.output_tokens
    if not request.good or first_s is None or last_s is None or tokens is None:
        return math.inf
    if tokens < 2 or last_s == first_s:
        return None
    return (last_s - first_s) / (tokens - 1)
