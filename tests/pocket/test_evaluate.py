"""`harness.pocket.evaluate`: what is asked, what the table says of it, and one whole small run."""

from __future__ import annotations

import csv
import dataclasses
import io
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from harness.datasets.sample import Message, Sample, Text
from harness.load.record import RequestRecord
from harness.pocket.evaluate import balanced, evaluate, report
from harness.pocket.evaluation.arms import (
    CC,
    FULL,
    OCR_FINE,
    OCR_LARGE,
    RAG,
    RATIOS,
    TASKS,
    Task,
    arms,
    sere_arm,
    settings_of,
    topk_arm,
    vision_arm,
)
from harness.pocket.evaluation.measured import METRICS, Measured, estimate, measured, scores_of
from harness.pocket.evaluation.table import COLUMNS, Key, columns_text, line, markdown, to_csv
from harness.pocket.evaluation.verdicts import Verdict, verdicts
from harness.pocket.generate import SetSpec, generate
from harness.results.store import RunFolder
from harness.settings import Settings

DATA = Path("set.json")


def all_settings(*, quick: bool = False, protection: Path | None = None) -> list[Settings]:
    return [
        settings_of(arm, task, n=20, model=None, data=DATA)
        for arm in arms(quick=quick, protection=protection)
        for task in arm.tasks
    ]


# -- arms -------------------------------------------------------------------------------------------


def test_every_pair_is_a_cell_of_its_own_and_all_share_an_engine() -> None:
    settings = all_settings(protection=Path("/kept.safetensors"))
    assert len(set(settings)) == len(settings) == 4 + 12 * 3 + 5 * 2
    assert len({(s.engine, s.model) for s in settings}) == 1
    assert {(s.load.arrival, s.load.concurrency, s.load.requests) for s in settings} == {
        ("closed", 16, 20)
    }
    assert {s.workload.temperature for s in settings} == {0.0}
    names = [arm.name for arm in arms(quick=False, protection=None)]
    assert len(set(names)) == len(names)


def test_arms_pull_one_lever_at_a_time() -> None:
    for arm in arms(quick=False, protection=Path("/kept.safetensors")):
        s = settings_of(arm, arm.tasks[0], n=20, model=None, data=DATA)
        assert (s.vision.retain_ratio < 1) == (arm.part == "vision")
        assert (s.routing.policy != "off") == (arm.part == "routing")
        assert (s.routing.protection_path is not None) == arm.name.endswith("protected")


def test_quick_arms_are_some_of_all() -> None:
    quick = {arm.name: arm for arm in arms(quick=True, protection=Path("/kept.safetensors"))}
    every = {arm.name: arm for arm in arms(quick=False, protection=None)}
    assert quick.items() <= every.items()
    assert 2.5 * len(quick) < len(every) + 4


# -- data -------------------------------------------------------------------------------------------


def test_letters_are_balanced_and_questions_asked_once(tmp_path: Path) -> None:
    file = generate(tmp_path / "cc", SetSpec("cc", 14, 3))
    samples = balanced(file, questions=14, seed=5)
    assert sorted(Counter(s.references[0] for s in samples).values()) == [3, 3, 4, 4]
    assert len({s.metadata["question_id"] for s in samples}) == 14
    assert len({s.metadata["pass"] for s in samples}) > 1
    assert samples == balanced(file, questions=14, seed=5)
    assert samples != balanced(file, questions=14, seed=6)


# -- scores and rows --------------------------------------------------------------------------------


def sample(i: int, reference: str) -> Sample:
    return Sample(f"s{i}", (Message("user", (Text("?"),)),), (reference,), "ocrbench")


def record(of: Sample, answer: str, **scores: float) -> RequestRecord:
    return RequestRecord(
        f"r-{of.id}",
        of.id,
        0.0,
        end_s=float(of.id[1:]),
        text=answer,
        finish_reason="stop",
        output_tokens=2,
        scores=MappingProxyType(scores),
    )


def test_scores_are_in_the_sets_order_and_failures_are_zero() -> None:
    samples = [sample(0, "a"), sample(1, "b"), sample(2, "c")]
    records = [
        record(samples[2], "c", edit_similarity=1.0),
        record(samples[0], "xa", edit_similarity=0.5),
        dataclasses.replace(record(samples[1], "b", edit_similarity=0.0), error="cut off"),
    ]
    found = scores_of(OCR_FINE, records, samples)
    assert found["exact"].tolist() == [0.0, 0.0, 1.0]
    assert found["edit_similarity"].tolist() == [0.5, 0.0, 1.0]
    with pytest.raises(ValueError, match="ocr_fine: no record of s2"):
        scores_of(OCR_FINE, records[1:], samples)


