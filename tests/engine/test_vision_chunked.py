"""What must not matter to the vision lever: chunks, cache hits, batch mates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.comparing import LOGIT_TIE, together
from tests.engine.requests_under_test import (
    Answer,
    Conversation,
    Endpoint,
    ask,
    conversation,
    data_url,
    kept_images,
    picture,
)

pytestmark = pytest.mark.engine

TOKENS = 12
CHUNK = 37
"""Tokens of a step: a prime below the size of most images, and no multiple of the KV block."""
RATIOS = (1.0, 0.5, 0.2)

Case = tuple[str, Conversation, float]


@pytest.fixture(scope="module")
def chunked(server_with: Any) -> Iterator[Endpoint]:
    """A server that cuts every prompt into small chunks and re-uses equal prefixes."""
    with server_with(
        plugin=True,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=8,
        prefix_caching=True,
        extra_args=("--enable-prompt-tokens-details",),
    ) as server:
        yield server


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Ten conversations at three ratios: several images, both orientations, up to three turns."""
    seeds = range(300, 310)
    return [(f"{s}-{r}", conversation(s), r) for s in seeds for r in RATIOS]


Answers = tuple[dict[str, Answer], dict[str, list[tuple[int, int]]]]


def answers_of(server: Endpoint, cases: list[Case], label: str, at_once: int = 1) -> Answers:
    """Answers and kept tokens of all cases, by name."""

    def one(case: Case) -> Answer:
        name, c, ratio = case
        return ask(server, c.messages, TOKENS, request_id=f"{label}-{name}", retain_ratio=ratio)

    answers = together(one, cases, at_once)
    names = [name for name, _, _ in cases]
    kept = kept_images(server)
    return (
        dict(zip(names, answers, strict=True)),
        {name: kept[f"{label}-{name}"] for name in names},
    )


@pytest.fixture(scope="module")
def whole(plugin_server: Endpoint, cases: list[Case]) -> Answers:
    """Each prompt in one chunk, nothing cached, nobody else in the batch."""
    return answers_of(plugin_server, cases, "whole")


@pytest.fixture(scope="module")
def first(chunked: Endpoint, cases: list[Case]) -> Answers:
    """In small chunks, asked for the first time."""
    return answers_of(chunked, cases, "first")


def same(got: Answers, want: Answers) -> None:
    assert got[1] == want[1]
    for name, answer in want[0].items():
        assert got[0][name].ids == answer.ids, name
        assert got[0][name].prompt_tokens == answer.prompt_tokens
        assert got[0][name].logprobs == pytest.approx(answer.logprobs, abs=LOGIT_TIE)


def test_chunks_change_nothing(first: Answers, whole: Answers, cases: list[Case]) -> None:
    kept = [after for images in whole[1].values() for _, after in images]
    assert sum(k > CHUNK for k in kept) >= 10
    assert {i.width > i.height for _, c, _ in cases for i in c.images} == {True, False}
    assert any(len(c.messages) > 2 for _, c, _ in cases)
    same(first, whole)


def test_a_prefix_hit_changes_nothing(
    chunked: Endpoint, first: Answers, whole: Answers, cases: list[Case]
) -> None:
    again = answers_of(chunked, cases, "again")
    hits = [a.cached_tokens for a in again[0].values()]
    assert all(hit > 0 for hit in hits), hits
    same(again, whole)


def test_a_hit_that_ends_inside_a_group_changes_nothing(
    chunked: Endpoint, plugin_server: Endpoint
) -> None:
    """The group ends so near the prompt's end that its last rows are computed again."""
    inside = 0
    for seed in range(320, 326):
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(picture(seed + i, *size))}}
            for i, size in enumerate([(200, 300), (320, 96 + 32 * (seed % 3))])
        ]
        parts.insert(1, {"type": "text", "text": "and"})
        messages = [{"role": "user", "content": parts}]
        tail = len("><\n><") + len("assistant\n")  # special tokens are one each
        want = ask(plugin_server, messages, TOKENS, retain_ratio=0.6)
        once = ask(chunked, messages, TOKENS, retain_ratio=0.6)
        twice = ask(chunked, messages, TOKENS, retain_ratio=0.6)
        assert 0 < twice.cached_tokens < twice.prompt_tokens
        inside += twice.cached_tokens < twice.prompt_tokens - tail
        assert once.ids == twice.ids == want.ids
    assert inside >= 3


def test_the_same_images_at_another_setting_are_no_hit(
    chunked: Endpoint, plugin_server: Endpoint
) -> None:
    """Rows of one budget, floor or layer must never be taken for those of another."""
    c = conversation(330, images_per_turn=(3,), turns=(1,))
    settings: list[dict[str, Any]] = [
        {"retain_ratio": 0.5},
        {"retain_ratio": 0.3},
        {"retain_ratio": 0.3, "min_tokens_per_image": 5},
        {"retain_ratio": 0.3, "layer": 0},
        {"retain_ratio": 1.0},
    ]
    said = []
    for setting in [*settings, *reversed(settings)]:
        got = ask(chunked, c.messages, TOKENS, **setting)
        assert got.ids == ask(plugin_server, c.messages, TOKENS, **setting).ids
        said.append(tuple(got.ids))
    assert len(set(said)) >= 4


def test_a_shared_prefix_with_another_question_changes_nothing(
    chunked: Endpoint, plugin_server: Endpoint
) -> None:
    """The hit ends in the text after the group, which is still at its old positions."""
    c = conversation(340, images_per_turn=(2,), turns=(1,))
    for question in ("And the first one?", "And the second?", "Und beide zusammen?"):
        messages = [
            *c.messages,
            {"role": "assistant", "content": "It says nothing that anybody could read."},
            {"role": "user", "content": question},
        ]
        got = ask(chunked, messages, TOKENS, retain_ratio=0.4)
        assert got.ids == ask(plugin_server, messages, TOKENS, retain_ratio=0.4).ids
    assert got.cached_tokens > 0


def test_batch_mates_change_nothing(chunked: Endpoint, whole: Answers, cases: list[Case]) -> None:
    """All at once, mixed chunks of prefill and decode, the second half cold."""
    fresh = [(f"fresh-{n}", _with_other_start(c), r) for n, c, r in cases]
    alone = answers_of(chunked, fresh[:6], "alone")
    crowd = answers_of(chunked, [*cases, *fresh], "crowd", at_once=12)
    names = {name for name, _, _ in cases}
    same(({n: crowd[0][n] for n in names}, {n: crowd[1][n] for n in names}), whole)
    few = alone[0].keys()
    same(({n: crowd[0][n] for n in few}, {n: crowd[1][n] for n in few}), alone)


def _with_other_start(c: Conversation) -> Conversation:
    start = [{"role": "system", "content": "Something that no other prompt starts with."}]
    return Conversation([*start, *(m for m in c.messages if m["role"] != "system")], c.images)
