"""A server whose plugin takes pictures as bytes, as it does where vLLM itself does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.requests_under_test import Refused, ask, conversation, text_only

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 12
PLAIN = ("--no-mm-device-do-normalize",)


def test_answers_are_those_of_floats(server_with: Any) -> None:
    asked = [conversation(s) for s in range(800, 812)] + [text_only(812)]
    with server_with(plugin=False, extra_args=PLAIN) as stock:
        wanted = [ask(stock, c.messages, TOKENS) for c in asked]
    with server_with(plugin=True, extra_args=PLAIN) as server:
        for c, want in zip(asked, wanted, strict=True):
            got = ask(server, c.messages, TOKENS, retain_ratio=1.0)
            assert got.ids == want.ids
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
        with pytest.raises(Refused, match="do_rescale cannot differ") as refused:
            ask(server, asked[0].messages, 2, do_rescale=False)
        assert refused.value.status == 400
        for policy in ("visionzip", "downscale"):
            small = ask(server, asked[0].messages, 2, retain_ratio=0.5, policy=policy)
            assert small.prompt_tokens < wanted[0].prompt_tokens
