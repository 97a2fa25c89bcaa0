"""Every metric by name: its unit, which direction is better, and where its definition stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One entry: `function` of `module` computes it. `better` is `None` where neither side is."""

    name: str
    unit: str
    better: Literal["lower", "higher"] | None
    module: str
    function: str


METRICS: tuple[Metric, ...] = (
    Metric("ttft", "s", "lower", "metrics.ttft", "from_sent"),
    Metric("ttft_scheduled", "s", "lower", "metrics.ttft", "from_scheduled"),
    Metric("tpot", "s/token", "lower", "metrics.tpot", "tpot"),
    Metric("e2e", "s", "lower", "metrics.e2e", "from_sent"),
    Metric("e2e_scheduled", "s", "lower", "metrics.e2e", "from_scheduled"),
    Metric("dispatch_lag", "s", "lower", "metrics.dispatch_lag", "dispatch_lag"),
    Metric("offered_rate", "requests/s", None, "metrics.rates", "offered"),
    Metric("sent_rate", "requests/s", None, "metrics.rates", "sent"),
    Metric("answered_rate", "requests/s", "higher", "metrics.rates", "answered"),
    Metric("output_token_rate", "tokens/s", "higher", "metrics.rates", "output_tokens"),
    Metric("ocrbench", "0 or 1", "higher", "metrics.ocrbench", "ocrbench"),
    Metric("rouge1", "0..1", "higher", "metrics.rouge1", "rouge1"),
    Metric("edit_similarity", "0..1", "higher", "metrics.edit_distance", "edit_similarity"),
    Metric("kendall", "0..1", "higher", "metrics.kendall", "kendall"),
    Metric("ccbench", "0 or 1", "higher", "metrics.choice", "correct"),
    Metric("image_edit", "0..1", "higher", "metrics.edit_distance", "sequence_similarity"),
    Metric("citation_format", "0 or 1", "higher", "metrics.citation_format", "citation_format"),
)
