"""The report's table of cells: which columns it shows, and what each entry says and sorts by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.results import levers
from harness.results.cautions import enough
from harness.results.columns import COUNT, QUALITY, Column
from harness.results.table import short
from harness.results.text import one_line

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Head:
    """A heading: its words, its unit, and the column's definition."""

    title: str
    unit: str
    about: str


@dataclass(frozen=True)
class Entry:
    """One entry: what it shows, what it sorts by (empty: last), and its CSS class."""

    text: str
    key: str
    kind: str = ""


@dataclass(frozen=True)
class TableRow:
    """One row; `status` is its CSS class."""

    status: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class _Shown:
    head: Head
    entry: Callable[[Row], Entry]


def cell_table(
    rows: Sequence[Row], columns: Sequence[Column]
) -> tuple[tuple[Head, ...], tuple[TableRow, ...]]:
    """Headings and rows. Levers that no cell varies are left out, but for the two that matter."""
    about = {c.name: c for c in columns}
    shown = [
        _plain("cell", "Cell", about),
        _Shown(Head("Status", "", about["status"].about), _status),
        _plain("retain_ratio", "Retain\nratio", about),
        _plain("primary_experts", "K", about, key=_k_key),
    ]
    done = {"retain_ratio", "primary_experts", "qps"}
    shown += [
        _plain(a.column, a.title.split(" [")[0], about)
        for a in levers.varied(rows)
        if a.column not in done
    ]
    if levers.values(rows, "qps"):
        shown.append(_plain("qps", "QPS\noffered", about))
    shown += [
        _plain("achieved_qps", "QPS\nsent", about),
        _Shown(Head("Good", "of requests", about["good"].about), _good),
        *(_percentile("ttft", p, about) for p in (50, 90, 99)),
        *(_percentile("tpot", p, about) for p in (50, 90, 99)),
        *(_percentile("e2e", p, about) for p in (50, 99)),
        _plain("output_tokens_per_s", "Output", about),
        _plain("vision_kept", "Vision\nkept", about, text=_percent),
        _plain("experts_before", "Experts\npicked", about),
        _plain("experts_after", "Experts\nread", about),
    ]
    shown += [
        _plain(c.name, one_line(c.name.removeprefix(QUALITY), 40), about)
        for c in columns
        if c.name.startswith(QUALITY) and c.name + COUNT in about
    ]
    heads = tuple(s.head for s in shown)
    return heads, tuple(TableRow(r["status"], tuple(s.entry(r) for s in shown)) for r in rows)


def _plain(
    name: str,
    title: str,
    about: Mapping[str, Column],
    *,
    text: Callable[[Any], str] = short,
    key: Callable[[Any], str] | None = None,
) -> _Shown:
    column = about[name]

    def entry(row: Row) -> Entry:
        value = row.get(name)
        return Entry(text(value), (key or _key)(value))

    return _Shown(Head(title, column.unit, one_line(column.about)), entry)


def _percentile(stem: str, percentile: int, about: Mapping[str, Column]) -> _Shown:
    column = about[f"{stem}_p{percentile}_ms"]

    def entry(row: Row) -> Entry:
        value = row[column.name]
        rough = value is not None and not enough(percentile, row[stem + COUNT])
        return Entry(short(value), _key(value), "rough" if rough else "")

    return _Shown(Head(f"{stem.upper()}\np{percentile}", column.unit, column.about), entry)


def _status(row: Row) -> Entry:
    return Entry(row["status"], row["status"], f"text status-{row['status']}")


def _good(row: Row) -> Entry:
    return Entry(f"{row['good']}/{row['requests']}", _key(row["good"]))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _k_key(value: Any) -> str:
    # Off leaves every expert where it is: larger than any K; those that follow the batch come before it.
    if str(value).startswith("auto "):
        return str(1e6 + float(str(value).split()[1]))
    return "Infinity" if value == "off" else _key(value)


def _key(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return one_line(str(value), 80)
