from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.datasets.sample import Image, Message, Sample, Text
from harness.load.record import RequestRecord
from harness.plan import Cell
from harness.results import atomic
from harness.results.derive import derive
from harness.results.errors import ResultsError
from harness.results.store import RunFolder

WHEN = datetime(2026, 8, 23, 14, 5, 6)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", "sweep", WHEN)
    run.write_plan({"schema": 1, "cells": [{"id": "b1"}, {"id": "a2"}, {"id": "c3"}]})
    return run


def write(run: RunFolder, cell_id: str, **changes: Any) -> None:
    parts: dict[str, Any] = {
        "config": {"load": {"qps": 2.0}},
        "schedule": '{"offsets_s": [0.5]}',
        "records": [RequestRecord("r", "s", 0.5)],
        "steps": None,
        "summary": {"cell": cell_id, "ttft_p99_ms": float("inf"), "qps": None},
    }
    run.write_cell(cell_id, **{**parts, **changes})


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("default", "default"),
        ("my sweep/../x", "my-sweep-..-x"),
        ("../../etc", "etc"),
        ("</script>", "script"),
        ("日本", "run"),
        ("", "run"),
        ("a" * 300, "a" * 80),
    ],
)
def test_folder_name(tmp_path: Path, name: str, slug: str) -> None:
    run = RunFolder.create(tmp_path / "new" / "runs", name, WHEN)
    assert run.path == tmp_path / "new" / "runs" / f"2026-08-23_14-05-06-{slug}"


def test_never_the_same_folder_twice(tmp_path: Path) -> None:
    paths = [RunFolder.create(tmp_path, "a", WHEN).path.name for _ in range(3)]
    stem = "2026-08-23_14-05-06-a"
    assert paths == [stem, stem + "-2", stem + "-3"]


def test_a_folder_may_be_named_outright_if_nothing_is_in_it(tmp_path: Path) -> None:
    run = RunFolder.create_at(tmp_path / "a" / "b")
    assert run.path == tmp_path / "a" / "b"
    assert (run.path / "cells").is_dir()
    with pytest.raises(ResultsError, match="is not empty, and no run"):
        RunFolder.create_at(run.path)
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match="file: is no folder"):
        RunFolder.create_at(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert RunFolder.create_at(tmp_path / "empty").path.is_dir()


def test_cell_round_trip(run: RunFolder) -> None:
    file = io.BytesIO()
    np.savez(file, experts=np.arange(6).reshape(2, 3))
    write(run, "a2", steps=file.getvalue())
    assert run.config("a2") == {"load": {"qps": 2.0}}
    assert json.loads(run.schedule("a2")) == {"offsets_s": [0.5]}
    assert run.records("a2") == (RequestRecord("r", "s", 0.5),)
    assert run.summary("a2") == {"cell": "a2", "ttft_p99_ms": "inf", "qps": None}
    steps = run.steps("a2")
    assert steps is not None
    assert steps["experts"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_cells_come_in_the_order_of_the_plan(run: RunFolder) -> None:
    for cell_id in ("a2", "zz", "b1"):
        write(run, cell_id)
    (run.path / "cells" / ".c3.1234.tmp").mkdir()
    assert run.cell_ids() == ("b1", "a2", "zz")
    assert run.planned_ids() == ("b1", "a2", "c3")
    assert run.steps("b1") is None


def test_crash_leaves_no_cell(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "sync_folder", crash)
    with pytest.raises(KeyboardInterrupt):
        write(run, "a2")
    monkeypatch.undo()
    assert run.cell_ids() == ()
    write(run, "a2")
    assert run.cell_ids() == ("a2",)


def test_results_are_never_replaced(run: RunFolder) -> None:
    write(run, "a2")
    with pytest.raises(ResultsError, match="a2: the cell has results already"):
        write(run, "a2", records=[])
    assert len(run.records("a2")) == 1


def test_discarded_cell_can_be_written_again(run: RunFolder) -> None:
    write(run, "a2")
    run.discard_cell("a2")
    assert list((run.path / "cells").iterdir()) == []
    write(run, "a2", records=[])
    assert run.records("a2") == ()


@pytest.mark.parametrize("cell_id", ["", "..", "a/b", ".hidden", "a b", "x" * 65])
def test_cell_names_stay_in_the_run(run: RunFolder, cell_id: str) -> None:
    with pytest.raises(ValueError, match="cannot be a cell's name"):
        write(run, cell_id)


def test_schedule_must_be_json(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="Expecting"):
        write(run, "a2", schedule="not json")
    assert run.cell_ids() == ()


def test_latest(run: RunFolder) -> None:
    latest = run.path.parent / "latest"
    with pytest.raises(ResultsError, match="latest: no such run; nothing has been run yet"):
        RunFolder.open(latest)
    run.point_latest()
    assert latest.readlink() == Path(run.path.name)
    assert RunFolder.open(latest) == run
    run.path.rename(run.path.with_name("moved"))
    with pytest.raises(ResultsError, match=r"points to .*, which is gone"):
        RunFolder.open(latest)


def test_open_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"not a run: it has no plan.json"):
        RunFolder.open(tmp_path)
    with pytest.raises(ResultsError, match=r"nothing: no such run$"):
        RunFolder.open(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "schedule.json", "summary.json", "steps.npz"])
