"""What must not matter to the vision lever: chunks, cache hits, batch mates."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from harness.pocket.model import ensure
from tests.engine.comparing import ROUTE_TIE, SCORE_TIE, is_tie, together
from tests.engine.oracle import Expected, Oracle
from tests.engine.requests_under_test import (
    Answer,
    Conversation,
    Endpoint,
    ask,
    conversation,
    data_url,
    kept_images,
    picture,
    text_only,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = 12
CHUNK = 37
"""Tokens of a step: a prime below the size of most images, and no multiple of the KV block."""
RATIOS = ("1", "0.5", "0.2")


@dataclass(frozen=True)
class Case:
    """A conversation, pruned, and what it should get."""

    name: str
    asked: Conversation
    ratio: str
    want: Expected


@pytest.fixture(scope="module")
def chunked(server_with: Any) -> Iterator[Endpoint]:
    """A server that cuts prompts into small chunks, re-uses equal prefixes, and is short of blocks."""
    with server_with(
        plugin=True,
        max_model_len=2048,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=8,
        prefix_caching=True,
        extra_args=("--enable-prompt-tokens-details", "--num-gpu-blocks-override", "70"),
    ) as server:
        yield server


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(ensure())


def cases_of(oracle: Oracle, seeds: range) -> list[Case]:
    cases = []
    for seed in seeds:
        asked = conversation(seed)
        prompt = oracle.encode(asked.messages, asked.images)
        for ratio in RATIOS:
            want = oracle.answer(prompt, TOKENS, ratio)
            cases.append(Case(f"{seed}-{ratio}", asked, ratio, want))
    return cases


@pytest.fixture(scope="module")
def cases(oracle: Oracle) -> list[Case]:
    """Ten conversations at three ratios: several images, both orientations, up to three turns."""
    return cases_of(oracle, range(300, 310))


def check(
    server: Endpoint, cases: list[Case], label: str, at_once: int = 1, times: int = 1
) -> list[list[Answer]]:
    """Ask all cases and hold the answers, and the tokens kept of each image, against the oracle's.

    Returns:
        For each case, the answers to `times` repetitions.
    """

    def one(case: Case) -> list[Answer]:
        return [
            ask(
                server,
                case.asked.messages,
                TOKENS,
                request_id=f"{label}-{case.name}-{time}",
                retain_ratio=float(case.ratio),
            )
            for time in range(times)
        ]

    answers = together(one, cases, at_once)
    kept = kept_images(server)
    ties = 0
    for case, got in zip(cases, answers, strict=True):
        for time in range(times):
            images = kept[f"{label}-{case.name}-{time}"]
            assert case.want.margin < SCORE_TIE or images == case.want.images
        # A near-tie is one however often it is asked.
        ties += max(is_tie(answer, case.want) for answer in got)
    assert ties <= 2
    return answers


def test_chunks_and_prefix_hits_change_nothing(chunked: Endpoint, cases: list[Case]) -> None:
    kept = [after for case in cases for _, after in case.want.images]
    assert sum(k > CHUNK for k in kept) >= 10
    assert {i.width > i.height for case in cases for i in case.asked.images} == {True, False}
    assert any(len(case.asked.messages) > 2 for case in cases)
    for cold, hit in check(chunked, cases, "alone", times=2):
        assert cold.cached_tokens < hit.cached_tokens


def test_a_hit_that_ends_inside_a_group_changes_nothing(chunked: Endpoint, oracle: Oracle) -> None:
    """The group ends so near the prompt's end that its last rows are computed again."""
    after_group = "<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    tail = len(oracle.processor.tokenizer(after_group)["input_ids"])
    inside = 0
    for seed in range(320, 326):
        images = [picture(seed, 200, 300), picture(seed + 50, 320, 96 + 32 * (seed % 3))]
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_url(image)}} for image in images
        ]
        parts.insert(1, {"type": "text", "text": "and"})
        messages = [{"role": "user", "content": parts}]
        want = oracle.answer(oracle.encode(messages, images), TOKENS, "0.6")
        for hit in (False, True):
            got = ask(chunked, messages, TOKENS, retain_ratio=0.6)
            assert (got.cached_tokens > 0) is hit
            assert not is_tie(got, want)
        inside += got.cached_tokens < got.prompt_tokens - tail
    assert inside >= 3


