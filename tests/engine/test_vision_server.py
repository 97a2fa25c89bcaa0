"""The vision lever on a live server: idle it changes nothing, pulled it follows the oracle."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from harness.pocket.model import ensure
from tests.engine.comparing import SCORE_TIE, is_tie, together
from tests.engine.oracle import Oracle, Prompt
from tests.engine.requests_under_test import (
    Answer,
    Conversation,
    Endpoint,
    Refused,
    ask,
    conversation,
    kept_images,
    set_routing,
    text_only,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = 12
RATIOS = ("0.8", "0.5", "0.3", "0.2")


@pytest.fixture(scope="module")
def stock_answers(server_with: Any) -> list[tuple[Conversation, Answer]]:
    """What the server says without the plugin. It ends here: an idle server takes a core."""
    asked = [conversation(s) for s in range(100, 126)] + [text_only(s) for s in range(126, 132)]
    with server_with(plugin=False) as stock:
        return [(c, ask(stock, c.messages, TOKENS)) for c in asked]


@pytest.fixture(scope="module")
def server(stock_answers: object, plugin_server: Endpoint) -> Endpoint:
    """The server with the plugin, routing off; started after the other one has ended."""
    ask(plugin_server, text_only(0).messages, 1)  # levers can be set after the first step
    assert set_routing(plugin_server, "off") is None
    return plugin_server


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(ensure())


def test_an_idle_plugin_changes_nothing(
    server: Endpoint, stock_answers: list[tuple[Conversation, Answer]]
) -> None:
    """Keeping all, the fused group must be what the images were one by one, to the last token."""
    asked = [c for c, _ in stock_answers]
    assert {len(c.images) for c in asked} >= {0, 1, 2, 3, 5}
    assert sum(len(c.messages) > 2 for c in asked) >= 5
    assert {i.width > i.height for c in asked for i in c.images} == {True, False}
    for i, (c, want) in enumerate(stock_answers):
        for settings in ({"retain_ratio": 1.0}, *([{}] if i % 4 == 0 else [])):
            got = ask(server, c.messages, TOKENS, **settings)
            assert got.ids == want.ids
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
            assert got.prompt_tokens == want.prompt_tokens


def test_pruned_answers_are_the_oracles(server: Endpoint, oracle: Oracle) -> None:
    """68 answers to 30 conversations, with others in the batch; `test_vision_two_pass` asks more."""
    asked = [conversation(seed) for seed in range(30)]
    cases = [
        (c, f"oracle-{i}-{ratio}", ratio, "log_excess")
        for i, c in enumerate(asked)
        for ratio in (RATIOS[i % 2], RATIOS[2 + i % 2])
    ]
    cases += [(c, f"oracle-{i}-raw", "0.5", "raw") for i, c in enumerate(asked[::4])]
    answers = together(
        lambda case: ask(
            server,
            case[0].messages,
            TOKENS,
            request_id=case[1],
            retain_ratio=float(case[2]),
            budget=case[3],
        ),
        cases,
    )
    counts = kept_images(server)
    prompts = {id(c): oracle.encode(c.messages, c.images) for c in asked}
    ties, closest = 0, []
    for (c, name, ratio, budget), got in zip(cases, answers, strict=True):
        want = oracle.answer(prompts[id(c)], TOKENS, ratio, budget=budget)
        ties += is_tie(got, want)
        assert want.margin < SCORE_TIE or counts[name] == want.images
        assert _total(counts[name]) == _total(want.images)
        closest.append((min(want.gaps), want.margin, min(want.route_gaps)))
    print(f"{len(cases)} answers, {ties} parted at a near-tie")
    print("closest calls (token, vision token, expert):", *map(min, zip(*closest, strict=True)))
    assert ties <= 3
    # The budget follows the content: images of one size do not all keep the same share.
    same_ratio = [images for (_, _, r, _), images in _pairs(cases, counts) if r == "0.5"]
    assert any(_moved(images, 0.5) >= 3 for images in same_ratio)


def _total(images: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(b for b, _ in images), sum(a for _, a in images)


Case = tuple[Conversation, str, str, str]


def _pairs(
    cases: list[Case], counts: dict[str, list[tuple[int, int]]]
) -> list[tuple[Case, list[tuple[int, int]]]]:
    return [(case, counts[case[1]]) for case in cases]


def _moved(images: list[tuple[int, int]], ratio: float) -> float:
    """By how many tokens some image's share differs from what its size alone would give it."""
    return max(abs(after - ratio * before) for before, after in images)


