"""What a checkpoint folder says of its vision encoder, and settings that it cannot have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from harness.engine.checkpoint import Checkpoint, read_checkpoint
from harness.help import conf_folder, groups
from harness.pocket.model import ensure
from harness.prepare import prepare
from harness.settings import Settings, SettingsError
from harness.workload import Workload

pytestmark = pytest.mark.engine
"""Transformers, which the engine brings, writes the checkpoint."""


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A Qwen2.5-VL whose encoder has four layers; 1 and 3 attend to whole images."""
    from tests.engine import families

    return read_checkpoint(families.qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl")))


def test_layers_that_attend_to_whole_images_are_known(windowed: Checkpoint) -> None:
    assert windowed.architecture == "Qwen2_5_VLForConditionalGeneration"
    assert windowed.whole_image_layers == (1, 3)
    assert [layer for layer in range(-4, 4) if windowed.scores_in(layer)] == [-3, -1, 1, 3]


def test_where_none_are_named_all_are() -> None:
    pocket = read_checkpoint(ensure())
    assert pocket.whole_image_layers is None
    assert all(pocket.scores_in(layer) for layer in range(-6, 6))


def settings(folder: Path, **vision: Any) -> Settings:
    conf = conf_folder()
    tree = {
        g.name: yaml.safe_load((conf / g.name / f"{g.choices[0]}.yaml").read_text())
        for g in groups(conf)
    }
    tree["model"]["path"] = str(folder)
    tree["routing"] |= {"policy": "off"}
    tree["vision"] |= vision
    return Settings.from_tree(tree)


def refusals(folder: Path, **vision: Any) -> str:
    """What `prepare` says against these settings; empty if nothing."""
    asked = settings(folder, **vision)
    text: Any = SimpleNamespace(images=())
    try:
        prepare([asked], {asked.workload: Workload((text,), (), "0" * 64)})
    except SettingsError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("layer", [0, 2, -2, -4])
def test_a_window_layer_is_refused_before_anything_starts(windowed: Checkpoint, layer: int) -> None:
    said = refusals(windowed.path, retain_ratio=0.5, layer=layer)
    assert said == (
        f"vision.layer={layer}: that layer of the vision encoder attends within windows; takes one "
        "of 1, 3"
    )


@pytest.mark.parametrize(
    "vision",
    [
        {"retain_ratio": 0.5, "layer": 1},
        {"retain_ratio": 0.5, "layer": -1},
        {"retain_ratio": 1.0, "layer": 0},
        {"retain_ratio": 0.5, "layer": 0, "policy": "random"},
    ],
)
def test_a_layer_that_scores_nothing_or_whole_images_is_taken(
    windowed: Checkpoint, vision: dict[str, Any]
) -> None:
    assert refusals(windowed.path, **vision) == ""