def test_damaged_parts(run: RunFolder, name: str, content: bytes) -> None:
    write(run, "a2")
    (run.path / "cells" / "a2" / name).write_bytes(content)
    with pytest.raises(ResultsError, match=f"{name}: damaged") as e:
        getattr(run, name.split(".")[0])("a2")
    assert "\n" not in str(e.value)


def test_missing_parts(run: RunFolder) -> None:
    with pytest.raises(ResultsError, match="b1: the cell has no results"):
        run.records("b1")
    write(run, "b1")
    (run.path / "cells" / "b1" / "records.jsonl").unlink()
    with pytest.raises(ResultsError, match=r"b1: damaged, without records.jsonl"):
        run.config("b1")


@pytest.mark.parametrize("cells", [3, [3], [{}], ["x"], {"id": 1}])
def test_damaged_plan(run: RunFolder, cells: Any) -> None:
    (run.path / "plan.json").write_text(json.dumps({"schema": 1, "cells": cells}))
    with pytest.raises(ResultsError, match=r"plan.json: damaged at `cells`"):
        run.planned_ids()


def test_samples(run: RunFolder, settings: Callable[..., Any]) -> None:
    workload = settings().workload
    parts = (Text("Read"), Image(b"", "image/png", "a</script>.png"), Text("aloud."))
    one = Sample("s-1", (Message("user", parts),), ("ab", "\ud83d"), "ocrbench", "fine print")
    turns = (Message("system", (Text("Be brief."),)), Message("user", (Text("Hi"),)))
    run.write_samples(workload, [one, Sample("s-2", turns, ("x",), "ocrbench")])
    back = run.samples(workload)
    assert back["s-1"].question == "Read [image: a</script>.png] aloud."
    assert back["s-1"].references == ("ab", "\ud83d")
    assert back["s-2"].question == "system: Be brief.\nuser: Hi"
    assert run.samples(settings(workload__seed=8).workload) == {}


def test_derive_names_the_damage(grid: tuple[Cell, ...], run_of: Callable[..., RunFolder]) -> None:
    run = run_of(grid[:2])
    path = run.path / "cells" / grid[0].id / "config.json"
    tree = json.loads(path.read_text())
    del tree["load"]["seed"]
    path.write_text(json.dumps(tree))
    with pytest.raises(ResultsError, match=r"config.json: settings of cell .*: load.seed: missing"):
        derive(run)


def test_plan_of_another_schema(grid: tuple[Cell, ...], run_of: Callable[..., RunFolder]) -> None:
    run = run_of(grid[:1])
    path = run.path / "plan.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(ResultsError, match="schema 9; this program reads schema 1"):
        derive(run)
