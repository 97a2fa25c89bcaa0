from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.load.record import ImageTokens, RequestRecord
from harness.plan import Cell
from harness.results.columns import COLUMNS, columns_of
from harness.results.summary import not_run, summarize

Fail = Callable[[RequestRecord, str], RequestRecord]


@pytest.fixture
def row(cell: Cell, records: list[RequestRecord]) -> dict[str, Any]:
    return summarize(cell, records, top_k=8)


def test_keys_are_the_declared_columns(cell: Cell, row: dict[str, Any]) -> None:
    assert list(row) == [c.name for c in columns_of([row])]
    assert list(not_run(cell, top_k=8)) == [c.name for c in COLUMNS]
    names = [c.name for c in columns_of([row])]
    assert len(set(names)) == len(names)
    assert all(c.about and c.better in ("", "lower", "higher") for c in columns_of([row]))


def test_good_cell(row: dict[str, Any], records: list[RequestRecord]) -> None:
    assert (row["status"], row["failure"], row["first_error"]) == ("ok", None, None)
    assert (row["sent"], row["good"], row["failed"], row["requests"]) == (10, 10, 0, 10)
    assert row["primary_experts"] == row["routing_policy"] == "off"
    ttfts = sorted((r.first_token_s or 0) - (r.sent_s or 0) for r in records)
    assert row["ttft_p50_ms"] == pytest.approx(ttfts[4] * 1000, abs=1e-5)
    assert row["ttft_p99_ms"] == pytest.approx(ttfts[9] * 1000, abs=1e-5)
    assert row["ttft_scheduled_p50_ms"] >= row["ttft_p50_ms"]
    assert row["output_tokens"] == sum(r.output_tokens or 0 for r in records)
    assert row["vision_kept"] == 1.0
    assert row["quality_ocrbench_n"] == 10
    assert row["quality_ocrbench"] == sum(r.scores["ocrbench"] for r in records) / 10


def test_k_is_off_from_top_k_on(settings: Callable[..., Any], cell: Cell) -> None:
    for k, top_k, shown in ((8, 8, "off"), (8, None, 8), (2, 8, 2)):
        lever = dataclasses.replace(
            cell.settings.routing,
            policy="sere",
            primary_experts=k,
            protection_path="/data/keep.safetensors",
        )
        changed = Cell(cell.id, dataclasses.replace(cell.settings, routing=lever))
        row = summarize(changed, (), top_k=top_k)
        assert row["primary_experts"] == shown
        assert row["protection"] == "keep.safetensors"


def test_vision_policy_is_named_only_where_tokens_go(cell: Cell) -> None:
    for ratio, shown in ((1.0, None), (0.5, "random")):
        lever = dataclasses.replace(cell.settings.vision, policy="random", retain_ratio=ratio)
        changed = Cell(cell.id, dataclasses.replace(cell.settings, vision=lever))
        assert summarize(changed, (), top_k=8)["vision_policy"] == shown


def test_a_policy_that_keeps_all_has_a_ratio_of_one(cell: Cell) -> None:
    lever = dataclasses.replace(cell.settings.vision, policy="none", retain_ratio=0.5)
    row = summarize(Cell(cell.id, dataclasses.replace(cell.settings, vision=lever)), (), top_k=8)
    assert (row["retain_ratio"], row["vision_policy"], row["vision_budget"]) == (1.0, None, None)


def test_what_each_of_two_sources_keeps(cell: Cell, records: list[RequestRecord]) -> None:
    w = dataclasses.replace(cell.settings.workload, mix_format="ccbench", mix_images=1)
    mixed = Cell(cell.id, dataclasses.replace(cell.settings, workload=w))
    images = (ImageTokens(100, 50), ImageTokens(300, 270), ImageTokens(40, 10))
    told = [dataclasses.replace(r, images=images) for r in records]
    row = summarize(mixed, told, top_k=8)
    assert row["kept_ocrbench"] == pytest.approx((0.5 + 0.9) / 2)
    assert row["kept_ocrbench_by_token"] == pytest.approx(320 / 400)
    assert row["kept_ccbench_mixed_in"] == row["kept_ccbench_mixed_in_by_token"] == 0.25
    assert row["kept_ocrbench_low"] == pytest.approx(row["kept_ocrbench_high"])
    names = [c.name for c in columns_of([row])]
    assert set(row) == set(names)
    untold = summarize(mixed, [dataclasses.replace(r, images=None) for r in records], top_k=8)
    assert untold["kept_ocrbench"] is untold["kept_ccbench_mixed_in_high"] is None


