"""One row of `results.csv` from a cell's records and step telemetry, as often as wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from harness.load.record import RequestRecord
from harness.plan import Cell, canonical_routing
from harness.results.columns import BY_TOKEN, COUNT, HIGH, KEPT, LOW, QUALITY
from harness.results.text import one_line
from harness.settings import WorkloadSettings, shown_k
from metrics import dispatch_lag, e2e, rates, tpot, ttft
from metrics.percentiles import percentile, percentiles
from metrics.retention import by_image, by_token

OFF = "off"
_PERCENTILES = (50, 90, 99)
_LONGEST = 2000

_Measure = Callable[[RequestRecord], float | None]


def summarize(
    cell: Cell,
    records: Sequence[RequestRecord],
    *,
    top_k: int | None,
    failure: str | None = None,
    steps: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The cell's row.

    Args:
        cell: what was to run.
        records: one for each measured request that got as far as having one, in any order.
        top_k: the model's experts per token; `None` if it has none.
        failure: why the cell as a whole failed; `None` if it ran to its end.
        steps: per-step telemetry by array name (see `harness.engine.plugin.telemetry.pack_steps`),
            where there is any.

    Returns:
        Column name → value, in the order of `COLUMNS`, then ``kept_<source>`` and its like where
        two sources share the requests, then ``quality_<metric>`` and ``quality_<metric>_n`` by
        metric. `None` where there is nothing to say. Times are in ms.
        Requests that were planned and have no record count as failed.
    """
    good = [r for r in records if r.good]
    planned = max(cell.settings.load.requests, len(records))
    error = next((r.error or "no finish reason or no token" for r in records if not r.good), None)
    if failure is None and not good:
        failure = f"no request succeeded: {error}" if error else "no request was recorded"
    status = "failed" if failure is not None else "ok" if len(good) == planned else "partial"
    if status == "partial" and error is None:
        error = f"{planned - len(records)} requests left no record"
    return {
        "cell": cell.id,
        "status": status,
        "failure": None if failure is None else one_line(failure, _LONGEST),
        **_settings(cell, top_k),
        "scheduled_qps": None if cell.settings.load.qps is None else rates.offered(records),
        "achieved_qps": rates.sent(records),
        "sent": sum(r.sent_s is not None for r in records),
        "good": len(good),
        "failed": planned - len(good),
        "first_error": None if error is None else one_line(error, _LONGEST),
        **_latencies(records, planned - len(records)),
        "good_per_s": rates.answered(records),
        "output_tokens": sum(r.output_tokens or 0 for r in good) if records else None,
        "output_tokens_per_s": rates.output_tokens(records),
        "prompt_tokens_mean": _mean(r.prompt_tokens for r in good),
        **_vision(good),
        **_retention(good, cell.settings.workload),
        **_routing(steps),
        **_quality(records),
    }


def not_run(cell: Cell, *, top_k: int | None) -> dict[str, Any]:
    """The row of a cell of the plan that left nothing behind."""
    row = summarize(cell, (), top_k=top_k, failure="the sweep ended before this cell")
    return {**row, "status": "missing"}


def _settings(cell: Cell, top_k: int | None) -> dict[str, Any]:
    s = cell.settings
    routing = canonical_routing(s.routing, top_k)
    path = routing.protection_path
    zipped = s.vision.prunes and s.vision.policy == "visionzip"
    return {
        "model": one_line(s.model.name),
        "workload": one_line(s.workload.name),
        "retain_ratio": s.vision.retain_ratio if s.vision.prunes else 1.0,
        "vision_policy": s.vision.policy if s.vision.prunes else None,
        "vision_budget": s.vision.budget if zipped else None,
        "vision_merge": s.vision.merge if zipped else None,
        "min_tokens_per_image": s.vision.min_tokens_per_image,
        "routing_policy": routing.policy,
        "primary_experts": OFF if routing.primary_experts is None else shown_k(routing),
        "similarity_threshold": routing.similarity_threshold
        if routing.policy == "sere" and routing.similarity_quantile is None
        else None,
        "similarity_quantile": routing.similarity_quantile if routing.policy == "sere" else None,
        "routing_budget": routing.budget if routing.policy in ("xshare", "lynx") else None,
        "routing_floor_batch": None if routing.policy == "off" else routing.floor_batch,
        "protection": None if path is None else one_line(PurePath(path).name),
        "arrival": s.load.arrival,
        "qps": s.load.qps,
        "concurrency": s.load.concurrency,
        "requests": s.load.requests,
    }


