"""The table: its columns, as CSV, and in short for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.pocket.evaluation.arms import FULL, TASKS, Task
from harness.pocket.evaluation.measured import METRICS, Measured
from harness.results.columns import Column
from harness.results.table import short

Key = tuple[str, str]
"""Name of an arm, name of a task."""

_METRICS_ABOUT = {
    "exact": "share of answers that equal the reference, white space at both ends aside",
    "edit_similarity": "mean edit similarity of answer and reference (metrics.edit_distance)",
    "ccbench": "share of rows whose answer names the right option (metrics.choice)",
    "image_edit": "mean edit similarity of the sequences of cited images (metrics.edit_distance)",
    "rouge1": "mean ROUGE-1 F1 of the text without citations (metrics.rouge1)",
    "citation_format": "share of answers whose citations are all valid (metrics.citation_format)",
}

COLUMNS: tuple[Column, ...] = (
    Column("part", "", "base (everything kept, routing off), vision or routing"),
    Column("arm", "", "the setting of both levers, in words"),
    Column("task", "", "the held-out set"),
    Column("questions", "", "questions of the set, each asked once"),
    Column("failed", "", "requests that came to no answer; they score 0"),
    Column("seconds", "s", "from the first request to the end of the last"),
    Column("retain_ratio", "", "share of a turn's vision tokens to keep"),
    Column("vision_policy", "", "how tokens are chosen; empty where all stay"),
    Column("vision_layer", "", "encoder layer whose attention chooses; empty where none does"),
    Column("vision_kept", "", "vision tokens after pruning over those before, as counted"),
    Column("routing_policy", "", "off, topk or sere"),
    Column("primary_experts", "experts", "K, experts of a token that never move"),
    Column("similarity_threshold", "", "rho: re-route only to an expert at least this similar"),
    Column("renormalize", "", "topk: whether remaining weights sum to what all summed to"),
    Column("protection", "", "file of protected experts, if any"),
    *(
        column
        for name, about in _METRICS_ABOUT.items()
        for column in (
            Column(name, "", about, "higher"),
            Column(f"{name}_low", "", f"lower end of the 95 % interval of {name}"),
            Column(f"{name}_high", "", f"upper end of the 95 % interval of {name}"),
        )
    ),
    Column("experts_before", "experts", "distinct experts a layer and decode step, as routed"),
    Column("experts_after", "experts", "distinct experts a layer and decode step, as read"),
    Column("slots_moved", "slots", "expert slots re-routed a layer and decode step"),
    Column("decode_batch_size", "requests", "mean requests decoded together in a step"),
    Column("cell", "", "name of the cell, a hash of all that can change its result"),
)


def columns_text() -> str:
    """What every column is, a line each."""
    width = max(len(c.name) for c in COLUMNS)
    lines = (f"{c.name:<{width}}  {f'[{c.unit}] ' if c.unit else ''}{c.about}" for c in COLUMNS)
    return "\n".join(lines)


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header; nothing to say is an empty cell."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [c.name for c in COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _csv(v) for k, v in row.items()} for row in rows)
    return file.getvalue()


def line(row: Mapping[str, Any]) -> str:
    """One row in a line, for progress."""
    task = next(t for t in TASKS if t.name == row["task"])
    parts = [f"{name} {_interval(row, name)}" for name in METRICS[task.task]]
    if row["part"] == "routing":
        parts.append(f"experts {_experts(row)} at batch {short(row['decode_batch_size'], 3)}")
    if row["failed"]:
        parts.append(f"{row['failed']} FAILED")
    return f"{row['arm']} · {row['task']}: {', '.join(parts)} ({row['seconds'] or 0:.0f} s)"


def markdown(found: Mapping[Key, Measured]) -> str:
    """The rows as three Markdown tables: base, vision, routing; parts without rows are left out."""
    rows = [m.row for m in found.values()]
    parts = [_base(rows), _vision(rows), _routing(rows)]
    return "\n\n".join(p for p in parts if p)


def _base(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [row["task"], name, _interval(row, name), str(row["questions"])]
        for row in rows
        if row["arm"] == FULL
        for name in METRICS[_task(row).task]
    ]
    return _table(["everything kept, routing off", "metric", "value [95 %]", "questions"], lines)


def _vision(rows: Sequence[Mapping[str, Any]]) -> str:
    pruned = [r for r in rows if r["part"] == "vision"]
    if not pruned:
        return ""
    tasks = list(dict.fromkeys(r["task"] for r in pruned))
    policies = list(dict.fromkeys(r["vision_policy"] for r in pruned))
    ratios = sorted({r["retain_ratio"] for r in pruned}, reverse=True)
    at = {(r["task"], r["vision_policy"], r["retain_ratio"]): r for r in pruned}
    # Everything kept is the same under every policy.
    at |= {(r["task"], p, 1.0): r for r in rows if r["arm"] == FULL for p in policies}
    head = ["retain ratio", *(f"{t} {p}" for t in tasks for p in policies)]
    lines = [
        [f"{ratio:g}", *(_main(at.get((t, p, ratio))) for t in tasks for p in policies)]
        for ratio in (1.0, *ratios)
    ]
    return _table(head, lines)


def _routing(rows: Sequence[Mapping[str, Any]]) -> str:
    routed = [r for r in rows if r["part"] == "routing"]
    if not routed:
        return ""
    tasks = list(dict.fromkeys(r["task"] for r in routed))
    at = {(r["arm"], r["task"]): r for r in rows}
    names = [n for n in (FULL, *dict.fromkeys(r["arm"] for r in routed)) if (n, tasks[0]) in at]
    head = ["routing", *(f"{t}{what}" for t in tasks for what in ("", ": experts", ": batch"))]
    lines = []
    for name in names:
        cells = [name]
        for task in tasks:
            row = at.get((name, task))
            batch = "–" if row is None else short(row["decode_batch_size"], 3)
            cells += [_main(row), "–" if row is None else _experts(row), batch]
        lines.append(cells)
    return _table(head, lines)


def _task(row: Mapping[str, Any]) -> Task:
    return next(t for t in TASKS if t.name == row["task"])


def _main(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else _interval(row, METRICS[_task(row).task][0])


def _interval(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.3f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"


def _experts(row: Mapping[str, Any]) -> str:
    return f"{short(row['experts_before'], 3)} → {short(row['experts_after'], 3)}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is aligned as plain text too; empty without lines."""
    if not lines:
        return ""
    widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]

    def text(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([text(head), rule, *map(text, lines)])


def _csv(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return round(value, 6) if isinstance(value, float) else value
