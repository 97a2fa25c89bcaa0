"""Quality by how many requests decoded together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from harness.load.record import RequestRecord
from harness.plan import Cell
from harness.results.by_batch import BatchTable, Mean, by_batch
from harness.results.derive import CellResult
from harness.results.report import render
from harness.results.summary import summarize

TOP_K = 8
Fail = Callable[[RequestRecord, str], RequestRecord]


def result(cell: Cell, given: list[tuple[float, float]], record: RequestRecord) -> CellResult:
    """A cell whose requests had these batch sizes and scores."""
    assert record.routing is not None
    records = tuple(
        dataclasses.replace(
            record,
            routing=dataclasses.replace(record.routing, batch_size=size),
            scores={"rouge1": score},
        )
        for size, score in given
    )
    return CellResult(cell, records, summarize(cell, records, top_k=TOP_K))


def of(grid: tuple[Cell, ...], k: int | None, qps: float) -> Cell:
    found = [
        c
        for c in grid
        if c.settings.routing.primary_experts == k
        and c.settings.load.qps == qps
        and c.settings.vision.retain_ratio == 1.0
    ]
    return found[0]


def test_requests_of_all_loads_meet_in_the_bin_of_their_batch(
    grid: tuple[Cell, ...], records: list[RequestRecord], fail: Fail
) -> None:
    one = records[0]
    off = result(of(grid, None, 2.0), [(1.0, 1.0), (1.7, 0.5)], one)
    quiet = result(of(grid, 2, 2.0), [(1.0, 0.0), (3.2, 0.5), (4.0, 1.0), (4.1, 0.25)], one)
    busy = result(of(grid, 2, 4.0), [(3.9, 0.0)], one)
    broken = dataclasses.replace(busy, records=(*busy.records, fail(one, "gone")))
    assert by_batch([off, quiet, broken]) == (
        BatchTable(
            "rouge1",
            ("1", "≤ 2", "≤ 4", "≤ 8"),
            (
                ("K off", (Mean(1.0, 1), Mean(0.5, 1), None, None)),
                ("K 2", (Mean(0.0, 1), None, Mean(0.5, 3), Mean(0.25, 1))),
            ),
        ),
    )


def test_nothing_where_nothing_is_rerouted(
    grid: tuple[Cell, ...], records: list[RequestRecord]
) -> None:
    assert by_batch([result(of(grid, None, 2.0), [(2.0, 1.0)], records[0])]) == ()
    assert by_batch([]) == ()


@pytest.mark.parametrize("k", [None, 2])
def test_the_report_shows_it_where_there_is_something(
    k: int | None, settings: Callable[..., Any], run_of: Callable[..., Any]
) -> None:
    from tests.results.conftest import cells_of

    run = run_of(cells_of([settings(routing__primary_experts=k)]))
    html = render(run)
    assert ("Quality by batch size" in html) is (k is not None)