def test_the_floor_and_the_scoring_layer_are_obeyed(server: Endpoint, oracle: Oracle) -> None:
    ties, differing = 0, 0
    for seed in range(200, 208):
        c = conversation(seed, images_per_turn=(2, 3, 5))
        layer, floor = (seed % 3) - 3, 1 + seed % 4
        name = f"floor-{seed}"
        got = ask(
            server,
            c.messages,
            TOKENS,
            request_id=name,
            retain_ratio=0.2,
            min_tokens_per_image=floor,
            layer=layer,
        )
        want = oracle.answer(oracle.encode(c.messages, c.images, layer), TOKENS, "0.2", floor=floor)
        ties += is_tie(got, want)
        assert kept_images(server)[name] == want.images
        assert all(after >= min(before, floor) for before, after in want.images)
        differing += got.ids != ask(server, c.messages, TOKENS, retain_ratio=0.2).ids
    assert ties <= 1
    assert differing >= 4


def _worst_kept(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, scores=-prompt.scores)


def _flat_positions(prompt: Prompt) -> Prompt:
    line = torch.arange(len(prompt.ids))
    return dataclasses.replace(prompt, positions=line.expand(3, -1))


def _no_deepstack(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, deepstack=[torch.zeros_like(d) for d in prompt.deepstack])


def test_the_oracle_can_tell(oracle: Oracle) -> None:
    """With other tokens kept, at other places, or without DeepStack, the answer is another."""
    wrong = (_worst_kept, _flat_positions, _no_deepstack)
    changed = dict.fromkeys(wrong, 0)
    for seed in range(8):
        c = conversation(seed)
        prompt = oracle.encode(c.messages, c.images)
        right = oracle.answer(prompt, TOKENS, "0.5")
        for way in wrong:
            other = oracle.answer(way(prompt), TOKENS, "0.5")
            differences = zip(other.logprobs, right.logprobs, strict=True)
            changed[way] += max(abs(a - b) for a, b in differences) > 0.1
    assert min(changed.values()) >= 6, changed


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"retain_ratio": 0}, "retain_ratio=0 must be"),
        ({"retain_ratio": 1.5}, "retain_ratio=1.5 must be"),
        ({"retain_ratio": "half"}, "retain_ratio='half' must be"),
        ({"retain_ratio": 0.5, "min_tokens_per_image": -1}, "min_tokens_per_image=-1 must"),
        ({"retain_ratio": 0.5, "layer": 99}, "layer=99: the vision encoder has layers 0 to 5"),
    ],
)
def test_a_wrong_setting_is_refused_and_the_server_lives_on(
    server: Endpoint, settings: dict[str, object], match: str
) -> None:
    c = conversation(3)
    with pytest.raises(Refused, match=match) as refused:
        ask(server, c.messages, 2, **settings)
    assert refused.value.status == 400
    assert len(ask(server, c.messages, 2, retain_ratio=0.5).ids) == 2


@pytest.mark.parametrize("ratio", ["0.7", "0.35", "0.9", "0.001"])
def test_the_budget_is_the_exact_decimal_of_each_turn(server: Endpoint, ratio: str) -> None:
    c = conversation(11, images_per_turn=(2, 3), turns=(2,))
    name = f"exact-{ratio}"
    ask(server, c.messages, 1, request_id=name, retain_ratio=float(ratio))
    images = kept_images(server)[name]
    numerator, places = int(ratio.replace(".", "")), len(ratio.split(".")[1])
    turns = [sum(p["type"] == "image_url" for p in m["content"]) for m in c.messages[-1::-2]][::-1]
    at = 0
    for count in turns:
        before, after = _total(images[at : at + count])
        assert after == max(count, math.floor(numerator * before / 10**places))
        at += count
    assert at == len(images)
