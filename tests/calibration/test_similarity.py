"""Calibration files: written alike each time, and refused for a reason that they name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.calibration.similarity import (
    CalibrationError,
    Provenance,
    load_protection,
    load_similarity,
    save_protection,
    save_similarity,
)

MADE = Provenance("frobenius", "a" * 64, "b" * 64, (0, 2))


def matrices() -> Tensor:
    drawn = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0))
    symmetric = (drawn + drawn.mT) / 2
    symmetric.diagonal(dim1=1, dim2=2).fill_(1)
    return symmetric


@pytest.fixture
def similarity_file(tmp_path: Path) -> Path:
    save_similarity(tmp_path / "s.safetensors", matrices(), MADE)
    return tmp_path / "s.safetensors"


def test_similarity_round_trip(similarity_file: Path) -> None:
    read = load_similarity(similarity_file, layers=2, experts=6, model_hash="a" * 64)
    assert torch.equal(read, matrices())
    assert torch.equal(load_similarity(similarity_file, layers=2, experts=6), matrices())


def test_same_content_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.safetensors" for i in range(6)]
    for file in files:
        save_similarity(file, matrices(), MADE)
    assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.masked_fill(s == s[1].max(), float("nan")), "NaN"),
        (lambda s: s + 0.5, r"outside \[0, 1\]"),
        (lambda s: s - 0.5, r"outside \[0, 1\]"),
        (lambda s: torch.stack([s[0], torch.eye(6)]), "layer 1 is the identity"),
    ],
)
def test_similarity_values_that_are_refused(tmp_path: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    save_similarity(tmp_path / "s.safetensors", change(matrices()), MADE)
    with pytest.raises(CalibrationError, match=words):
        load_similarity(tmp_path / "s.safetensors", layers=2, experts=6)


def test_similarity_of_another_model_is_refused(similarity_file: Path) -> None:
    with pytest.raises(CalibrationError, match=r"made for model a{12}, but this one is c{12}"):
        load_similarity(similarity_file, layers=2, experts=6, model_hash="c" * 64)
    with pytest.raises(CalibrationError, match=r"shape \[2, 6, 6\], but this model needs \[3, 6"):
        load_similarity(similarity_file, layers=3, experts=6)
    with pytest.raises(CalibrationError, match=r"needs \[2, 8, 8\]"):
        load_similarity(similarity_file, layers=2, experts=8)


def test_layers_have_to_be_the_models_own(tmp_path: Path, similarity_file: Path) -> None:
    sizes = {"layers": 2, "experts": 6}
    load_similarity(similarity_file, **sizes, layer_indices=(0, 2))
    with pytest.raises(
        CalibrationError, match=r"is of layers \[0, 2\]; layers \[1\] of this model"
    ):
        load_similarity(similarity_file, **sizes, layer_indices=(0, 1))
    with pytest.raises(
        CalibrationError, match=r"layers are missing, or it belongs to another model"
    ):
        load_similarity(similarity_file, layers=3, experts=6)
    marks = tmp_path / "p"
    save_protection(marks, torch.zeros(2, 4), MADE)
    with pytest.raises(CalibrationError, match=r"layers \[1\] of this model are missing; write it"):
        load_protection(marks, layers=2, experts=4, layer_indices=(1, 2))


@pytest.mark.parametrize(
    "said", [None, "", "0 2", "[0]", "[0, 0]", "[2, 0]", "[0, 1.0]", "2", "[]"]
)
def test_a_file_has_to_say_which_layer_each_matrix_is_of(tmp_path: Path, said: str | None) -> None:
    metadata = {"format_version": "1"} | ({} if said is None else {"layer_indices": said})
    save_file({"similarity": matrices()}, tmp_path / "s", metadata=metadata)
    with pytest.raises(
        CalibrationError, match=r"names the layers .* for its 2 matrices; calibrate"
    ):
        load_similarity(tmp_path / "s", layers=2, experts=6)


def test_a_cure_is_a_command(tmp_path: Path, similarity_file: Path) -> None:
    with pytest.raises(CalibrationError, match=r"harness.calibrate similarity model=… data=…"):
        load_similarity(similarity_file, layers=2, experts=6, model_hash="c" * 64)
    with pytest.raises(
        CalibrationError, match=r"make it with .*harness.calibrate protection model="
    ):
        load_protection(tmp_path / "none", layers=2, experts=6)


def test_files_that_are_something_else(tmp_path: Path, similarity_file: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file"):
        load_similarity(tmp_path / "none", layers=2, experts=6)
    (tmp_path / "text").write_text("hello, this is no tensor file")
    with pytest.raises(CalibrationError, match="not a safetensors file"):
        load_similarity(tmp_path / "text", layers=2, experts=6)
    with pytest.raises(CalibrationError, match=r"holds \['similarity'\], not 'protection'"):
        load_protection(similarity_file, layers=2, experts=6)
    save_file({"similarity": matrices()}, tmp_path / "bare")
    with pytest.raises(CalibrationError, match="format version None"):
        load_similarity(tmp_path / "bare", layers=2, experts=6)


def test_protection_round_trip_and_refusals(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    marks = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    save_protection(path, marks, MADE)
    read = load_protection(path, layers=2, experts=4, model_hash="a" * 64)
    assert read.dtype == torch.uint8
    assert torch.equal(read.bool(), marks)
    with pytest.raises(CalibrationError, match=r"needs \[2, 8\]"):
        load_protection(path, layers=2, experts=8)
    with pytest.raises(CalibrationError, match="made for model"):
        load_protection(path, layers=2, experts=4, model_hash="f" * 64)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"expected \[layers, E, E\]"):
        save_similarity(path, torch.ones(2, 3, 4), MADE)
    with pytest.raises(ValueError, match=r"expected \[layers, E\]"):
        save_protection(path, torch.ones(2), MADE)
    with pytest.raises(ValueError, match="only 0 and 1"):
        save_protection(path, torch.tensor([[0, 2], [0, 1]]), MADE)
    with pytest.raises(ValueError, match=r"increases: \[2, 3\] for \[2, 2\] experts"):
        save_protection(path, torch.zeros(2, 2), MADE, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="layer_indices: 2 for 3 layers"):
        save_similarity(path, torch.rand(3, 4, 4), MADE)
    assert not path.exists()
