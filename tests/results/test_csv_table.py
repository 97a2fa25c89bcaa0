from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from harness.load.record import RequestRecord
from harness.plan import Cell
from harness.results.columns import columns_of
from harness.results.derive import derive
from harness.results.store import RunFolder
from harness.results.summary import summarize
from harness.results.table import short, terminal_table, to_csv, write_csv

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"quoted", and, commas',
    "line\nbreak\r\nand\u2028more",
    "\x00\x01\x1b[31mred\x7f",
    "\u202egnp.egami\u202c שלום",
    "👩‍👩‍👧 \ud83d",
    "=cmd|'/C calc'!A0",
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "\t=1+1",
]


def read(text: str, tmp_path: Path) -> Any:
    path = tmp_path / "results.csv"
    path.write_text(text, encoding="utf-8")
    return pd.read_csv(path)


def test_pandas_needs_no_arguments(
    grid: tuple[Cell, ...], run_of: Callable[..., RunFolder], tmp_path: Path
) -> None:
    run = run_of(
        grid, skip=frozenset([grid[-1].id]), change=lambda c, r: r[: 5 if c == grid[0] else 10]
    )
    rows = [r.row for r in derive(run)[1]]
    frame = pd.read_csv(write_csv(run, rows))
    assert list(frame.columns) == [c.name for c in columns_of(rows)]
    assert frame["cell"].tolist() == [c.id for c in grid]
    assert frame["primary_experts"].tolist() == ["off", "2"] * 6
    assert frame["status"].tolist() == ["partial", *["ok"] * 10, "missing"]
    assert frame["ttft_p99_ms"].iloc[0] == math.inf
    assert math.isnan(frame["ttft_p50_ms"].iloc[-1])
    numbers = [c.name for c in columns_of(rows) if c.name.endswith(("_ms", "_n", "_qps"))]
    assert all(frame[name].dtype.kind in "fi" for name in numbers)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts(cell: Cell, records: list[RequestRecord], tmp_path: Path, text: str) -> None:
    bad = dataclasses.replace(records[0], error=text, scores={text: 1.0})
    named = dataclasses.replace(cell.settings.workload, name=text)
    changed = Cell(cell.id, dataclasses.replace(cell.settings, workload=named))
    row = summarize(changed, [bad, *records[1:]], top_k=8, failure=text)
    written = to_csv([row, row])
    assert written.count("\n") == 3
    frame = read(written, tmp_path)
    assert len(frame) == 2
    assert list(frame["cell"]) == [cell.id] * 2
    for column in ("workload", "failure", "first_error"):
        shown = frame[column].iloc[0]
        assert shown.lstrip()[0] not in "=+-@|"
        assert not any(ord(c) < 0x20 or 0xD800 <= ord(c) < 0xE000 for c in shown)
    assert frame.columns[-1].startswith("quality_")


def test_same_rows_same_bytes(grid: tuple[Cell, ...], run_of: Callable[..., RunFolder]) -> None:
    run = run_of(grid[:3])
    assert to_csv([r.row for r in derive(run)[1]]) == to_csv([r.row for r in derive(run)[1]])


def test_terminal_table_fits(grid: tuple[Cell, ...], run_of: Callable[..., RunFolder]) -> None:
    rows = [r.row for r in derive(run_of(grid, skip=frozenset([grid[-1].id])))[1]]
    out = io.StringIO()
    Console(file=out, width=80).print(terminal_table(rows))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in out.getvalue()
    assert lines[-1].split()[:5] == [grid[-1].id[:8], "0.5", "2", "4", "0/10"]
    assert all(c.id[:8] in out.getvalue() for c in grid)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        ("", "–"),
        (math.inf, "∞"),
        (math.nan, "–"),
        (0.0, "0"),
        (12345.6, "12,346"),
        (123.456, "123.5"),
        (4480, "4,480"),
        ("a\nb", "a b"),
    ],
)
def test_short(value: Any, shown: str) -> None:
    assert short(value) == shown
