from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness import report as command
from harness.datasets.sample import Image, Message, Sample, Text
from harness.load.record import RequestRecord
from harness.plan import Cell
from harness.results import charts, levers
from harness.results.columns import columns_of
from harness.results.derive import derive
from harness.results.plan_file import plan_tree
from harness.results.report import json_for_html, render
from harness.results.store import RunFolder

RunOf = Callable[..., RunFolder]
Fail = Callable[[RequestRecord, str], RequestRecord]

ATTACK = "</script></style><script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{7*7}}\u2028"
CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)


class Page(HTMLParser):
    """What a browser would make of the file, as far as these tests ask."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        tag = self.tags[-1][0] if self.tags else ""
        if tag == "script" and self.cdata_elem == "script":
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))
        elif tag != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def rendered(run: RunFolder) -> Page:
    return Page(render(run))


@pytest.fixture
def mixed(grid: tuple[Cell, ...], run_of: RunOf, fail: Fail) -> RunFolder:
    """Cells that are ok, partial, failed and missing."""

    def change(cell: Cell, records: list[RequestRecord]) -> list[RequestRecord]:
        if cell == grid[1]:
            return [*records[:7], *(fail(r, "HTTP 500: engine died") for r in records[7:])]
        return records[:2] if cell == grid[2] else records

    return run_of(grid, change=change, failures={grid[2].id: "the server died"}, skip={grid[3].id})


def test_nothing_is_loaded_and_only_our_scripts_run(mixed: RunFolder) -> None:
    html = render(mixed)
    page = Page(html)
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "action", "data", "poster"} & attributes.keys(), tag
        assert tag not in ("link", "base", "iframe", "object", "embed", "form", "img")
        assert (attributes.get("href") or "#").startswith("#")
        assert not [a for a in attributes if a.startswith("on")]
    styles = re.findall(r"<style>(.*?)</style>", html, re.S)
    assert len(styles) == 1
    assert "url(" not in styles[0]
    assert "@import" not in styles[0]
    policy = next(a["content"] or "" for t, a in page.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    code = [text for attributes, text in page.scripts if "type" not in attributes]
    assert len(code) == 2
    for text in code:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_failed_cells_are_told_and_not_drawn(mixed: RunFolder, grid: tuple[Cell, ...]) -> None:
    page = rendered(mixed)
    assert "12 cells: 9 ok, 1 partial, 1 failed, 1 missing" in page.words
    assert "1 cell failed: the server died" in page.words
    assert "1 cell missing: the sweep ended before this cell" in page.words
    assert "3 of 10 requests failed and count as infinitely slow: HTTP 500" in page.words
    assert "p90 rests on fewer than 64 requests in 10 cells" in page.words
    data = {a["id"]: json.loads(t) for a, t in page.scripts if "type" in a}
    drawn = {row["cell"] for row in data["chart-rows"]}
    assert drawn == {c.id for c in grid} - {grid[2].id, grid[3].id}
    notes = [choice["note"] for panel in data["chart-specs"] for choice in panel]
    assert all("Not drawn of 12 cells: 2 failed or did not run" in n for n in notes)
    p99 = next(n for n in notes if "infinite TTFT p99" in n)
    assert "1 with an infinite TTFT p99 (too many failed requests)" in p99
    assert all("some requests failed, and are drawn: 1" in n for n in notes)


def test_no_cell_finished(grid: tuple[Cell, ...], run_of: RunOf) -> None:
    failures = {c.id: "no such model: /models/x" for c in grid}
    html = render(run_of(grid, change=lambda c, r: (), failures=failures))
    page = Page(html)
    assert "12 cells failed: no such model: /models/x" in page.words
    assert "Nothing to draw: no cell finished." in page.words
    assert "vegaEmbed = " not in html
    assert len(page.scripts) == 1


def test_nothing_ran_at_all(grid: tuple[Cell, ...], run_of: RunOf) -> None:
    page = rendered(run_of(grid, skip={c.id for c in grid}))
    assert "12 cells: 12 missing" in page.words


def test_repeated_samples_are_told(cell: Cell, run_of: RunOf) -> None:
    sample = Sample("only", (Message("user", (Text("Q?"),)),), ("A",), "ocrbench")
    page = rendered(run_of((cell,), [sample]))
    assert "1 cell: samples were asked more than once" in page.words


def test_examples_show_question_reference_and_answer(cell: Cell, run_of: RunOf) -> None:
    def change(_: Cell, records: list[RequestRecord]) -> list[RequestRecord]:
        return [dataclasses.replace(records[0], text="x" * 2000), *records[1:]]

    page = rendered(run_of((cell,), change=change))
    assert "What is written in the two images?" in page.words
    assert "[image: page_0_a.png]" in page.words
    assert "… (1300 more characters)" in page.words
    assert page.words.count("Reference") == 3


def hostile_run(settings: Callable[..., Any], run_of: RunOf, text: str) -> RunFolder:
    """`text` wherever somebody else's text can be."""
    import harness.plan

    one = settings(
        model__name=text,
        model__path=text,
        workload__name=text,
        report__title=text,
        routing__policy="sere",
        routing__primary_experts=2,
        routing__protection_path=text,
        engine__extra_args=[text],
        load__requests=4,
    )
    two = dataclasses.replace(one, vision=dataclasses.replace(one.vision, retain_ratio=0.5))
    cells = harness.plan.make_cells([one, two], top_k=lambda _: 8, fingerprints=lambda _: {})
    image = Image(b"", "image/png", text)
    sample = Sample(text, (Message("user", (Text(text), image)),), (text,), "ocrbench", text)

    def change(_: Cell, records: list[RequestRecord]) -> list[RequestRecord]:
        good = dataclasses.replace(records[0], text=text, finish_reason=text, scores={text: 1.0})
        bad = dataclasses.replace(records[1], text=text, error=text)
        return [good, bad, *records[2:]]

    run = run_of(cells, [sample], change=change, failures={cells[1].id: text})
    run.write_plan(
        plan_tree(
            name=text,
            created=command_time(),
            cells=cells,
            top_k=lambda _: 8,
            provenance={
                "argv": [text],
                "os": {"value": text},
                "gpus": {"value": None, "why": text},
            },
            notes={text: {text: text}},
        )
    )
    return run


