"""What a reader must know before believing a run's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.load.record import RequestRecord
from harness.results.text import one_line

# Fewest requests for a one-sided 99 % statement about a percentile (MLPerf's floors).
ENOUGH = {90: 64, 95: 130, 99: 662}
# A load generator this late, against the median TTFT, has measured itself.
_LAG_SHARE = 0.1
# Achieved below offered by more than this is another load than the one asked for.
_RATE_SHARE = 0.1


@dataclass(frozen=True)
class Caution:
    """One finding.

    Attributes:
        serious: numbers are missing or wrong, rather than rough.
        text: one line.
        cells: the cells that it is about.
    """

    serious: bool
    text: str
    cells: tuple[str, ...]


def cautions(
    rows: Sequence[Mapping[str, Any]], records: Mapping[str, Sequence[RequestRecord]]
) -> tuple[Caution, ...]:
    """All findings, serious ones first.

    Args:
        rows: one a cell (`harness.results.summary.summarize`).
        records: cell id → its records.
    """
    found = [
        *_failures(rows),
        *_partial(rows),
        *_late(rows),
        *_repeats(rows, records),
        *_few(rows),
    ]
    return tuple(sorted(found, key=lambda c: not c.serious))


def enough(percentile: int, n: Any) -> bool:
    """Whether `n` requests can carry the percentile; always true of the median."""
    return percentile not in ENOUGH or (isinstance(n, int) and n >= ENOUGH[percentile])


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[Caution]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] in ("failed", "missing"):
            reasons.setdefault((row["status"], row["failure"]), []).append(row["cell"])
    return [
        Caution(True, f"{_cells(ids)} {status}: {one_line(reason)}", tuple(ids))
        for (status, reason), ids in reasons.items()
    ]


def _partial(rows: Sequence[Mapping[str, Any]]) -> list[Caution]:
    return [
        Caution(
            True,
            f"{r['failed']} of {r['requests']} requests failed and count as infinitely slow: "
            f"{one_line(r['first_error'])}",
            (r["cell"],),
        )
        for r in rows
        if r["status"] == "partial"
    ]


def _late(rows: Sequence[Mapping[str, Any]]) -> list[Caution]:
    late, slow = [], []
    for row in rows:
        if row["status"] not in ("ok", "partial"):
            continue
        lag, ttft = row["dispatch_lag_p99_ms"], row["ttft_p50_ms"]
        if lag is not None and ttft is not None and lag > _LAG_SHARE * ttft:
            late.append(row["cell"])
        wanted, got = row["scheduled_qps"], row["achieved_qps"]
        if wanted is not None and got is not None and got < (1 - _RATE_SHARE) * wanted:
            slow.append(row["cell"])
    found = []
    if late:
        text = (
            f"{_cells(late)}: the load generator sent late (p99 lag above "
            f"{_LAG_SHARE:.0%} of the median TTFT); read latencies from the scheduled instant"
        )
        found.append(Caution(True, text, tuple(late)))
    if slow:
        text = f"{_cells(slow)}: requests were sent over {_RATE_SHARE:.0%} slower than scheduled"
        found.append(Caution(True, text, tuple(slow)))
    return found


def _repeats(
    rows: Sequence[Mapping[str, Any]], records: Mapping[str, Sequence[RequestRecord]]
) -> list[Caution]:
    repeated = []
    for row in rows:
        counts = Counter(r.sample_id for r in records.get(row["cell"], ()))
        if counts and max(counts.values()) > 1:
            repeated.append(row["cell"])
    if not repeated:
        return []
    text = f"{_cells(repeated)}: samples were asked more than once; caches may have answered"
    return [Caution(False, text, tuple(repeated))]


def _few(rows: Sequence[Mapping[str, Any]]) -> list[Caution]:
    parts, ids = [], []
    for percentile in (90, 99):
        few = [
            r["cell"]
            for r in rows
            if r["status"] in ("ok", "partial") and not enough(percentile, r["ttft_n"])
        ]
        if few:
            parts.append(
                f"p{percentile} rests on fewer than {ENOUGH[percentile]} requests in {_cells(few)}"
            )
            ids.extend(few)
    if not parts:
        return []
    text = "; ".join(parts) + ": rough, shown in grey"
    return [Caution(False, text, tuple(dict.fromkeys(ids)))]


def _cells(ids: Sequence[str]) -> str:
    return f"{len(ids)} cell" + ("" if len(ids) == 1 else "s")
