"""`results.csv` and the table for a terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from harness.results import levers
from harness.results.columns import (
    BY_TOKEN,
    COUNT,
    HIGH,
    KEPT,
    LOW,
    QUALITY,
    Column,
    columns_of,
)
from harness.results.store import RunFolder
from harness.results.text import one_line, spreadsheet_safe

CSV_FILE = "results.csv"

Row = Mapping[str, Any]


def write_csv(run: RunFolder, rows: Sequence[Row]) -> Path:
    """Write ``results.csv`` of these rows into the run's folder; gives its path."""
    return run.write_text(CSV_FILE, to_csv(rows))


def to_csv(rows: Sequence[Row]) -> str:
    """All rows as CSV with a header, columns in declared order, Unix line ends.

    Nothing to say is an empty cell, infinity is ``inf``; `pandas.read_csv` needs no arguments.
    Texts are on one line, with an apostrophe in front where a spreadsheet would run them.
    """
    columns = columns_of(rows)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_csv_text(c.name) for c in columns])
    for row in rows:
        writer.writerow([_csv_value(row.get(c.name)) for c in columns])
    return file.getvalue()


def terminal_table(rows: Sequence[Row]) -> Table:
    """The columns that fit 80 characters: what varied, counts, medians, experts, quality.

    Rows of cells that are not ok are red.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    shown = _terminal_columns(rows, columns_of(rows))
    for title, _ in shown:
        table.add_column(Text(title), justify="right", no_wrap=True)
    for row in rows:
        style = "" if row["status"] == "ok" else "red"
        table.add_row(*(Text(text(row)) for _, text in shown), style=style)
    return table


def short(value: Any, digits: int = 4) -> str:
    """A value for people: ``–`` for nothing, ``∞``, significant digits, thousands apart."""
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return one_line(str(value), 40)


def _terminal_columns(
    rows: Sequence[Row], columns: Sequence[Column]
) -> list[tuple[str, Callable[[Row], str]]]:
    """(heading, text of a row's entry) in order."""
    varied = {a.column: a.title.split(" [")[0] for a in levers.varied(rows)}
    levers_shown = {"retain_ratio": "Retain", "primary_experts": "K"}
    names = [c.name for c in columns]
    quality = [n for n in names if n.startswith(QUALITY) and n + COUNT in names]
    return [
        ("Cell", lambda r: r["cell"][:8]),
        *((title, _entry(name)) for name, title in {**varied, **levers_shown}.items()),
        ("Good", lambda r: f"{r['good']}/{r['requests']}"),
        ("TTFT\np50 ms", _entry("ttft_p50_ms")),
        ("TPOT\np50 ms", _entry("tpot_p50_ms")),
        ("Experts\nread", _entry("experts_after", 3)),
        *(
            (f"Kept\n{one_line(n.removeprefix(KEPT), 40)}".replace("_", "\n"), _entry(n, 3))
            for n in names
            if n.startswith(KEPT) and not n.endswith((LOW, HIGH, BY_TOKEN))
        ),
        *(
            (one_line(n.removeprefix(QUALITY), 40).replace("_", "\n"), _entry(n, 3))
            for n in quality
        ),
    ]


def _entry(name: str, digits: int = 4) -> Callable[[Row], str]:
    return lambda row: short(row.get(name), digits)


def _csv_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _csv_text(value)
    return repr(float(value)) if isinstance(value, float) else str(value)


def _csv_text(text: str) -> str:
    return spreadsheet_safe(one_line(text, 4000))
