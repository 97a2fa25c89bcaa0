"""The vision lever in Qwen3.5, many of whose layers are recurrent: tiny random models.

In bf16, since vLLM's recurrent layers on a CPU know nothing else, while the oracle computes in fp32 with
the same weights. So answers are near, not equal, and how near is held against what errors would do.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.engine import families
from tests.engine.comparing import together
from tests.engine.families import asked
from tests.engine.oracle import Expected, Oracle, Prompt
from tests.engine.requests_under_test import Answer, Conversation, ask, kept_images, rpc

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = 8
CLEAR = 0.02
"""Margin of scores that bf16 does not blur."""
SMALL = ((64, 64), (128, 64), (64, 128), (96, 96), (192, 64), (64, 192), (128, 128))
SETTINGS: tuple[dict[str, Any], ...] = (
    {"retain_ratio": 1.0},
    {"retain_ratio": 0.5},
    {"retain_ratio": 0.3, "budget": "raw", "layer": 1},
    {"retain_ratio": 0.4, "merge": "contextual", "contextual_share": 0.25},
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.qwen3_5(tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="module")
def stock_answers(server_with: Any, dense: Path) -> list[tuple[Conversation, Answer]]:
    with server_with(plugin=False, model_path=dense, dtype="bfloat16") as stock:
        return [(c, ask(stock, c.messages, TOKENS)) for c in asked(range(400, 412))]


def test_dense(
    server_with: Any, dense: Path, stock_answers: list[tuple[Conversation, Answer]]
) -> None:
    """Keeping all, it is the stock server to the last bit; pruning, it is near the oracle."""
    assert families.is_varied([c for c, _ in stock_answers])
    with server_with(plugin=True, model_path=dense, dtype="bfloat16") as server:
        assert rpc(server, "pruneroute_describe")["model_class"] == "GroupQwen35"
        for c, want in stock_answers:
            got = ask(server, c.messages, TOKENS, retain_ratio=1.0)
            assert got.ids == want.ids
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
            assert got.prompt_tokens == want.prompt_tokens
        hold_against_the_oracle(server, Oracle(dense))


def test_experts_in_small_chunks(server_with: Any, tmp_path: Path) -> None:
    """The mixture; its recurrent layers go on, step by step, in the middle of groups."""
    folder = families.qwen3_5(tmp_path / "model", experts=16)
    # With prefix caching vLLM cuts prompts at the blocks of recurrent states.
    changes = {"max_num_batched_tokens": 96, "prefix_caching": True}
    with server_with(plugin=True, model_path=folder, dtype="bfloat16", **changes) as server:
        about = rpc(server, "pruneroute_describe")
        assert about["model_class"] == "GroupQwen35Moe"
        assert about["routing"]["experts"] == 16
        hold_against_the_oracle(server, Oracle(folder))


def hold_against_the_oracle(server: Any, oracle: Oracle) -> None:
    """Answers must be several times nearer to the oracle's than to those of wrong oracles."""
    cases = [
        (c, f"{i}-{n}", s)
        for i, c in enumerate(asked(range(420, 432), sizes=SMALL))
        for n, s in enumerate(SETTINGS)
    ]
    answers = together(
        lambda case: ask(server, case[0].messages, TOKENS, request_id=case[1], **case[2]), cases
    )
    counts = kept_images(server)
    errors: dict[str, list[float]] = {"right": [], "worst": [], "flat": []}
    clear = 0
    for (c, name, s), got in zip(cases, answers, strict=True):
        prompt = oracle.encode(c.messages, c.images, s.get("layer", -1))

        def of(prompt: Prompt, s: dict[str, Any] = s, got: Answer = got) -> Expected:
            return oracle.answer(
                prompt,
                TOKENS,
                str(s["retain_ratio"]),
                budget=s.get("budget", "log_excess"),
                merged=s.get("contextual_share", 0.0),
                follow=got.ids,
            )

        want = of(prompt)
        assert got.prompt_tokens == want.prompt_tokens
        if want.margin < CLEAR and "contextual_share" not in s:
            continue
        if want.margin >= CLEAR:
            clear += 1
            assert counts[name] == want.images
        errors["right"] += off(got, want)
        errors["flat"] += off(got, of(families.flat_positions(prompt)))
        if s["retain_ratio"] < 1:
            errors["worst"] += off(got, of(families.worst_kept(prompt)))
    medians = {name: statistics.median(found) for name, found in errors.items()}
    print(f"{clear} of {len(cases)} clear; median errors {medians}")
    assert clear >= len(cases) // 2
    assert medians["right"] < 0.05
    assert min(medians["worst"], medians["flat"]) > 3 * medians["right"]


def off(got: Answer, want: Expected) -> list[float]:
    """How far each token's log-probability is off."""
    return [abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)]
