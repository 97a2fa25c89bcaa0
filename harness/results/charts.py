"""Vega-Lite specifications of the report's charts, as plain JSON trees.

Every chart draws one metric over one axis of the sweep. All draw from one table of rows, named
``cells``, whose fields have names of our own: no text of a run becomes part of an expression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.results import levers
from harness.results.columns import COUNT, QUALITY, Column
from harness.results.levers import Axis, Row
from harness.results.text import one_line
from metrics.registry import METRICS

_HEIGHT = 300
_DRAWN = ("ok", "partial")
_MAX_TICKS = 8
_ALONE = 0.1
# Marks and dashes stay apart without colour.
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
_DASHES = ([1, 0], [6, 4], [2, 3], [10, 3, 2, 3], [12, 4], [1, 5])


@dataclass(frozen=True)
class Choice:
    """One statistic of a panel.

    Attributes:
        label: what a menu calls it.
        column: the CSV column that is drawn.
        specs: a specification for each charted axis, in order.
        note: which cells are not drawn and why; empty if all are.
    """

    label: str
    column: str
    specs: tuple[dict[str, Any], ...]
    note: str


@dataclass(frozen=True)
class Panel:
    """The charts of one metric.

    Attributes:
        title: the metric, with its direction.
        choices: its statistics, the one shown first ahead.
    """

    title: str
    choices: tuple[Choice, ...]


def panels(
    rows: Sequence[Row], columns: Sequence[Column], other: Mapping[str, str]
) -> tuple[Panel, ...]:
    """The panels of a run; none if no cell has anything to draw.

    Args:
        rows: one a cell.
        columns: of these rows (`columns_of`).
        other: from `levers.others`.
    """
    if not any(r["status"] in _DRAWN for r in rows):
        return ()
    axes = levers.charted(rows)
    fields = _fields(columns)
    latency = [
        Panel(
            f"{name} – {words} (lower is better)",
            tuple(
                _choice(f"p{p}", c, f"{name} p{p} [ms]", rows, axes, fields, other)
                for p in (50, 90, 99)
                for c in columns
                if c.name == f"{stem}_p{p}_ms"
            ),
        )
        for stem, name, words in (
            ("ttft", "TTFT", "time to first token"),
            ("tpot", "TPOT", "time per output token"),
        )
    ]
    scores = [c for c in columns if c.name in fields and c.name.startswith(QUALITY)]
    # The metric with most answers behind it comes first, then in the declared order.
    order = {QUALITY + m.name: i for i, m in enumerate(METRICS)}
    scores.sort(
        key=lambda c: (
            -sum(r.get(c.name + COUNT) or 0 for r in rows),
            order.get(c.name, len(order)),
        )
    )
    quality = tuple(
        _choice(name, c, f"mean {name}", rows, axes, fields, other)
        for c in scores
        for name in [one_line(c.name.removeprefix(QUALITY), 60)]
    )
    if not quality:
        return tuple(latency)
    direction = " (higher is better)" if all(c.better == "higher" for c in scores) else ""
    return (*latency, Panel(f"Quality – mean score{direction}", quality))


def chart_rows(
    rows: Sequence[Row], columns: Sequence[Column], other: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The table that all charts draw from: the cells that finished, numbers that can be drawn."""
    fields = _fields(columns)
    varied, charted = levers.varied(rows), levers.charted(rows)
    table = []
    for row in rows:
        if row["status"] not in _DRAWN:
            continue
        entry: dict[str, Any] = {"cell": row["cell"], "other": one_line(other[row["cell"]], 200)}
        for axis in levers.AXES:
            entry[_axis_field(axis)] = _shown(axis, levers.value(row, axis.column))
        for axis in charted:
            rest = [a for a in varied if a != axis]
            entry["rest_" + axis.column] = " ".join(
                [f"{a.title} {_shown(a, levers.value(row, a.column))}" for a in rest]
                + [entry["other"]]
            )
        for column, field in fields.items():
            entry[field] = row[column] if drawable(row.get(column)) else None
        table.append(entry)
    return table


def drawable(number: Any) -> bool:
    """Whether a chart can show this value."""
    return isinstance(number, int | float) and math.isfinite(number)


def _fields(columns: Sequence[Column]) -> dict[str, str]:
    """Drawn column → its field in the table."""
    names = [c.name for c in columns]
    drawn = [
        n
        for n in names
        if (n.startswith(("ttft_p", "tpot_p")) and n.endswith("_ms"))
        or (n.startswith(QUALITY) and n + COUNT in names)
    ]
    return {name: f"y{i}" for i, name in enumerate(drawn)}


def _choice(
    label: str,
    column: Column,
    title: str,
    rows: Sequence[Row],
    axes: Sequence[Axis],
    fields: Mapping[str, str],
    other: Mapping[str, str],
) -> Choice:
    y = {
        "field": fields[column.name],
        "type": "quantitative",
        "title": title,
        "scale": _y_scale(column, rows),
        "axis": {"format": ",.6~r"},
    }
    specs = tuple(_spec(axis, y, rows, any(other.values())) for axis in axes)
    return Choice(label, column.name, specs, _note(column, title, rows))


