"""Every supported vLLM has what the plugin relies on: held against facts read from their sources."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from harness.engine.command import vllm_version
from tests.engine.releases.needs import NEEDS, Facts, Takes, facts_of, failures
from tests.engine.releases.sources import Sources

FOLDER = Path(__file__).parent / "releases"
ROOT = Path(__file__).parents[2]
SUPPORTED = (
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)


def read(version: str) -> Facts:
    facts: Facts = json.loads((FOLDER / f"vllm-{version}.json").read_text())
    return facts


@functools.cache
def ours() -> Sources:
    return Sources(ROOT)


@functools.cache
def installed() -> Facts:
    """Of the sources that are installed here."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    facts: Facts = json.loads(json.dumps(facts_of(Sources(Path(spec.origin).parents[1]))))
    return facts


def test_there_are_facts_of_every_supported_release() -> None:
    assert sorted(p.stem.removeprefix("vllm-") for p in FOLDER.glob("*.json")) == list(SUPPORTED)


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_release_has_what_the_plugin_relies_on(version: str) -> None:
    assert failures(read(version), ours()) == []


@pytest.mark.engine
def test_the_installed_release_is_as_its_facts_say() -> None:
    """So the reader reads right, and the file is not stale."""
    assert failures(installed(), ours()) == []
    version = (vllm_version() or "").split("+")[0]
    if version not in SUPPORTED:
        pytest.skip(f"vLLM {version} is no release that is supported")
    assert installed() == read(version)


def test_a_difference_would_show() -> None:
    """Each kind of need fails when what it needs is gone."""
    facts = read("0.32.0")
    for need in NEEDS:
        asked = [k for k in facts if k in _questions(need)]
        assert asked
        broken: dict[str, Any] = dict(facts)
        for question in asked:
            kind = question.split()[0]
            broken[question] = {"exists": False, "signature": None, "returns": question}.get(
                kind, []
            )
        assert need.failures(broken, ours()), need


def _questions(need: Any) -> set[str]:
    return set(need.facts(Sources(Path("nowhere"))))


def test_a_renamed_parameter_would_show() -> None:
    facts = read("0.32.0")
    tower = "vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VisionTransformer.forward"
    signature = [[n.replace("grid_thw", "grids"), k, d] for n, k, d in facts[f"signature {tower}"]]
    changed = facts | {f"signature {tower}": signature}
    assert any("grids" in f for f in failures(changed, ours()))
    assert Takes(tower, 1, ("grid_thw",)).failures(facts, ours()) == []