def test_the_same_images_at_another_setting_are_no_hit(chunked: Endpoint, oracle: Oracle) -> None:
    """Rows of one budget, floor or layer must never be taken for those of another."""
    for seed in range(330, 380):
        sizes = ((192, 192), (160, 256), (256, 160))
        c = conversation(seed, images_per_turn=(3,), turns=(1,), sizes=sizes)
        last, first = (oracle.encode(c.messages, c.images, layer) for layer in (-1, 0))
        cases: list[tuple[dict[str, Any], Expected]] = [
            ({"retain_ratio": 0.5}, oracle.answer(last, TOKENS, "0.5")),
            ({"retain_ratio": 0.3}, oracle.answer(last, TOKENS, "0.3")),
            (  # the same budget, spent otherwise
                {"retain_ratio": 0.3, "min_tokens_per_image": 10},
                oracle.answer(last, TOKENS, "0.3", floor=10),
            ),
            ({"retain_ratio": 0.3, "layer": 0}, oracle.answer(first, TOKENS, "0.3")),
            ({"retain_ratio": 1.0}, oracle.answer(last, TOKENS, "1")),
        ]
        assert cases[1][1].prompt_tokens == cases[2][1].prompt_tokens
        distinct = len({tuple(want.ids) for _, want in cases}) == len(cases)
        clear = all(w.margin > SCORE_TIE and min(w.route_gaps) > ROUTE_TIE for _, w in cases)
        if distinct and clear:
            break
    else:
        pytest.fail("no conversation of these tells the settings apart")
    for setting, want in [*cases, *reversed(cases)]:
        assert not is_tie(ask(chunked, c.messages, TOKENS, **setting), want)


def test_a_shared_prefix_with_another_question_changes_nothing(
    chunked: Endpoint, oracle: Oracle
) -> None:
    """The hit ends in the text after the group, which is still at its old positions."""
    c = conversation(340, images_per_turn=(2,), turns=(1,))
    hits = []
    for question in ("And the first one?", "And the second?", "Und beide zusammen?"):
        messages = [
            *c.messages,
            {"role": "assistant", "content": "It says nothing that anybody could read."},
            {"role": "user", "content": question},
        ]
        prompt = oracle.encode(messages, c.images)
        got = ask(chunked, messages, TOKENS, retain_ratio=0.4)
        assert not is_tie(got, oracle.answer(prompt, TOKENS, "0.4"))
        is_image = prompt.ids == oracle.model.config.image_token_id
        after_group = len(is_image) - 1 - int(is_image.nonzero().max())
        hits.append(got.cached_tokens - (got.prompt_tokens - after_group))
    assert hits[0] < 0 < hits[1]
    assert hits[2] > 0


def preemptions(server: Endpoint) -> float:
    """Requests that had to give their KV blocks away so far, and were computed anew."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        text = response.read().decode()
    return sum(float(n) for n in re.findall(r"^vllm:num_preemptions_total\S* (\S+)$", text, re.M))


def test_batch_mates_and_preemption_change_nothing(
    chunked: Endpoint, oracle: Oracle, cases: list[Case]
) -> None:
    """All at once, in mixed steps of prefill and decode, and more than there are blocks for."""
    fresh = cases_of(oracle, range(350, 358))
    crowd = [c for pair in zip(cases, fresh, strict=False) for c in pair]
    before = preemptions(chunked)
    with ThreadPoolExecutor(4) as pool:
        # Long answers came first, and so keep their blocks while others lose theirs.
        writers = [pool.submit(ask, chunked, text_only(s).messages, 450) for s in range(360, 364)]
        check(chunked, crowd, "crowd", at_once=12)
        assert all(len(w.result().ids) == 450 for w in writers)
    assert preemptions(chunked) > before
