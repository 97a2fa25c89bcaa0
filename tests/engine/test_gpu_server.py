"""On a GPU, under captured graphs: the plugin at rest, both model runners, several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from harness.pocket.special import token_id
from tests.engine.comparing import together
from tests.engine.requests_under_test import Answer, Conversation, ask, conversation, text_only

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOKENS = 16
GPU = {
    "kind": "gpu",
    "dtype": "bfloat16",
    "memory_fraction": 0.3,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "kv_cache_gib": None,
    "enforce_eager": False,
}
TIE = 0.5
"""How far the runner-up may lie behind where two ways of computing part: a few steps of bfloat16, whose
logits here are 16 to 32 and so 0.125 apart."""
END = token_id("<|im_end|>")


@pytest.fixture(scope="module")
def asked() -> list[Conversation]:
    return [conversation(s) for s in range(700, 716)] + [text_only(s) for s in range(716, 720)]


@pytest.fixture(scope="module")
def answers(server_with: Any, asked: list[Conversation]) -> dict[str, list[Answer]]:
    """All conversations, whole and at half, as the plugin answers them under the V1 runner."""
    with server_with(plugin=True, **GPU) as server:
        return {
            "whole": said_by(server, asked, retain_ratio=1.0),
            "half": said_by(server, asked, retain_ratio=0.5),
            "again": said_by(server, asked, retain_ratio=0.5),
            "together": together(
                lambda c: ask(server, c.messages, TOKENS, retain_ratio=0.5), asked
            ),
        }


def said_by(server: Any, asked: Sequence[Conversation], **vision: object) -> list[Answer]:
    """One by one: on a GPU the bits of a row depend on the batch that it is in."""
    return [ask(server, c.messages, TOKENS, **vision) for c in asked]


def parted(got: Sequence[Answer], want: Sequence[Answer]) -> int:
    """How many answers part before their end, each at a token that was nearly another.

    Raises:
        AssertionError: one parts elsewhere, or prompts differ in length.
    """
    found = 0
    for a, b in zip(got, want, strict=True):
        assert a.prompt_tokens == b.prompt_tokens
        # The server is told to go on after the end; what it says then is noise.
        length = a.ids.index(END) + 1 if END in a.ids else TOKENS
        if a.ids[:length] != b.ids[:length]:
            step = next(s for s in range(TOKENS) if a.ids[s] != b.ids[s])
            assert min(a.gaps[step], b.gaps[step]) < TIE, (step, a, b)
            found += 1
    return found


def test_at_rest_the_plugin_changes_nothing(
    server_with: Any, asked: list[Conversation], answers: dict[str, list[Answer]]
) -> None:
    with server_with(plugin=False, **GPU) as stock:
        want = said_by(stock, asked)
    assert [a.ids for a in answers["whole"]] == [a.ids for a in want]
    assert [a.logprobs for a in answers["whole"]] == [a.logprobs for a in want]


def test_together_they_part_at_near_ties_only(
    answers: dict[str, list[Answer]],
) -> None:
    assert parted(answers["together"], answers["half"]) <= 10


def test_answers_repeat(answers: dict[str, list[Answer]]) -> None:
    assert [a.ids for a in answers["again"]] == [a.ids for a in answers["half"]]
    shorter = zip(answers["half"], answers["whole"], strict=True)
    assert sum(a.prompt_tokens < b.prompt_tokens for a, b in shorter) == 16


def test_both_model_runners_say_the_same(
    server_with: Any,
    asked: list[Conversation],
    answers: dict[str, list[Answer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with server_with(plugin=True, **GPU) as second:
        for name, ratio in (("whole", 1.0), ("half", 0.5)):
            assert parted(said_by(second, asked, retain_ratio=ratio), answers[name]) <= 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_that_share_images_say_the_same(
    server_with: Any, asked: list[Conversation], answers: dict[str, list[Answer]]
) -> None:
    data = ("--mm-encoder-tp-mode", "data")
    with server_with(plugin=True, tensor_parallel_size=2, extra_args=data, **GPU) as pair:
        assert parted(said_by(pair, asked, retain_ratio=0.5), answers["half"]) <= 3
