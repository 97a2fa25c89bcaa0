"""Partial sums are gone on with only by the run that they are of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.calibration import partial_file
from harness.calibration.partial import Partial, check_place, differences
from harness.calibration.similarity import CalibrationError, load_similarity

MADE_OF = {"measure": "cka", "data": "a" * 64, "samples": "9"}


def test_round_trip(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "new" / "x.partial.safetensors", MADE_OF)
    assert partial.load() is None
    sums = {"0.gram": torch.rand(2, 2, dtype=torch.float64), "0.states": torch.empty(0, 4)}
    partial.save(3, sums)
    partial.save(5, sums)
    found = partial.load()
    assert found is not None and found.done == 5
    assert found.tensors.keys() == sums.keys()
    assert all(torch.equal(found.tensors[name], sums[name]) for name in sums)
    assert [p.name for p in partial.path.parent.iterdir()] == ["x.partial.safetensors"]
    partial.drop()
    partial.drop()
    assert partial.load() is None


def test_beside_what_it_is_for() -> None:
    assert partial_file(Path("a/b.safetensors")) == Path("a/b.partial.safetensors")
    assert partial_file(Path("a/b")) == Path("a/b.partial.safetensors")


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.safetensors"
    Partial(path, MADE_OF).save(1, {"a": torch.ones(1)})
    other = MADE_OF | {"data": "b" * 64, "samples": "10"}
    with pytest.raises(
        CalibrationError,
        match=r"was begun with data=aaaaaaaaaaaa, not bbbbbbbbbbbb; samples=9, not 10; give the same "
        r"again, name another out=, or delete .*x.partial.safetensors to start anew$",
    ):
        Partial(path, other).load()
    assert differences({"a": "1"}, {"b": "2"}) == ["b=(none), not 2", "a=1, not (none)"]


def test_files_that_are_no_partial_sums(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.safetensors"
    path.write_text("cut short")
    with pytest.raises(CalibrationError, match=r"holds no partial sums .* delete "):
        Partial(path, MADE_OF).load()
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CalibrationError, match="holds no partial sums"):
        Partial(path, MADE_OF).load()
    Partial(path, MADE_OF).save(1, {"a": torch.ones(1)})
    with pytest.raises(CalibrationError, match="holds partial sums; start the command"):
        load_similarity(path, layers=1, experts=2)


def test_a_place_that_cannot_be_written_is_found_out_first(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"out=.*: cannot be written"):
        check_place(tmp_path / "file" / "x")
    with pytest.raises(CalibrationError, match="is a folder"):
        check_place(tmp_path)
    # Weights, data, notes: whatever is no matrix of ours stays.
    with pytest.raises(CalibrationError, match="no file of this program"):
        check_place(tmp_path / "file")
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(CalibrationError, match="no file of this program"):
        check_place(tmp_path / "weights.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "ours.safetensors", {"model_sha256": "0"})
    check_place(tmp_path / "ours.safetensors")


@pytest.mark.parametrize(("done", "value"), [(-3, 0.0), (3, float("nan"))])
def test_sums_that_cannot_be_are_refused(tmp_path: Path, done: int, value: float) -> None:
    partial = Partial(tmp_path / "x.partial.safetensors", MADE_OF)
    partial.save(done, {"0.gram": torch.full((2,), value)})
    with pytest.raises(CalibrationError, match="is damaged"):
        partial.load()