def test_proportions_and_means_get_their_own_intervals() -> None:
    right = np.ones(20)
    assert estimate("exact", right).low == pytest.approx(0.8389, abs=1e-4)
    assert estimate("edit_similarity", right).low == 1.0


SUMMARY: dict[str, Any] = {
    "failed": 0,
    "vision_policy": "random",
    "vision_kept": 0.5,
    "similarity_threshold": None,
    "protection": None,
    "experts_before": 10.0,
    "experts_after": 10.0,
    "slots_moved": 0.0,
    "decode_batch_size": 7.5,
    "cell": "c0",
}


def test_a_row_has_declared_columns_and_says_what_was_asked() -> None:
    samples = [sample(0, "a"), sample(1, "b")]
    records = [record(s, s.references[0], edit_similarity=1.0) for s in samples]
    arm = next(a for a in arms(quick=False, protection=None) if a.name == vision_arm("random", 0.5))
    settings = settings_of(arm, OCR_LARGE, n=2, model=None, data=DATA)
    row = measured(arm, OCR_LARGE, settings, records, samples, SUMMARY).row
    names = [c.name for c in COLUMNS]
    assert len(set(names)) == len(names)
    assert set(row) <= set(names)
    assert (row["exact"], row["exact_high"], row["questions"]) == (1.0, 1.0, 2)
    assert (row["vision_policy"], row["vision_layer"], row["retain_ratio"]) == ("random", None, 0.5)
    assert row["seconds"] == 1.0
    (back,) = csv.DictReader(io.StringIO(to_csv([row])))
    assert list(back) == names
    assert (back["exact"], back["ccbench"], back["task"]) == ("1.0", "", "ocr_large")
    assert line(row).startswith("random 0.5 · ocr_large: exact 1.000 [0.34, 1.00]")


def test_every_column_is_explained() -> None:
    text = columns_text()
    assert all(c.about and c.name in text for c in COLUMNS)
    shown = {name for names in METRICS.values() for name in names}
    assert shown <= {c.name for c in COLUMNS}


# -- made-up findings -------------------------------------------------------------------------------

N = 100


def made_up(task: Task, part: str, arm: str, right: float, **row: Any) -> Measured:
    """An arm that gets the first share of the questions right."""
    values = (np.arange(N) < round(right * N)).astype(np.float64)
    scores = dict.fromkeys(METRICS[task.task], values)
    settings = {"retain_ratio": 1.0, "vision_policy": None, "experts_before": 20.0, **row}
    found = {"part": part, "arm": arm, "task": task.name, "questions": N, **settings}
    found |= {"seconds": 1.0, "failed": 0, "decode_batch_size": 9.0}
    for name, v in scores.items():
        e = estimate(name, v)
        found |= {name: e.value, f"{name}_low": e.low, f"{name}_high": e.high}
    return Measured(scores, found)


def world(ratios: Sequence[float] = RATIOS) -> dict[Key, Measured]:
    """A world in which every goal is met."""
    found = {(FULL, t.name): made_up(t, "base", FULL, 1.0, experts_after=20.0) for t in TASKS}
    steepness = {OCR_FINE: 1.0, OCR_LARGE: 0.6, CC: 0.2}
    for ratio in ratios:
        for task, steep in steepness.items():
            for policy, worse in (("visionzip", 1.0), ("random", 1.4)):
                right = max(0.0, 1 - steep * worse * (1 - ratio))
                arm = vision_arm(policy, ratio)
                row = {"retain_ratio": ratio, "vision_policy": policy}
                found[arm, task.name] = made_up(task, "vision", arm, right, **row)
    for task in (OCR_LARGE, OCR_FINE, RAG):
        for arm, right, after in (
            (topk_arm(2), 0.4, 6.0),
            (sere_arm(2, 0.3), 0.9, 10.0),
            (sere_arm(2, 0.0), 0.6, 8.0),
            (sere_arm(2, 0.0, protected=True), 0.8, 9.0),
        ):
            found[arm, task.name] = made_up(task, "routing", arm, right, experts_after=after)
    return found


def by_goal(found: dict[Key, Measured]) -> dict[str, Verdict]:
    return {v.goal: v for v in verdicts(found)}


def test_a_world_that_shows_everything_meets_every_goal() -> None:
    given = verdicts(world())
    assert [v.goal for v in given if v.met is not True] == []
    assert len({v.goal for v in given}) == len(given) == 6 + 3 + 3 + 2 + 4 + 2


