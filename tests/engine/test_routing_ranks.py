"""Two tensor-parallel ranks route as one does."""

from __future__ import annotations

from typing import Any

import pytest

from harness.calibration import SIMILARITY_FILE
from harness.pocket.model import FOLDER
from tests.engine.requests_under_test import (
    Answer,
    Endpoint,
    ask,
    conversation,
    rpc,
    set_routing,
    text_only,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS = 12
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"policy": "off"},
    "sere": {"policy": "sere", "primary_experts": 2, "similarity_threshold": 0.0},
    "auto": {"policy": "sere", "primary_experts": "auto", "similarity_threshold": 0.0},
    "oea": {"policy": "oea", "primary_experts": 2},
}


def said(server: Endpoint) -> dict[str, tuple[list[Answer], list[list[float]]]]:
    """Answers one by one under each setting, and the experts that each answer's steps read."""
    ask(server, text_only(0).messages, 1)  # levers can be set after the first step
    found = {}
    for name, setting in SETTINGS.items():
        assert set_routing(server, **setting, similarity_path=str(FOLDER / SIMILARITY_FILE)) is None
        rpc(server, "pruneroute_drain")
        asked = [text_only(900), text_only(901), conversation(902), conversation(903)]
        answers = [ask(server, c.messages, TOKENS, retain_ratio=0.5) for c in asked]
        counts = rpc(server, "pruneroute_drain")["requests"].values()
        experts = [[c["experts_before"], c["experts_after"], c["slots_moved"]] for c in counts]
        found[name] = (answers, experts)
    return found


def test_two_ranks_read_the_experts_of_one(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_with(plugin=True) as one:
        want = said(one)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    # The bundled encoder's three heads do not part in two.
    data = ("--mm-encoder-tp-mode", "data")
    with server_with(plugin=True, tensor_parallel_size=2, extra_args=data) as two:
        got = said(two)
    for name, (answers, experts) in want.items():
        assert [a.ids for a in got[name][0]] == [a.ids for a in answers], name
        assert got[name][1] == experts, name
    # Alone, SERE and OEA read a token's two primaries, of which they make different answers.
    assert len({str(experts) for _, experts in want.values()}) == len(SETTINGS) - 1
    assert [a.ids for a in want["sere"][0]] != [a.ids for a in want["oea"][0]]
