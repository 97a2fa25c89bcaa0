"""`report.html`: one file that opens offline and shows a run. Nothing in it asks for anything else.

A content security policy in the file itself backs that up: no request may leave, and only the
scripts whose hashes it names may run. The template escapes what models, data sets and files say.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from harness.results import charts, levers
from harness.results.by_batch import by_batch
from harness.results.cautions import cautions
from harness.results.cell_table import cell_table
from harness.results.columns import columns_of
from harness.results.derive import CellResult, Derived, derive
from harness.results.examples import examples
from harness.results.plan_file import Plan
from harness.results.samples import StoredSample
from harness.results.store import RunFolder
from harness.results.table import short
from harness.results.text import one_line, visible

FILE = "report.html"
_TEMPLATE = Path(__file__).parent / "template"


def write_report(run: RunFolder, derived: Derived | None = None) -> Path:
    """Make ``report.html`` in the run's folder from its records; gives its path.

    Args:
        run: which run.
        derived: what `derive(run)` gave, if it is at hand.

    Raises:
        ResultsError: a file of the run is missing or damaged.
        OSError: the report could not be written.
    """
    return run.write_text(FILE, render(run, derived))


def render(run: RunFolder, derived: Derived | None = None) -> str:
    """The report as HTML; arguments as for `write_report`.

    Raises:
        ResultsError: a file of the run is missing or damaged.
    """
    plan, results = derived or derive(run)
    rows = [r.row for r in results]
    cells = [r.cell for r in results]
    columns = columns_of(rows)
    other = levers.others(cells)
    panels = charts.panels(rows, columns, other)
    heads, table = cell_table(rows, columns)
    alike, differ = levers.shared_and_varied(cells)
    scripts = {"script": _source("report.js")} | ({"bundle": _bundle()} if panels else {})
    specs = [[{"specs": c.specs, "note": c.note} for c in p.choices] for p in panels]
    return _template().render(
        policy=_policy(scripts.values()),
        title=one_line(plan.title, 120) or "PruneRoute",
        name=one_line(plan.name, 120),
        created=one_line(plan.created.replace("T", " "), 40),
        counts=_counts(rows),
        facts=_facts(run, plan, results),
        cautions=cautions(rows, {r.cell.id: r.records for r in results}),
        cell_count=len(rows),
        heads=heads,
        table=table,
        panels=panels,
        batches=by_batch(results),
        cells=_cell_views(run, results),
        varied=[(k, ", ".join(_setting(v) for v in vs)) for k, vs in differ.items()],
        shared=[(k, _setting(v)) for k, v in alike.items()],
        provenance=_provenance(plan),
        columns=columns,
        style=Markup(_source("report.css")),
        chart_rows=Markup(json_for_html(charts.chart_rows(rows, columns, other))),
        chart_specs=Markup(json_for_html(specs)),
        **{name: Markup(source) for name, source in scripts.items()},
    )


def json_for_html(tree: Any) -> str:
    """JSON that can stand inside a ``<script>`` element: no text in it can end the element."""
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"), default=dataclasses.asdict)
    # json.dumps has already escaped all that is not ASCII, U+2028 and U+2029 among it.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["visible"] = visible
    return environment.get_template("report.html.j2")


def _source(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that keeps its names to itself."""
    # Carriage returns would be changed by the HTML parser, and the hash with them.
    code = (
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
        .replace("\r\n", "\n")
        .replace("\r", "\n")
    )
    for tag in ("</script", "<!--", "<script"):
        if tag in code.lower():
            raise RuntimeError(f"the bundle of vl-convert holds {tag!r}: it cannot be put in HTML")
    return f"(() => {{\n{code}\n}})();"


def _policy(scripts: Any) -> str:
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    found = Counter(r["status"] for r in rows)
    parts = [f"{found[s]} {s}" for s in ("ok", "partial", "failed", "missing") if found[s]]
    return f"{len(rows)} cell{'s' * (len(rows) != 1)}: " + (", ".join(parts) or "none")


def _facts(run: RunFolder, plan: Plan, results: Sequence[CellResult]) -> list[tuple[str, str]]:
    def distinct(column: str) -> str:
        return ", ".join(dict.fromkeys(str(r.row[column]) for r in results)) or "–"

    found = {k: _found(v) for k, v in plan.provenance.items()}
    commit = found.get("git_commit", "–")
    if len(commit) == 40:
        commit = commit[:12] + (" + changes" if found.get("git_dirty") == "yes" else "")
    gpu = plan.provenance.get("gpus")
    gpu_names = gpu.get("value") if isinstance(gpu, Mapping) else None
    machine = _found(gpu) if gpu_names else found.get("cpu_model", "–")
    return [
        ("Run", run.path.name),
        ("Model", distinct("model")),
        ("Workload", distinct("workload")),
        ("Requests a cell", distinct("requests")),
        ("Experts per token", ", ".join(dict.fromkeys(map(short, plan.top_k.values())))),
        ("Machine", one_line(machine, 120)),
        ("Commit", one_line(commit, 80)),
    ]


def _cell_views(run: RunFolder, results: Sequence[CellResult]) -> list[dict[str, Any]]:
    varied = levers.varied([r.row for r in results])
    shown = [a for a in levers.AXES if a.column in levers.ALWAYS or a in varied]
    workloads = {r.cell.settings.workload for r in results}
    samples = {w: run.samples(w) for w in workloads}
    return [_cell_view(r, shown, samples[r.cell.settings.workload]) for r in results]


def _cell_view(
    result: CellResult, shown: Sequence[levers.Axis], samples: Mapping[str, StoredSample]
) -> dict[str, Any]:
    row = result.row
    label = " · ".join(
        f"{a.title.split(' [')[0]} {short(row[a.column])}"
        for a in shown
        if row[a.column] is not None
    )
    return {
        "id": result.cell.id,
        "label": label,
        "status": row["status"],
        "failure": row["failure"],
        "examples": examples(result.records, samples),
    }


def _provenance(plan: Plan) -> list[tuple[str, str, bool]]:
    """(name, text, whether it is known) of all that the run wrote down about itself."""
    lines: list[tuple[str, str, bool]] = []
    for name, entry in levers.flat({**plan.provenance, **plan.notes}, leaf="value").items():
        known = not (isinstance(entry, Mapping) and entry.get("value") is None)
        lines.append((one_line(name.replace("_", " "), 80), _found(entry), known))
    return lines


def _found(entry: Any) -> str:
    """A lookup's value as text, or why there is none."""
    if isinstance(entry, Mapping) and "value" in entry:
        if entry["value"] is None:
            return one_line(str(entry.get("why", "unknown")))
        entry = entry["value"]
    return _setting(entry)


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return one_line(" ".join(str(v) for v in value)) or "(none)"
    return one_line(str(value))