def command_time() -> Any:
    from datetime import datetime

    return datetime(2026, 8, 23)


@pytest.mark.parametrize(
    "text",
    [
        ATTACK,
        "\x00\x07\x1b[31m\r\n",
        "\u202egnp.egami שלום",
        "👩‍👩‍👧 \ud83d half",
        "]]><!--",
        "a.b[0]",
    ],
)
def test_hostile_texts_stay_texts(settings: Callable[..., Any], run_of: RunOf, text: str) -> None:
    html = render(hostile_run(settings, run_of, text))
    html.encode()
    assert "\x00" not in html
    page = Page(html)
    calm = Page(render(hostile_run(settings, run_of, "calm")))
    # The same elements with the same attributes; a metric's name may move its column.
    assert Counter((t, *a) for t, a in page.tags) == Counter((t, *a) for t, a in calm.tags)
    assert [t for a, t in page.scripts if "type" not in a] == [
        t for a, t in calm.scripts if "type" not in a
    ]
    for attributes, code in page.scripts:
        if "type" in attributes:
            json.loads(code)
            assert not set("<>&\u2028\u2029") & set(code)
    if text == ATTACK:
        assert page.words.count("onerror=alert(2)") > 10


def test_json_cannot_end_its_element() -> None:
    tree = {"</script>": ["<!--", "&amp;", "\u2028\u2029", "\ud83d"]}
    text = json_for_html(tree)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == tree


