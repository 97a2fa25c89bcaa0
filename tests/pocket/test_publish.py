"""What is not published: weights of another model, over files that are no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.pocket.model import FOLDER
from harness.pocket.network import Network
from harness.pocket.publish import refusal
from harness.pocket.recipe import Recipe
from harness.pocket.weights import misfit, read_weights


def test_nothing_else_is_replaced(tmp_path: Path) -> None:
    assert refusal(tmp_path / "new") is None
    assert refusal(tmp_path) is None
    assert refusal(FOLDER) is None
    (tmp_path / "thesis.txt").write_text("mine")
    assert "is no folder" in (refusal(tmp_path / "thesis.txt") or "")
    for manifest in ("", "{}", "[1]", '{"OCRBench.json": 3}'):  # the last is a data set's
        (tmp_path / "manifest.json").write_text(manifest)
        assert "no checkpoint of ours" in (refusal(tmp_path) or "")
    (tmp_path / "manifest.json").write_text('{"README.md": 1, "model.safetensors": 2}')
    assert "also holds thesis.txt" in (refusal(tmp_path) or "")
    (tmp_path / "thesis.txt").unlink()
    assert refusal(tmp_path) is None


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    weights = dict(Network(Recipe()).state_dict())
    assert misfit(weights) is None
    name = "lm_head.weight"
    assert "another model" in (misfit(weights | {name: torch.zeros(2, 2)}) or "")
    assert "hold weight" in (misfit(weights | {"weight": torch.zeros(1)}) or "")
    del weights[name]
    assert f"lack {name}" in (misfit(weights) or "")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match="is no safetensors file"):
        read_weights(file)
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"model.safetensors: the weights lack"):
        read_weights(file)
