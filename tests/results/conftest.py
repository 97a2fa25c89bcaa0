"""Made-up runs: what a sweep would have left behind, without one."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.datasets.sample import Image, Message, Sample, Text
from harness.load.record import Chunk, ImageTokens, RequestRecord, RoutingCounts
from harness.plan import Cell, make_cells
from harness.results import provenance
from harness.results.plan_file import plan_tree
from harness.results.store import RunFolder
from harness.results.summary import summarize
from harness.settings import Settings

CONF = Path(__file__).parents[2] / "conf"
GROUPS = {
    "engine": "cpu",
    "model": "pocket",
    "workload": "pocket_ocr",
    "load": "poisson",
    "vision": "visionzip",
    "routing": "sere",
    "report": "html",
}
TOP_K = 8
WHEN = datetime(2026, 8, 23, 14, 5, 6)
WORDS = ("GATE", "17", "LONDON", "BREAD", "4.50", "ROOM", "203", "EXIT", "NORTH", "TOTAL")


def make_settings(**changes: Any) -> Settings:
    """The defaults of `conf/` with changes given as ``group__key=value``."""
    tree = {
        group: OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
        for group, name in GROUPS.items()
    }
    for key, value in changes.items():
        group, name = key.split("__")
        tree[group][name] = value
    return Settings.from_tree(tree)


def cells_of(settings: Iterable[Settings]) -> tuple[Cell, ...]:
    return make_cells(settings, top_k=lambda _: TOP_K, fingerprints=lambda _: {})


def make_grid(**changes: Any) -> tuple[Cell, ...]:
    """The default sweep: retain ratio × K × QPS, twelve cells."""
    grid = [
        make_settings(
            vision__retain_ratio=ratio, routing__primary_experts=k, load__qps=qps, **changes
        )
        for qps in (2.0, 4.0)
        for ratio in (1.0, 0.7, 0.5)
        for k in (None, 2)
    ]
    return cells_of(grid)


def make_samples(count: int) -> list[Sample]:
    rng = random.Random(7)
    samples = []
    for i in range(count):
        text = " ".join(rng.sample(WORDS, 3))
        parts = (
            Image(b"", "image/png", f"page_{i}_a.png"),
            Image(b"", "image/png", f"page_{i}_b.png"),
            Text("What is written in the two images?"),
        )
        samples.append(Sample(f"ocr-{i:03d}", (Message("user", parts),), (text,), "ocrbench"))
    return samples


def make_record(
    cell: Cell, index: int, sample: Sample, scheduled_s: float, rng: random.Random
) -> RequestRecord:
    """A good request whose numbers follow the cell's levers as real ones would."""
    s = cell.settings
    ratio, k, qps = s.vision.retain_ratio, s.routing.primary_experts, s.load.qps or 1.0
    reference = sample.references[0]
    sent = scheduled_s + rng.uniform(0.0002, 0.002)
    queue = rng.expovariate(1 / (0.02 * qps))
    first = sent + (0.06 + 0.13 * ratio) * rng.lognormvariate(0, 0.2) + queue
    step = (0.021 if k is None else 0.0155) * (1 + 0.06 * qps) * rng.lognormvariate(0, 0.08)
    tokens = rng.randint(6, 16)
    right = rng.random() < 0.93 - 0.25 * (1 - ratio) ** 2 - (0.0 if k is None else 0.03)
    answer = reference if right else reference[: max(1, len(reference) // 2)]
    cuts = [round(i * len(answer) / tokens) for i in range(tokens + 1)]
    chunks = tuple(Chunk(first + i * step, 1, answer[cuts[i] : cuts[i + 1]]) for i in range(tokens))
    before = (64, 48)
    kept = math.ceil(sum(before) * ratio)
    batch = 1 + qps * tokens * step
    experts = min(32.0, 8 * batch**0.55)
    return RequestRecord(
        request_id=f"{cell.id}-{index}",
        sample_id=sample.id,
        scheduled_s=scheduled_s,
        sent_s=sent,
        headers_s=sent + 0.004,
        first_token_s=first,
        last_token_s=chunks[-1].at_s,
        end_s=chunks[-1].at_s + 0.001,
        status=200,
        chunks=chunks,
        text=answer,
        finish_reason="stop",
        prompt_tokens=30 + kept,
        output_tokens=tokens,
        images=(ImageTokens(64, kept - kept // 3), ImageTokens(48, kept // 3)),
        routing=RoutingCounts(
            steps=tokens - 1,
            batch_size=batch,
            experts_before=experts,
            experts_after=experts if k is None else 0.55 * experts,
            slots_moved=0.0 if k is None else 2.3 * batch,
        ),
        scores={
            "ocrbench": float(right),
            "rouge1": 1.0 if right else rng.uniform(0.2, 0.7),
            "edit_similarity": 1.0 if right else rng.uniform(0.4, 0.8),
        },
    )


def failed_record(record: RequestRecord, error: str) -> RequestRecord:
    """The same request, had it ended in an error before its first token."""
    return RequestRecord(
        request_id=record.request_id,
        sample_id=record.sample_id,
        scheduled_s=record.scheduled_s,
        sent_s=record.sent_s,
        end_s=record.end_s,
        error=error,
    )


def make_records(cell: Cell, samples: list[Sample]) -> list[RequestRecord]:
    rng = random.Random(int(cell.id, 16))
    arrivals = random.Random(cell.settings.load.seed)
    at, records = 0.0, []
    for index in range(cell.settings.load.requests):
        at += arrivals.expovariate(cell.settings.load.qps or 1.0)
        records.append(make_record(cell, index, samples[index % len(samples)], at, rng))
    return records


@cache
def found_here() -> dict[str, Any]:
    return provenance.collect(["python", "-m", "harness", "-m", "load.qps=2,4"])


def make_run(
    root: Path,
    cells: tuple[Cell, ...],
    samples: list[Sample],
    *,
    change: Callable[[Cell, list[RequestRecord]], Iterable[RequestRecord]] = lambda c, r: r,
    failures: Mapping[str, str | None] = {},
    skip: frozenset[str] = frozenset(),
    name: str = "sweep",
) -> RunFolder:
    """A whole run folder. `failures`: cell id → why it failed; `skip`: cells that never ran."""
    run = RunFolder.create(root, name, WHEN)
    run.write_plan(
        plan_tree(
            name=name,
            created=WHEN,
            cells=cells,
            top_k=lambda _: TOP_K,
            provenance=found_here(),
            notes={"cache policy": "cold: emptied before each cell"},
        )
    )
    for cell in cells:
        run.write_samples(cell.settings.workload, samples)
        if cell.id in skip:
            continue
        records = tuple(change(cell, make_records(cell, samples)))
        failure = failures.get(cell.id)
        run.write_cell(
            cell.id,
            config=cell.settings.to_tree(),
            schedule=json.dumps({"offsets_s": [r.scheduled_s for r in records]}),
            records=records,
            steps=None,
            summary=summarize(cell, records, top_k=TOP_K, failure=failure),
        )
    run.point_latest()
    return run


@pytest.fixture
def settings() -> Callable[..., Settings]:
    return make_settings


@pytest.fixture
def cell(settings: Callable[..., Settings]) -> Cell:
    """One cell with ten requests."""
    return cells_of([settings(load__requests=10)])[0]


@pytest.fixture
def records(cell: Cell) -> list[RequestRecord]:
    return make_records(cell, make_samples(10))


@pytest.fixture
def grid() -> tuple[Cell, ...]:
    return make_grid(load__requests=10)


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., RunFolder]:
    """`make_run` in a folder of the test's own, with ten samples unless told otherwise."""

    def build(
        cells: tuple[Cell, ...], samples: list[Sample] | None = None, **how: Any
    ) -> RunFolder:
        return make_run(tmp_path / "runs", cells, samples or make_samples(10), **how)

    return build


@pytest.fixture
def fail() -> Callable[[RequestRecord, str], RequestRecord]:
    return failed_record


@pytest.fixture
def replace() -> Callable[..., Any]:
    return dataclasses.replace