@pytest.mark.parametrize("count", [1, 2, 12])
def test_charts_of_few_and_many_cells(grid: tuple[Cell, ...], run_of: RunOf, count: int) -> None:
    _, results = derive(run_of(grid[:count]))
    rows = [r.row for r in results]
    columns, other = columns_of(rows), levers.others([r.cell for r in results])
    panels = charts.panels(rows, columns, other)
    assert [p.title.split(" –")[0] for p in panels] == ["TTFT", "TPOT", "Quality"]
    assert [c.label for c in panels[0].choices] == ["p50", "p90", "p99"]
    table = charts.chart_rows(rows, columns, other)
    fields = set(table[0])
    for panel in panels:
        for choice in panel.choices:
            assert len(choice.specs) == 3
            for spec in choice.specs:
                encoding = spec["encoding"]
                assert all(encoding[a]["title"] for a in "xy")
                used = [encoding[c] for c in encoding if c != "tooltip"] + encoding["tooltip"]
                assert {c["field"] for c in used} <= fields
    titles = [s["encoding"]["x"]["title"] for s in panels[0].choices[0].specs]
    assert titles == ["Retain ratio", "K [experts]", "QPS [requests/s]"]
    assert panels[0].choices[0].specs[0]["encoding"]["y"]["title"] == "TTFT p50 [ms]"


def test_closed_loop_is_drawn_over_concurrency(settings: Callable[..., Any], run_of: RunOf) -> None:
    import harness.plan

    cells = harness.plan.make_cells(
        [
            settings(load__arrival="closed", load__qps=None, load__concurrency=n, load__requests=5)
            for n in (1, 4)
        ],
        top_k=lambda _: 8,
        fingerprints=lambda _: {},
    )
    rows = [r.row for r in derive(run_of(cells))[1]]
    assert [a.column for a in levers.charted(rows)] == [
        "retain_ratio",
        "primary_experts",
        "concurrency",
    ]


def test_settings_that_are_no_axis_part_the_lines(
    settings: Callable[..., Any], run_of: RunOf
) -> None:
    import harness.plan

    cells = harness.plan.make_cells(
        [settings(load__seed=s, load__requests=5) for s in (0, 1)],
        top_k=lambda _: 8,
        fingerprints=lambda _: {},
    )
    alike, differ = levers.shared_and_varied(cells)
    assert differ == {"load.seed": [0, 1]}
    assert alike["load.requests"] == 5
    rows = [r.row for r in derive(run_of(cells))[1]]
    table = charts.chart_rows(rows, columns_of(rows), levers.others(cells))
    assert [r["rest_retain_ratio"] for r in table] == ["load.seed=0", "load.seed=1"]


def test_command_rebuilds_both_files(
    mixed: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mixed.path.parent.parent)
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-2:] == [
        str(mixed.path / "results.csv"),
        str(mixed.path / "report.html"),
    ]
    first = (mixed.path / "results.csv").read_bytes()
    (mixed.path / "results.csv").write_text("tampered")
    assert command.main([str(mixed.path)]) == 0
    assert (mixed.path / "results.csv").read_bytes() == first


def test_command_says_what_is_wrong(
    mixed: RunFolder, grid: tuple[Cell, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def error_of(path: Path) -> str:
        assert command.main([str(path)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        return said.err

    assert "error: " in error_of(tmp_path / "nothing")
    assert "not a run" in error_of(tmp_path)
    records = mixed.path / "cells" / grid[0].id / "records.jsonl"
    whole = records.read_bytes()
    records.write_bytes(whole[:-30])
    assert "line 10: cut off" in error_of(mixed.path)
    records.write_bytes(whole.replace(b'"text"', b'"txet"', 1))
    assert "line 1: record.chunks[0].text: missing" in error_of(mixed.path)
    records.unlink()
    assert "damaged, without records.jsonl" in error_of(mixed.path)
    records.write_bytes(whole)
    (mixed.path / "plan.json").write_text("{")
    assert "plan.json: damaged, not JSON" in error_of(mixed.path)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the report in")
@pytest.mark.parametrize("text", ["calm", ATTACK])
def test_browser_draws_without_a_word(
    settings: Callable[..., Any], run_of: RunOf, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(hostile_run(settings, run_of, text)))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ]
    done = subprocess.run(
        [str(CHROMIUM), *options, path.as_uri()], capture_output=True, text=True, timeout=120
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    assert len(re.findall(r'<svg [^>]*class="marks"', done.stdout)) == 9