def _latencies(records: Sequence[RequestRecord], absent: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    measures: tuple[tuple[str, _Measure], ...] = (
        ("ttft", ttft.from_sent),
        ("tpot", tpot.tpot),
        ("e2e", e2e.from_sent),
        ("ttft_scheduled", ttft.from_scheduled),
        ("e2e_scheduled", e2e.from_scheduled),
    )
    for stem, measure in measures:
        defined = [v for r in records if (v := measure(r)) is not None]
        if records:
            # What was never sent took longer than anything that was.
            defined += [math.inf] * absent
        if not stem.endswith("_scheduled"):
            row[stem + COUNT] = len(defined)
        for q, value_s in percentiles(defined, _PERCENTILES).items():
            row[f"{stem}_p{q:g}_ms"] = _ms(value_s)
    row["dispatch_lag_p99_ms"] = _ms(percentile(map(dispatch_lag.dispatch_lag, records), 99))
    return row


def _vision(good: Sequence[RequestRecord]) -> dict[str, Any]:
    images = [i for r in good for i in r.images or ()]
    if not images:
        return dict.fromkeys(("vision_tokens_before", "vision_tokens_after", "vision_kept"))
    before, after = sum(i.before for i in images), sum(i.after for i in images)
    return {
        "vision_tokens_before": before,
        "vision_tokens_after": after,
        "vision_kept": after / before if before else None,
    }


def _retention(good: Sequence[RequestRecord], workload: WorkloadSettings) -> dict[str, Any]:
    """What the images of either source kept, where every request has some of both."""
    if workload.mix_format is None:
        return {}
    told = [[(i.before, i.after) for i in r.images] for r in good if r.images]
    row: dict[str, Any] = {}
    for source, images in (
        (workload.format, [r[: -workload.mix_images] for r in told]),
        (f"{workload.mix_format}_mixed_in", [r[-workload.mix_images :] for r in told]),
    ):
        for kind, measure in (("", by_image), (BY_TOKEN, by_token)):
            found = measure(images) if told else None
            stem = f"{KEPT}{source}{kind}"
            row[stem] = None if found is None else found.value
            row[stem + LOW] = None if found is None else found.low
            row[stem + HIGH] = None if found is None else found.high
    return row


def _routing(steps: Mapping[str, Any] | None) -> dict[str, Any]:
    """Means over the decode steps of the cell, and over layers."""
    names = ("experts_before", "experts_after", "slots_moved")
    if steps is None or not len(steps["decode_rows"]):
        return dict.fromkeys((*names, "decode_batch_size"))
    row: dict[str, Any] = {name: float(steps[name].mean()) for name in names}
    return row | {"decode_batch_size": float(steps["decode_rows"].mean())}


def _quality(records: Sequence[RequestRecord]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in sorted({name for r in records for name in r.scores}):
        values = [r.scores[name] for r in records if name in r.scores]
        values = [v for v in values if math.isfinite(v)]
        column = QUALITY + one_line(name, 80)
        row[column], row[column + COUNT] = _mean(values), len(values)
    return row


def _ms(value_s: float | None) -> float | None:
    # A nanosecond is finer than any clock here; more digits would only be noise in the file.
    return None if value_s is None else round(value_s * 1000, 6)


def _mean(values: Iterable[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return math.fsum(present) / len(present) if present else None
