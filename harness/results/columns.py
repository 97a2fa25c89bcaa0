"""The columns of `results.csv`, declared once for the CSV, the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from metrics.registry import METRICS

QUALITY = "quality_"
COUNT = "_n"
KEPT = "kept_"
BY_TOKEN, LOW, HIGH = "_by_token", "_low", "_high"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: as in the CSV's header.
        unit: of its numbers; empty for texts and for plain ratios.
        about: one line that defines it.
        better: ``lower``, ``higher``, or empty where neither is.
    """

    name: str
    unit: str
    about: str
    better: str = ""


def _percentiles(stem: str, about: str) -> tuple[Column, ...]:
    return tuple(
        Column(f"{stem}_p{p}_ms", "ms", f"{p}th percentile of {about}", "lower")
        for p in (50, 90, 99)
    )


_FAILED = "a request that failed or never came counts as infinite"

COLUMNS: tuple[Column, ...] = (
    Column("cell", "", "the cell's name: a hash of everything that can change its result"),
    Column(
        "status", "", "ok; partial: some requests failed; failed: see failure; missing: not run"
    ),
    Column("failure", "", "why the cell as a whole failed"),
    Column("model", "", "name of the served model"),
    Column("workload", "", "name of what was asked"),
    Column("retain_ratio", "", "share of a turn's vision tokens to keep (prefill lever)"),
    Column(
        "vision_policy",
        "",
        "how tokens are chosen: visionzip, random, grid or downscale; empty where all stay",
    ),
    Column("vision_budget", "", "how visionzip shares a turn's budget out over its images"),
    Column("vision_merge", "", "contextual: visionzip merges other tokens into some rows"),
    Column("min_tokens_per_image", "tokens", "floor of vision tokens for every image"),
    Column(
        "routing_policy",
        "",
        "off, topk, sere, random_remap, oea, xshare or lynx (decode lever)",
    ),
    Column(
        "primary_experts",
        "",
        "K, experts of a token that never move; auto: fewer as more decode; off: none move",
    ),
    Column("similarity_threshold", "", "rho: re-route only to an expert at least this similar"),
    Column(
        "similarity_quantile",
        "",
        "share of a layer's experts whose most similar other one lies below rho",
    ),
    Column("routing_budget", "experts", "experts of a layer that xshare and lynx let a step read"),
    Column(
        "routing_floor_batch", "requests", "decoding together, below which no expert is re-routed"
    ),
    Column("protection", "", "file of protected experts, if any"),
    Column("arrival", "", "arrival process: poisson, gamma, constant or closed"),
    Column("qps", "requests/s", "offered rate (open loop)"),
    Column("concurrency", "requests", "requests kept in flight (closed loop)"),
    Column("requests", "requests", "measured requests that the cell was to send"),
    Column("scheduled_qps", "requests/s", "rate of the schedule as it was drawn (open loop)"),
    Column("achieved_qps", "requests/s", "rate at which requests were really sent"),
    Column("sent", "requests", "requests that were sent"),
    Column("good", "requests", "requests with a finish reason, at least one token and no error"),
    Column("failed", "requests", "requests that are not good, or were never sent", "lower"),
    Column("first_error", "", "error of the first request that failed"),
    Column("ttft_n", "requests", "requests behind the TTFT percentiles, failed ones included"),
    *_percentiles("ttft", f"time to first token, from the sent instant; {_FAILED}"),
    Column("tpot_n", "requests", "requests behind the TPOT percentiles, failed ones included"),
    *_percentiles("tpot", f"time per output token after the first, one value a request; {_FAILED}"),
    Column("e2e_n", "requests", "requests behind the E2E percentiles, failed ones included"),
    *_percentiles("e2e", f"time to the last token, from the sent instant; {_FAILED}"),
    *_percentiles("ttft_scheduled", f"time to first token, from the scheduled instant; {_FAILED}"),
    *_percentiles(
        "e2e_scheduled", f"time to the last token, from the scheduled instant; {_FAILED}"
    ),
    Column(
        "dispatch_lag_p99_ms",
        "ms",
        "99th percentile of sent minus scheduled instant: how late the load generator was",
        "lower",
    ),
    Column(
        "good_per_s",
        "requests/s",
        "good requests over the time to the end of the last request",
        "higher",
    ),
    Column("output_tokens", "tokens", "answer tokens of the good requests"),
    Column(
        "output_tokens_per_s",
        "tokens/s",
        "the same over the time to the end of the last request",
        "higher",
    ),
    Column(
        "prompt_tokens_mean", "tokens", "mean prompt length of the good requests, after pruning"
    ),
    Column("vision_tokens_before", "tokens", "vision tokens of the good requests before pruning"),
    Column("vision_tokens_after", "tokens", "vision tokens of the good requests after pruning"),
    Column("vision_kept", "", "vision_tokens_after over vision_tokens_before"),
    Column(
        "experts_before",
        "experts",
        "distinct experts a layer and decode step, as the router picked them",
    ),
    Column(
        "experts_after",
        "experts",
        "distinct experts a layer and decode step, as they were read",
        "lower",
    ),
    Column("slots_moved", "slots", "expert slots re-routed a layer and decode step, whole batch"),
    Column("decode_batch_size", "requests", "mean requests decoded together in a step"),
)

_METRICS = {m.name: m for m in METRICS}


def columns_of(rows: Iterable[Mapping[str, Any]]) -> tuple[Column, ...]:
    """All columns of these rows: `COLUMNS`, then those of sources and of quality metrics by name."""
    sources = sorted({key for row in rows for key in row if key.startswith(KEPT)})
    names = {key for row in rows for key in row if key.startswith(QUALITY)}
    quality: list[Column] = []
    for name in sorted(names):
        if name.endswith(COUNT) and name.removesuffix(COUNT) in names:
            continue
        metric = _METRICS.get(name.removeprefix(QUALITY))
        unit, better = (metric.unit, metric.better or "") if metric else ("", "")
        about = f"mean {name.removeprefix(QUALITY)} of the requests that have one, failed ones at 0"
        if metric:
            about += f" (defined in {metric.module})"
        quality.append(Column(name, unit, about, better))
        quality.append(Column(name + COUNT, "requests", f"requests behind {name}"))
    return (*COLUMNS, *map(_kept, sources), *quality)


def _kept(name: str) -> Column:
    """A column of what the images of one source kept."""
    source = name.removeprefix(KEPT)
    end = next((e for e in (LOW, HIGH) if source.endswith(e)), "")
    source = source.removesuffix(end)
    weight = "tokens" if source.endswith(BY_TOKEN) else "images"
    side = {LOW: "lower end of the 95 % interval of ", HIGH: "upper end of the same of "}
    about = f"share of vision tokens kept, mean over {weight} of {source.removesuffix(BY_TOKEN)}"
    return Column(name, "", side.get(end, "") + about)
