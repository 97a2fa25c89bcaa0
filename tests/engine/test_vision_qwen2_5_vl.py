"""The vision lever in Qwen2.5-VL, whose encoder works in windows: a tiny random model, fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.engine import families
from tests.engine.comparing import SCORE_TIE, is_tie, together
from tests.engine.families import asked
from tests.engine.oracle import Expected, Oracle
from tests.engine.requests_under_test import (
    Answer,
    Conversation,
    Endpoint,
    Refused,
    ask,
    kept_images,
    rpc,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def stock_answers(server_with: Any, folder: Path) -> list[tuple[Conversation, Answer]]:
    with server_with(plugin=False, model_path=folder) as stock:
        return [(c, ask(stock, c.messages, TOKENS)) for c in asked(range(400, 412))]


@pytest.fixture(scope="module")
def server(server_with: Any, folder: Path, stock_answers: object) -> Iterator[Endpoint]:
    """With the plugin; started after the other one has ended."""
    with server_with(plugin=True, model_path=folder) as server:
        yield server


def test_an_idle_plugin_changes_nothing(
    server: Endpoint, stock_answers: list[tuple[Conversation, Answer]]
) -> None:
    assert rpc(server, "pruneroute_describe")["model_class"] == "GroupQwen25VL"
    assert families.is_varied([c for c, _ in stock_answers])
    for c, want in stock_answers:
        got = ask(server, c.messages, TOKENS, retain_ratio=1.0)
        assert got.ids == want.ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
        assert got.prompt_tokens == want.prompt_tokens


SETTINGS: tuple[dict[str, Any], ...] = (
    {"retain_ratio": 0.5},
    {"retain_ratio": 0.5, "budget": "raw", "layer": 1},
    {"retain_ratio": 0.3, "layer": -3},
    {"retain_ratio": 0.3, "budget": "raw"},
    {"retain_ratio": 0.4, "merge": "contextual", "contextual_share": 0.25},
)


def test_pruned_answers_are_the_oracles(server: Endpoint, oracle: Oracle) -> None:
    conversations = asked(range(420, 432))
    assert families.is_varied(conversations)
    cases = [
        (c, f"{i}-{n}", s) for i, c in enumerate(conversations) for n, s in enumerate(SETTINGS)
    ]
    answers = together(
        lambda case: ask(server, case[0].messages, TOKENS, request_id=case[1], **case[2]), cases
    )
    counts = kept_images(server)
    ties = 0
    for (c, name, s), got in zip(cases, answers, strict=True):
        want = oracle.answer(
            oracle.encode(c.messages, c.images, s.get("layer", -1)),
            TOKENS,
            str(s["retain_ratio"]),
            budget=s.get("budget", "log_excess"),
            merged=s.get("contextual_share", 0.0),
        )
        ties += is_tie(got, want)
        assert want.margin < SCORE_TIE or counts[name] == want.images
    print(f"{len(cases)} answers, {ties} parted at a near-tie")
    assert ties <= 3


def test_a_window_layer_is_refused_and_the_server_lives_on(server: Endpoint) -> None:
    c = asked(range(420, 421))[0]
    for layer in (0, 2, -2, -4):
        with pytest.raises(Refused, match=f"layer={layer}: that layer .* windows.*: 1, 3") as error:
            ask(server, c.messages, 1, retain_ratio=0.5, layer=layer)
        assert error.value.status == 400
        # Where nothing is scored, the layer is not read.
        ask(server, c.messages, 1, retain_ratio=0.5, layer=layer, policy="grid")
    assert ask(server, c.messages, 1, retain_ratio=0.5, layer=-3).ids


def test_a_request_beyond_the_context_is_refused_and_the_server_lives_on(server: Endpoint) -> None:
    """By vLLM's own check, which counts the tokens that stay."""
    c = families.asked(range(440, 441), images_per_turn=(8,), turns=(1,), sizes=((600, 500),))[0]
    filler = {"type": "text", "text": "x" * 2_500}
    messages = [{"role": "user", "content": [*c.messages[-1]["content"], filler]}]
    for settings in ({}, {"retain_ratio": 0.9}):
        with pytest.raises(Refused, match="maximum context length") as error:
            ask(server, messages, 1, **settings)
        assert error.value.status == 400
    assert ask(server, messages, 1, retain_ratio=0.5).prompt_tokens < 4096
    many = [{"role": "user", "content": c.messages[-1]["content"] * 2}]
    with pytest.raises(Refused, match=r"At most 12 image\(s\)") as error:
        ask(server, many, 1, retain_ratio=0.2)
    assert error.value.status == 400
    assert ask(server, asked(range(1))[0].messages, 1, retain_ratio=0.5).ids


def furthest(got: Expected, want: Expected) -> float:
    """Largest difference of log-probabilities."""
    return max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))


def test_the_oracle_can_tell(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens, other places, scores or keys in the order of windows: each gives another answer."""
    setting: dict[str, Any] = {"retain_ratio": "0.5", "merged": 0.25}
    conversations = asked(range(420, 432))
    right = [oracle.encode(c.messages, c.images) for c in conversations]

    def as_they_come(_self: Oracle, values: Tensor, _grid: list[int]) -> Tensor:
        return values

    monkeypatch.setattr(Oracle, "_in_rows", as_they_come)
    left = [oracle.encode(c.messages, c.images) for c in conversations]
    changed = dict.fromkeys(("worst", "flat", "scores", "keys"), 0)
    for good, bad in zip(right, left, strict=True):
        want = oracle.answer(good, TOKENS, **setting)
        wrong = {
            "worst": families.worst_kept(good),
            "flat": families.flat_positions(good),
            "scores": dataclasses.replace(good, scores=bad.scores),
            "keys": dataclasses.replace(good, keys=bad.keys),
        }
        for name, prompt in wrong.items():
            changed[name] += furthest(oracle.answer(prompt, TOKENS, **setting), want) > 0.01
    print(changed)
    assert min(changed.values()) >= 8, changed