def _y_scale(column: Column, rows: Sequence[Row]) -> dict[str, Any]:
    if not column.name.startswith(QUALITY):
        return {"zero": True, "nice": True}
    drawn = [r[column.name] for r in rows if r["status"] in _DRAWN and drawable(r.get(column.name))]
    if len(set(drawn)) == 1:
        # One value has no extent that an axis could take.
        return {"domain": [drawn[0] - _ALONE, drawn[0] + _ALONE]}
    return {"zero": False, "nice": True}


def _note(column: Column, title: str, rows: Sequence[Row]) -> str:
    unfinished = sum(r["status"] not in _DRAWN for r in rows)
    infinite = sum(r["status"] in _DRAWN and r.get(column.name) == math.inf for r in rows)
    empty = sum(r["status"] in _DRAWN and r.get(column.name) in (None, "") for r in rows)
    parts = []
    if unfinished:
        parts.append(f"{unfinished} failed or did not run")
    if infinite:
        parts.append(
            f"{infinite} with an infinite {title.split(' [')[0]} (too many failed requests)"
        )
    if empty:
        parts.append(f"{empty} without a value")
    partial = sum(r["status"] == "partial" for r in rows)
    lines = [f"Not drawn of {len(rows)} cells: {', '.join(parts)}."] if parts else []
    if partial:
        lines.append(f"Cells of which some requests failed, and are drawn: {partial}.")
    return " ".join(lines)


def _spec(axis: Axis, y: dict[str, Any], rows: Sequence[Row], has_other: bool) -> dict[str, Any]:
    here = levers.values(rows, axis.column)
    rest = [a for a in levers.varied(rows) if a != axis]
    encoding: dict[str, Any] = {
        "x": _x(axis, here),
        "y": y,
        "detail": {"field": "rest_" + axis.column, "type": "nominal"},
        "tooltip": _tooltip(axis, rest, y, has_other),
    }
    if rest:
        encoding["color"] = _channel(rest[0], rows)
    if len(rest) > 1:
        shape = {**_channel(rest[1], rows), "type": "nominal"}
        domain = shape["scale"]["domain"]
        encoding["shape"] = {**shape, "scale": {**shape["scale"], "range": _cycle(_SHAPES, domain)}}
        encoding["strokeDash"] = {
            **shape,
            "scale": {**shape["scale"], "range": _cycle(_DASHES, domain)},
        }
    return {
        "description": f"{y['title']} over {axis.title}",
        "data": {"name": "cells"},
        "width": "container",
        "height": _HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "transform": [
            {"filter": {"field": _axis_field(axis), "oneOf": [_shown(axis, v) for v in here]}}
        ],
        "mark": {"type": "line", "point": {"size": 70, "filled": True}, "strokeWidth": 2},
        "encoding": encoding,
    }


def _x(axis: Axis, here: Sequence[Any]) -> dict[str, Any]:
    x: dict[str, Any] = {"field": _axis_field(axis), "title": axis.title}
    if not axis.measured or len(here) < 2:
        return {
            **x,
            "type": "ordinal",
            "scale": {"domain": [_shown(axis, v) for v in here], "padding": 0.5},
            "axis": {"labelAngle": 0},
        }
    ticks = {"values": list(here)} if len(here) <= _MAX_TICKS else {}
    return {
        **x,
        "type": "quantitative",
        "scale": {"domain": [here[0], here[-1]], "nice": False, "padding": 16},
        "axis": {"grid": False, "format": ",.6~r", **ticks},
    }


def _channel(axis: Axis, rows: Sequence[Row]) -> dict[str, Any]:
    domain = [_shown(axis, v) for v in levers.values(rows, axis.column)]
    scale: dict[str, Any] = {"domain": domain}
    if len(domain) > _MAX_TICKS - 1:
        # More values than colours that can be told apart: a ramp instead.
        scale["scheme"] = "viridis"
    return {
        "field": _axis_field(axis),
        "type": "ordinal",
        "title": axis.title,
        "sort": domain,
        "scale": scale,
    }


def _tooltip(
    axis: Axis, rest: Sequence[Axis], y: dict[str, Any], has_other: bool
) -> list[dict[str, Any]]:
    lines = [{"field": _axis_field(a), "type": "nominal", "title": a.title} for a in (axis, *rest)]
    lines.append(
        {"field": y["field"], "type": "quantitative", "title": y["title"], "format": ",.4~r"}
    )
    if has_other:
        lines.append({"field": "other", "type": "nominal", "title": "Other settings"})
    lines.append({"field": "cell", "type": "nominal", "title": "Cell"})
    return lines


def _axis_field(axis: Axis) -> str:
    return "x_" + axis.column


def _shown(axis: Axis, item: Any) -> Any:
    # A field with both numbers and texts (K is 2 or "off") would be read as numbers throughout.
    return item if axis.measured or item is None else one_line(str(item), 60)


def _cycle(marks: Sequence[Any], domain: Sequence[Any]) -> list[Any]:
    return [marks[i % len(marks)] for i in range(len(domain))]
