"""A fused group says what images say that were encoded, chosen from and cut beforehand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness.engine.command import wants_trust_flag
from harness.pocket.model import ensure
from tests.engine.comparing import LOGIT_TIE, LOGPROB_ERROR, SCORE_TIE, is_tie, together
from tests.engine.oracle import Oracle, Prompt
from tests.engine.requests_under_test import Answer, Conversation, ask, conversation
from tests.engine.two_pass.items import write_rows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = 10
CONVERSATIONS, SETTINGS = 70, 3
RATIOS = ("1", "0.8", "0.6", "0.4", "0.25", "0.1")
CHUNK = 61
"""Tokens of a step: a prime."""
BLOCKS = 110
"""KV blocks of 32: what a handful of requests need; the others' are evicted."""


@dataclass(frozen=True)
class Case:
    """A conversation, pruned.

    Attributes:
        asked: the conversation.
        prompt: it, encoded.
        ratio, floor: of the request.
        rows: file of the rows that stay.
        margin: how narrowly the last of them did.
    """

    asked: Conversation
    prompt: Prompt
    ratio: str
    floor: int
    rows: Path
    margin: float


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(ensure())


@pytest.fixture(scope="module")
def cases(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Three settings of every conversation."""
    folder = tmp_path_factory.mktemp("rows")
    image_token = oracle.model.config.image_token_id
    found = []
    for seed in range(CONVERSATIONS):
        r = Random(f"two passes {seed}")
        asked = conversation(5000 + seed, images_per_turn=(1, 2, 3, 5, 8))
        prompt = oracle.encode(asked.messages, asked.images)
        for ratio in r.sample(RATIOS, SETTINGS):
            floor, file = r.choice((1, 1, 4)), folder / f"{len(found)}.safetensors"
            margin = write_rows(file, prompt, image_token, ratio, floor)
            found.append(Case(asked, prompt, ratio, floor, file, margin))
    return found


@dataclass(frozen=True)
class Said:
    """What the second engine says.

    Attributes:
        right: to every case.
        swapped: to a few cases, with the rows of another choice; by the case's number.
    """

    right: list[Answer]
    swapped: dict[int, Answer]


@pytest.fixture(scope="module")
def said(server_with: Any, tmp_path_factory: pytest.TempPathFactory, cases: list[Case]) -> Said:
    """Answers of a server with the tests' plugin in place of ours. It ends here: it takes a core."""
    site = tmp_path_factory.mktemp("site")
    info = site / "pruneroute_two_pass-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pruneroute-two-pass\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntwo_pass = tests.engine.two_pass.plugin:register\n"
    )
    root = Path(__file__).parents[2]
    flags = ("--trust-request-mm-kwargs",) if wants_trust_flag() else ()
    swaps = {
        i: cases[i - i % SETTINGS + (i + 1) % SETTINGS].rows
        for i, c in enumerate(cases)
        if len(c.asked.images) == 1
    }
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(site), str(root), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p))
        patch.setenv("VLLM_PLUGINS", "two_pass")
        patch.syspath_prepend(str(site))  # where the harness looks which plugins there are
        with server_with(plugin=False, extra_args=flags) as server:

            def one(case: Case, rows: Path) -> Answer:
                return ask(server, case.asked.messages, TOKENS, rows_file=str(rows))

            return Said(
                together(lambda c: one(c, c.rows), cases),
                {i: one(cases[i], rows) for i, rows in list(swaps.items())[:8]},
            )


def test_groups_say_what_two_passes_say(
    server_with: Any, cases: list[Case], said: Said, oracle: Oracle
) -> None:
    """More than 200 requests, some repeated, in prime chunks, with hits and evictions."""
    assert len(cases) >= 200
    assert {len(c.asked.images) for c in cases} >= set(range(1, 9))
    assert {len(c.asked.messages) // 2 for c in cases} >= {0, 1, 2}
    shapes = {(i.width > i.height, i.width == i.height) for c in cases for i in c.asked.images}
    assert len(shapes) == 3
    order = [i for i in range(len(cases)) for _ in range(1 + (i % 3 == 0))]
    order += range(0, len(cases), 4)  # long after the first time
    Random(0).shuffle(order)

    extra = ("--enable-prompt-tokens-details", "--num-gpu-blocks-override", str(BLOCKS))
    with server_with(
        plugin=True,
        max_model_len=3072,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=8,
        prefix_caching=True,
        extra_args=extra,
    ) as server:
        answers = together(
            lambda i: ask(
                server,
                cases[i].asked.messages,
                TOKENS,
                retain_ratio=float(cases[i].ratio),
                min_tokens_per_image=cases[i].floor,
            ),
            order,
        )
    seen: set[int] = set()
    ties = evicted = hits = 0
    for i, got in zip(order, answers, strict=True):
        ties += parts_at_a_tie(got, said.right[i], cases[i], oracle)
        if i in seen:
            hits += got.cached_tokens > 0
            evicted += got.cached_tokens == 0
        seen.add(i)
    print(f"{len(order)} answers, {ties} parted at a near-tie; {hits} hits, {evicted} evicted")
    assert ties <= len(order) // 50
    assert hits >= 5
    assert evicted >= 5


def parts_at_a_tie(got: Answer, want: Answer, case: Case, oracle: Oracle) -> bool:
    """False if both engines say the same; True if they part at a near-tie.

    Raises:
        AssertionError: they part elsewhere.
    """
    assert got.prompt_tokens == want.prompt_tokens
    if got.ids == want.ids:
        errors = [abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)]
        if max(errors) < LOGPROB_ERROR:
            return False
    elif case.margin >= SCORE_TIE:
        step = next(s for s in range(TOKENS) if got.ids[s] != want.ids[s])
        if want.gaps[step] < LOGIT_TIE:
            return True
    # An expert may have been chosen by a hair, which only the oracle can tell.
    truth = oracle.answer(case.prompt, TOKENS, case.ratio, floor=case.floor)
    return is_tie(got, truth) | is_tie(want, truth)


def test_the_second_engine_can_tell(cases: list[Case], said: Said) -> None:
    """With rows of another choice it says something else, or at least less surely."""
    assert len(said.swapped) == 8
    for i, other in said.swapped.items():
        assert other.logprobs != pytest.approx(said.right[i].logprobs, abs=LOGPROB_ERROR)
