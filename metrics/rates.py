"""Rates of one load [1/s], over windows that all begin at the origin.

* Offered and sent: up to the last scheduled, or last sent, instant. The schedule's first gap lies
  before its first request, so that n requests span n gaps and n / last is the rate.
* Answered and output tokens: up to the end of the last request, failed ones included. The time in
  which the last answers run out is part of it: with few requests, the answered rate stays below the
  offered one on a server that keeps up.

A total of prompt and output tokens is not among them: pruning shrinks prompts, so that it would
fall as the lever helps.
"""

from __future__ import annotations

from collections.abc import Sequence

from metrics.protocols import Request


def offered(requests: Sequence[Request]) -> float | None:
    """Requests that the schedule asked for [requests/s]; it means nothing for a closed loop."""
    return _per_second(len(requests), [r.scheduled_s for r in requests])


def sent(requests: Sequence[Request]) -> float | None:
    """Requests that left the client [requests/s]; `None` if none did.

    Below 0.98 of the offered rate the client fell behind, and the load is not the one asked for.
    """
    sent_s = [r.sent_s for r in requests if r.sent_s is not None]
    return _per_second(len(sent_s), sent_s)


def answered(requests: Sequence[Request]) -> float | None:
    """Good answers [requests/s]; higher is better. `None` if no request ended."""
    return _per_second(sum(r.good for r in requests), _ends(requests))


def output_tokens(requests: Sequence[Request]) -> float | None:
    """Tokens of good answers [tokens/s]; higher is better. `None` if no request ended."""
    return _per_second(sum(r.output_tokens or 0 for r in requests if r.good), _ends(requests))


def _ends(requests: Sequence[Request]) -> list[float]:
    return [r.end_s for r in requests if r.end_s is not None]


def _per_second(count: int, instants_s: Sequence[float]) -> float | None:
    window_s = max(instants_s, default=0.0)
    return count / window_s if window_s > 0 else None