def test_each_goal_is_missed_by_what_it_is_about() -> None:
    found = world()
    found[FULL, CC.name] = made_up(CC, "base", FULL, 0.94)
    assert by_goal(found)["cc ccbench >= 0.95"].met is False

    found = world()
    for ratio in RATIOS:  # as good at random
        arm = vision_arm("random", ratio)
        found[arm, CC.name] = dataclasses.replace(found[vision_arm("visionzip", ratio), CC.name])
    missed = [v.goal for v in verdicts(found) if not v.met]
    assert missed == ["cc: attention beats random at the same count"]

    found = world()
    for ratio in RATIOS:  # fine print does not care
        arm = vision_arm("visionzip", ratio)
        found[arm, OCR_FINE.name] = made_up(OCR_FINE, "vision", arm, 1.0)
    missed = [v.goal for v in verdicts(found) if not v.met]
    assert missed == ["fine print falls before large print", "ocr_fine falls before cc"]

    found = world()
    top2 = topk_arm(2)
    found[top2, RAG.name] = made_up(RAG, "routing", top2, 0.95)
    given = by_goal(found)
    assert given["rag: plain top-2 loses much (>= 0.1)"].met is False
    assert given["ocr_fine: plain top-2 loses much (>= 0.1)"].met is True
    assert all(v.met is False for g, v in given.items() if g.startswith("rag: SERE"))

    found = world()
    arm = sere_arm(2, 0.0)
    found[arm, RAG.name] = made_up(RAG, "routing", arm, 0.6, experts_after=20.0)
    missed = [v.goal for v in verdicts(found) if not v.met]
    assert missed == [f"rag: {arm} loses clearly less than top-2, and reads fewer experts"]


def test_chance_is_not_a_score_that_is_left() -> None:
    """All that guessing leaves of a multiple-choice score counts as lost."""
    found = world()
    for ratio in RATIOS:
        arm = vision_arm("visionzip", ratio)
        found[arm, CC.name] = made_up(CC, "vision", arm, 0.25)
    figure = by_goal(found)["ocr_fine falls before cc"].figure
    assert "against 0.00 (cc)" in figure


def test_what_was_not_measured_is_said_to_be_so() -> None:
    assert all(v.met is None for v in verdicts({}))
    only_base = {k: m for k, m in world().items() if k[0] == FULL}
    given = verdicts(only_base)
    assert [v.met for v in given[:6]] == [True] * 6
    assert all(v.met is None for v in given[6:])
    assert "not measured" in report(only_base)


def test_the_tables_hold_all_arms_once() -> None:
    text = markdown(world(ratios=(0.5, 0.2)))
    base, vision, routing = text.split("\n\n")
    assert len(base.splitlines()) == 2 + 2 + 2 + 1 + 3
    assert [row.split("|")[1].strip() for row in vision.splitlines()[2:]] == ["1", "0.5", "0.2"]
    # Everything kept is in the column of every policy.
    assert vision.splitlines()[2].count("1.000 [0.96, 1.00]") == 6
    assert len(routing.splitlines()) == 2 + 1 + 4
    assert len({len(row) for row in routing.splitlines()}) == 1
    assert markdown({}) == ""


# -- command line -----------------------------------------------------------------------------------


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness.pocket.evaluate", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_wrong_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for arguments, words in (
        (["--n", "0"], "--n 0: takes a whole number from 1"),
        (["--n", "4", "--model", str(tmp_path)], "has no config.json"),
    ):
        done = program(*arguments, "--out", str(tmp_path / "out"))
        assert done.returncode == 2
        assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_of_other_cells_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create_at(tmp_path / "out")
    run.write_plan({"cells": [{"id": "c1"}]})
    assert evaluate(1, quick=True, model=None, out=run.path) == 2
    assert "that run was of other cells (1 of its 1 are not asked for now, 22" in (
        capsys.readouterr().err
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").touch()
    assert evaluate(1, quick=True, model=None, out=tmp_path / "full") == 2
    assert "is not empty, and no run" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
def test_a_small_evaluation_runs_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    done = program("--quick", "--n", "8", "--out", str(out), "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    with (out / "pocket.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 + 4 * 3 + 3 * 2
    assert {r["questions"] for r in rows} == {"8"}
    assert {r["failed"] for r in rows} == {"0"}
    for row in rows:
        kept = float(row["vision_kept"])
        assert kept == 1 if row["part"] != "vision" else kept <= float(row["retain_ratio"])
        before, after = float(row["experts_before"]), float(row["experts_after"])
        assert after == before if row["part"] != "routing" else after < before
    assert done.stdout == (out / "pocket.md").read_text() + "\n"
    assert "ocr_large exact >= 0.95" in done.stdout

    (out / "pocket.md").unlink()
    assert evaluate(8, quick=True, model=None, out=out, dtype="float32") == 0
    again = capsys.readouterr()
    assert again.err.startswith("0 of 22 arms × tasks to ask")
    assert again.out == done.stdout
