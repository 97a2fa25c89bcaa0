"""What is not published: weights of another model, over files that are no checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.pocket.network import Network
from harness.pocket.publish import refusal
from harness.pocket.recipe import Recipe


def test_right_weights_go_where_nothing_else_is_lost(tmp_path: Path) -> None:
    weights = Network(Recipe()).state_dict()
    assert refusal(weights, tmp_path / "new") is None
    assert refusal(weights, tmp_path) is None
    (tmp_path / "thesis.txt").write_text("mine")
    assert "no checkpoint of ours" in (refusal(weights, tmp_path) or "")
    assert "is no folder" in (refusal(weights, tmp_path / "thesis.txt") or "")
    (tmp_path / "manifest.json").write_text("{}")
    assert refusal(weights, tmp_path) is None


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    weights = dict(Network(Recipe()).state_dict())
    name = "lm_head.weight"
    assert "another model" in (refusal(weights | {name: torch.zeros(2, 2)}, tmp_path) or "")
    assert "hold weight" in (refusal(weights | {"weight": torch.zeros(1)}, tmp_path) or "")
    del weights[name]
    assert f"lack {name}" in (refusal(weights, tmp_path) or "")