def test_failures_only_make_percentiles_worse(
    cell: Cell, records: list[RequestRecord], row: dict[str, Any], fail: Fail
) -> None:
    for bad in range(1, 10):
        mixed = [*records[bad:], *(fail(r, f"HTTP 500\nfor {r.sample_id}") for r in records[:bad])]
        worse = summarize(cell, mixed, top_k=8)
        assert worse["status"] == "partial"
        assert worse["first_error"] == "HTTP 500 for ocr-000"
        assert (worse["good"], worse["failed"], worse["ttft_n"]) == (10 - bad, bad, 10)
        assert worse["ttft_p99_ms"] == math.inf
        assert (worse["ttft_p50_ms"] == math.inf) == (bad > 5)


def test_requests_without_a_record_count_as_failed(
    cell: Cell, records: list[RequestRecord]
) -> None:
    row = summarize(cell, records[:4], top_k=8)
    assert row["status"] == "partial"
    assert row["first_error"] == "6 requests left no record"
    assert (row["sent"], row["good"], row["failed"]) == (4, 4, 6)
    assert row["ttft_p50_ms"] == row["e2e_scheduled_p90_ms"] == math.inf
    stopped = summarize(cell, records[:4], top_k=8, failure="the server died")
    assert (stopped["status"], stopped["failure"]) == ("failed", "the server died")
    assert stopped["ttft_p50_ms"] == math.inf


def test_no_good_request_is_a_failed_cell(
    cell: Cell, records: list[RequestRecord], fail: Fail
) -> None:
    row = summarize(cell, [fail(r, "timed out after 120 s") for r in records], top_k=8)
    assert row["status"] == "failed"
    assert row["failure"] == "no request succeeded: timed out after 120 s"
    assert row["ttft_p50_ms"] == row["tpot_p50_ms"] == math.inf
    assert row["good_per_s"] == 0
    # Derived again with the reason that was written down, it stays the same.
    again = summarize(
        cell, [fail(r, "timed out after 120 s") for r in records], top_k=8, failure=row["failure"]
    )
    assert again == row


def test_nothing_there_is_empty(cell: Cell) -> None:
    row = summarize(cell, (), top_k=8, failure="the server never came up")
    assert (row["sent"], row["good"], row["failed"]) == (0, 0, 10)
    empty = [k for k, v in row.items() if v is None]
    assert {"ttft_p50_ms", "tpot_p99_ms", "output_tokens", "vision_kept", "experts_after"} <= set(
        empty
    )
    assert not_run(cell, top_k=8)["status"] == "missing"


def test_undefined_tpot_is_left_out(cell: Cell, records: list[RequestRecord]) -> None:
    single = [dataclasses.replace(r, output_tokens=1) for r in records]
    row = summarize(cell, single, top_k=8)
    assert (row["tpot_n"], row["tpot_p50_ms"], row["status"]) == (0, None, "ok")


def test_vision_tokens_and_experts(cell: Cell, records: list[RequestRecord]) -> None:
    images = (ImageTokens(64, 32), ImageTokens(36, 18))
    changed = [dataclasses.replace(r, images=images) for r in records]
    # Four steps of one request and six of three, over two layers: a step counts once.
    steps = {
        "decode_rows": np.array([1] * 4 + [3] * 6),
        "experts_before": np.array([[8, 8]] * 4 + [[20, 24]] * 6),
        "experts_after": np.array([[4, 2]] * 4 + [[10, 10]] * 6),
        "slots_moved": np.array([[2, 0]] * 4 + [[5, 5]] * 6),
    }
    row = summarize(cell, changed, top_k=8, steps=steps)
    assert (row["vision_tokens_before"], row["vision_tokens_after"]) == (1000, 500)
    assert row["vision_kept"] == 0.5
    assert row["experts_before"] == pytest.approx((4 * 8 + 6 * 22) / 10)
    assert row["experts_after"] == pytest.approx((4 * 3 + 6 * 10) / 10)
    assert row["slots_moved"] == pytest.approx((4 * 1 + 6 * 5) / 10)
    assert row["decode_batch_size"] == pytest.approx((4 * 1 + 6 * 3) / 10)
    assert summarize(cell, changed, top_k=8)["experts_before"] is None


def test_quality_is_of_those_that_have_it(cell: Cell, records: list[RequestRecord]) -> None:
    scores: list[dict[str, float]] = [{"kendall": 1.0}, {"kendall": 0.5}, {"kendall": math.nan}]
    scores += [{}] * 7
    changed = [dataclasses.replace(r, scores=s) for r, s in zip(records, scores, strict=True)]
    row = summarize(cell, changed, top_k=8)
    assert (row["quality_kendall"], row["quality_kendall_n"]) == (0.75, 2)


def test_metrics_may_end_like_a_count(cell: Cell, records: list[RequestRecord]) -> None:
    changed = [dataclasses.replace(r, scores={"top_n": 1.0}) for r in records]
    names = [c.name for c in columns_of([summarize(cell, changed, top_k=8)])]
    assert names[-2:] == ["quality_top_n", "quality_top_n_n"]
