"""The routing lever on a live server: what it moves, what it leaves alone, what it refuses."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.calibration import SIMILARITY_FILE
from harness.pocket.model import FOLDER, ensure
from tests.engine.comparing import is_tie, together
from tests.engine.oracle import Oracle, Routing, Sere, Topk
from tests.engine.requests_under_test import (
    Answer,
    Conversation,
    Endpoint,
    Refused,
    ask,
    conversation,
    rpc,
    set_routing,
    text_only,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = 12
LAYERS, EXPERTS, TOP_K = 4, 32, 8
SIMILARITY = str(FOLDER / SIMILARITY_FILE)


@pytest.fixture(scope="module")
def server(plugin_server: Endpoint) -> Iterator[Endpoint]:
    ask(plugin_server, text_only(0).messages, 1)  # levers can be set after the first step
    yield plugin_server
    assert set_routing(plugin_server, "off") is None


@pytest.fixture(scope="module")
def similarity(server: Endpoint) -> torch.Tensor:
    return load_file(SIMILARITY)["similarity"]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(ensure())


def protection_file(path: Path, experts: set[tuple[int, int]]) -> str:
    """A protection file in which these (layer, expert) pairs are marked."""
    matrix = torch.zeros(LAYERS, EXPERTS, dtype=torch.uint8)
    for layer, expert in experts:
        matrix[layer, expert] = 1
    metadata = {"format_version": "1", "layer_indices": json.dumps(list(range(LAYERS)))}
    save_file({"protection": matrix}, path, metadata=metadata)
    return str(path)


def mixed(seed: int) -> Conversation:
    """Every third without images."""
    return text_only(seed) if seed % 3 == 0 else conversation(seed)


def said(server: Endpoint, seeds: range) -> list[list[int]]:
    """Greedy answers, one after the other."""
    return [ask(server, mixed(s).messages, TOKENS, retain_ratio=0.5).ids for s in seeds]


def said_exactly(server: Endpoint) -> tuple[list[int], list[float]]:
    """One greedy answer with its log-probabilities."""
    answer = ask(server, mixed(801).messages, TOKENS, retain_ratio=0.5)
    return answer.ids, [round(p, 4) for p in answer.logprobs]


def means(server: Endpoint) -> dict[str, float]:
    """Means over the requests since the last look."""
    requests = list(rpc(server, "pruneroute_drain")["requests"].values())
    return {key: sum(r[key] for r in requests) / len(requests) for key in requests[0]}


def test_every_layer_of_the_model_is_held(server: Endpoint) -> None:
    before = rpc(server, "pruneroute_describe")
    ask(server, text_only(1).messages, 3)
    after = rpc(server, "pruneroute_describe")
    routing = after["routing"]
    assert routing["refusal"] is None
    assert routing["layers"] == list(range(LAYERS))
    assert (routing["experts"], routing["top_k"]) == (EXPERTS, TOP_K)
    assert after["model_class"] == "GroupQwen3VLMoe"
    assert after["vision"]["hooked"]
    calls = zip(before["routing"]["calls"], routing["calls"], strict=True)
    assert [b - a for a, b in calls] == [3] * LAYERS


def test_settings_that_must_change_nothing(server: Endpoint, tmp_path: Path) -> None:
    seeds = range(400, 406)
    assert set_routing(server, "off") is None
    want = said(server, seeds)
    everything = {(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)}
    protect_all = protection_file(tmp_path / "all.safetensors", everything)
    idle: list[dict[str, Any]] = [
        {"policy": "sere", "primary_experts": TOP_K, "similarity_threshold": 0.0},
        {"policy": "sere", "primary_experts": 50, "similarity_threshold": 0.0},
        {"policy": "sere", "primary_experts": None, "similarity_threshold": 0.0},
        {"policy": "topk", "primary_experts": TOP_K},
        {"policy": "sere", "primary_experts": 1, "similarity_threshold": 1.0},
        # Without a file no expert is like any other.
        {
            "policy": "sere",
            "primary_experts": 1,
            "similarity_threshold": 0.1,
            "similarity_path": None,
        },
        {
            "policy": "sere",
            "primary_experts": 1,
            "similarity_threshold": 0.0,
            "protection_path": protect_all,
        },
    ]
    for setting in idle:
        rpc(server, "pruneroute_drain")
        assert set_routing(server, **{"similarity_path": SIMILARITY, **setting}) is None
        assert said(server, seeds) == want, setting
        assert means(server)["slots_moved"] == 0
    # The lever does act at such settings once nothing holds it back.
    assert set_routing(server, "sere", 1, 0.0, similarity_path=SIMILARITY) is None
    moved = said(server, seeds)
    assert sum(a != b for a, b in zip(moved, want, strict=True)) >= 5
    # Decode only: the first token comes out of prefill.
    assert [a[0] for a in moved] == [b[0] for b in want]
    assert means(server)["slots_moved"] == TOP_K - 1


@pytest.mark.parametrize(
    ("policy", "seeds"), [("sere", range(500, 524)), ("topk", range(524, 534))]
)
def test_answers_of_one_request_at_a_time_are_the_oracles(
    server: Endpoint,
    oracle: Oracle,
    similarity: torch.Tensor,
    tmp_path: Path,
    policy: str,
    seeds: range,
) -> None:
    ties, closest, changed = 0, [], []
    for seed in seeds:
        r = Random(seed)
        c = mixed(seed)
        primary, threshold = r.choice([1, 2, 3, 5]), r.choice([0.0, 0.3, 0.5, 0.7])
        renormalize = r.random() < 0.5
        protected = {(r.randrange(LAYERS), r.randrange(EXPERTS)) for _ in range(40 * (seed % 2))}
        setting: dict[str, Any] = {"policy": policy, "primary_experts": primary}
        routing: Routing
        if policy == "sere":
            path = protection_file(tmp_path / f"{seed}.safetensors", protected)
            setting |= {
                "similarity_threshold": threshold,
                "similarity_path": SIMILARITY,
                "protection_path": path,
            }
            routing = Sere(similarity, primary, threshold, frozenset(protected))
        else:
            setting |= {"renormalize": renormalize}
            routing = Topk(primary, renormalize)
        assert set_routing(server, **setting) is None
        got = ask(server, c.messages, TOKENS, retain_ratio=0.5)
        prompt = oracle.encode(c.messages, c.images)
        want = oracle.answer(prompt, TOKENS, "0.5", routing=routing)
        ties += is_tie(got, want)
        closest.append((min(want.gaps), want.margin, min(want.route_gaps)))
        if seed % 3 == 0:
            plain = oracle.answer(prompt, TOKENS, "0.5")
            differences = zip(want.logprobs, plain.logprobs, strict=True)
            changed.append(max(abs(a - b) for a, b in differences) > 0.01)
    print(f"{len(seeds)} answers, {ties} parted at a near-tie")
    print("closest calls (token, vision token, expert):", *map(min, zip(*closest, strict=True)))
    assert ties <= 1
    assert sum(changed) > len(changed) / 2


def crowd(server: Endpoint, seeds: range, label: str) -> list[Answer]:
    return together(
        lambda s: ask(server, mixed(s).messages, 24, request_id=f"{label}-{s}", retain_ratio=0.5),
        seeds,
        at_once=8,
    )


def test_a_batch_reads_fewer_experts(server: Endpoint) -> None:
    seeds = range(600, 616)
    seen: dict[str, dict[str, float]] = {}
    for name, setting in {
        "off": {"policy": "off"},
        "K2": {"policy": "sere", "primary_experts": 2, "similarity_threshold": 0.3},
        "K1": {"policy": "sere", "primary_experts": 1, "similarity_threshold": 0.0},
        "top1": {"policy": "topk", "primary_experts": 1},
    }.items():
        assert set_routing(server, **{"similarity_path": SIMILARITY, **setting}) is None  # type: ignore[arg-type]
        rpc(server, "pruneroute_drain")
        crowd(server, seeds, name)
        drained = rpc(server, "pruneroute_drain")
        assert drained["lost"] == 0
        _check_steps(drained, name)
        requests = list(drained["requests"].values())
        assert len(requests) == len(seeds)
        assert {r["steps"] for r in requests} == {23}
        seen[name] = {k: sum(r[k] for r in requests) / len(requests) for k in requests[0]}
    assert seen["off"]["batch_size"] > 1.5
    assert seen["off"]["experts_before"] == seen["off"]["experts_after"] > TOP_K
    assert seen["off"]["slots_moved"] == 0
    assert seen["K2"]["slots_moved"] > 0
    assert seen["K2"]["experts_after"] < 0.9 * seen["K2"]["experts_before"]
    assert seen["K1"]["experts_after"] < seen["K2"]["experts_after"]
    assert seen["top1"]["experts_after"] <= seen["top1"]["batch_size"]


def _check_steps(drained: dict[str, Any], name: str) -> None:
    """Counters of every step and layer keep within what the batch allows."""
    steps = np.load(io.BytesIO(base64.b64decode(drained["steps"])))
    rows = steps["decode_rows"][:, None]
    before, after, moved = (steps[k] for k in ("experts_before", "experts_after", "slots_moved"))
    assert before.shape == (len(rows), LAYERS)
    assert (np.diff(steps["at_s"]) >= 0).all()
    assert (rows >= 1).all()
    assert (before >= TOP_K).all()
    assert (before <= np.minimum(EXPERTS, TOP_K * rows)).all()
    assert (after >= 1).all()
    assert (after <= before).all()
    assert (moved <= (TOP_K - 1) * rows).all()
    if name == "off":
        assert (after == before).all()
    if name == "top1":
        assert (after <= rows).all()
        assert (moved == (TOP_K - 1) * rows).all()
    if name == "K1":  # no threshold: only what a prefill reads anyway stays where it is
        alone = (steps["prefill_rows"] == 0)[:, None]
        assert (after <= rows)[np.broadcast_to(alone, after.shape)].all()


def test_policies_switch_while_answers_are_being_written(server: Endpoint) -> None:
    r = Random(0)
    assert set_routing(server, "off") is None
    want = said(server, range(700, 704))
    settings: list[dict[str, Any]] = [
        {"policy": "off"},
        {"policy": "sere", "primary_experts": 1, "similarity_threshold": 0.0},
        {"policy": "sere", "primary_experts": 2, "similarity_threshold": 0.5},
        {"policy": "topk", "primary_experts": 1, "renormalize": False},
    ]

    def either(i: int) -> Answer | str | None:
        if i % 2:
            return set_routing(server, similarity_path=SIMILARITY, **r.choice(settings))
        return ask(server, mixed(710 + i).messages, 40, retain_ratio=0.5)

    for i, result in enumerate(together(either, range(60), at_once=8)):
        if i % 2:
            assert result is None
        else:
            assert isinstance(result, Answer)
            assert len(result.ids) == 40
    assert set_routing(server, "off") is None
    assert said(server, range(700, 704)) == want


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory, similarity: torch.Tensor) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("matrices")
    metadata = {"format_version": "1", "layer_indices": "[0, 1, 2]"}
    broken = similarity.clone()
    broken[1, 2, 3] = float("nan")
    save_file({"similarity": similarity[:3].clone()}, folder / "layers", metadata=metadata)
    save_file({"similarity": similarity[:, :5, :5].clone()}, folder / "experts", metadata=metadata)
    save_file({"similarity": broken}, folder / "nan", metadata=metadata)
    save_file({"protection": torch.ones(LAYERS, 7)}, folder / "short", metadata=metadata)
    (folder / "text").write_text("no matrix at all")
    return {p.name: str(p) for p in folder.iterdir()} | {"missing": str(folder / "missing")}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "policy": ({"policy": "fastest"}, "policy 'fastest': one of off, topk, sere"),
    "K=0": ({"primary_experts": 0}, "primary_experts 0"),
    "K=1.5": ({"primary_experts": 1.5}, "primary_experts 1.5"),
    "rho=2": ({"similarity_threshold": 2}, "similarity_threshold 2"),
    "missing": ({"similarity_path": "missing"}, "no such file"),
    "layers": ({"similarity_path": "layers"}, "shape [3, 32, 32], but this model needs"),
    "experts": ({"similarity_path": "experts"}, "shape [4, 5, 5]"),
    "nan": ({"similarity_path": "nan"}, "layer 1 holds NaN"),
    "text": ({"similarity_path": "text"}, "not a safetensors file"),
    "short": ({"protection_path": "short"}, "shape [4, 7]"),
    "no protection": ({"protection_path": "missing"}, "no such file"),
}


GOOD: dict[str, Any] = {
    "policy": "sere",
    "primary_experts": 1,
    "similarity_threshold": 0.3,
    "similarity_path": SIMILARITY,
}


def test_a_good_setting_shows(server: Endpoint) -> None:
    """The answer by which the next test tells whether a refused setting left something behind."""
    said_by = []
    for change in ({}, {"policy": "off"}, {"similarity_path": None}):
        assert set_routing(server, **{**GOOD, **change}) is None
        said_by.append(said_exactly(server))
    assert said_by[0] not in said_by[1:]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_setting_is_refused_and_changes_nothing(
    server: Endpoint, bad_files: dict[str, str], name: str
) -> None:
    """A refused setting must not leave half of itself behind: no matrix, say, and the old K."""
    assert set_routing(server, **GOOD) is None
    want = said_exactly(server)
    change, complaint = BAD[name]
    files = {key: bad_files[file] for key, file in change.items() if key.endswith("_path")}
    error = set_routing(server, **{**GOOD, "similarity_path": None, **change, **files})
    assert error is not None
    assert complaint in error
    assert said_exactly(server) == want


@pytest.mark.parametrize("setting", ["{}", "no JSON", "[1, 2]"])
def test_nonsense_is_an_error_and_the_server_lives_on(server: Endpoint, setting: str) -> None:
    with pytest.raises(Refused):
        rpc(server, "pruneroute_set_routing", setting)
    assert len(ask(server, text_only(1).messages, 2).ids) == 2
