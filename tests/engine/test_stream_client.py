"""The streaming client against a real server on the loopback address, with hostile framings."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDictProxy

from harness.engine.stream import StreamInterrupted, StreamOutcome, open_session, stream_chat

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATH = "/v1/chat/completions"


def frame(
    delta: dict[str, Any] | None = None, finish: str | None = None, count: int | None = None
) -> bytes:
    """One frame as vLLM writes it; `count` is the running usage count."""
    tree: dict[str, Any] = {"object": "chat.completion.chunk", "choices": []}
    if delta is not None:
        tree["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
    if count is not None:
        tree["usage"] = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": 9 + count}
    return b"data: " + json.dumps(tree, ensure_ascii=False).encode() + b"\n\n"


ROLE = frame({"role": "assistant", "content": ""}, count=0)
DONE = b"data: [DONE]\n\n"
GOOD = (
    ROLE
    + frame({"content": "né字"}, count=1)
    + frame({"content": ""}, count=2)
    + frame({"content": "😀"}, count=4)
    + frame({"content": ""}, "stop", count=5)
    + frame(count=5)
    + DONE
)


async def serve(handler: Handler) -> tuple[web.AppRunner, str]:
    app = web.Application(client_max_size=2**26)
    app.router.add_post(PATH, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}{PATH}"


def ask(handler: Handler, timeout_s: float = 10.0) -> StreamOutcome:
    async def main() -> StreamOutcome:
        runner, url = await serve(handler)
        try:
            async with open_session() as session:
                return await stream_chat(session, url, b"{}", "r-1", timeout_s)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def writes(*pieces: bytes, gap_s: float = 0.0, stamps: list[float] | None = None) -> Handler:
    """A handler that writes the pieces one by one, noting the instant before each."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for piece in pieces:
            await asyncio.sleep(gap_s)
            if stamps is not None:
                stamps.append(time.perf_counter())
            await response.write(piece)
        return response

    return handler


def timeless(outcome: StreamOutcome) -> StreamOutcome:
    return dataclasses.replace(
        outcome,
        sent_s=None,
        headers_s=None,
        first_token_s=None,
        last_token_s=None,
        end_s=0.0,
        chunks=tuple(dataclasses.replace(c, at_s=0.0) for c in outcome.chunks),
    )


def test_a_good_answer() -> None:
    outcome = ask(writes(GOOD))
    assert outcome.error is None
    assert (outcome.status, outcome.finish_reason, outcome.text) == (200, "stop", "né字😀")
    assert (outcome.prompt_tokens, outcome.output_tokens) == (9, 5)
    assert [(c.tokens, c.text) for c in outcome.chunks] == [
        (1, "né字"),
        (1, ""),
        (2, "😀"),
        (1, ""),
    ]


def test_instants_are_in_order() -> None:
    outcome = ask(writes(*GOOD.splitlines(keepends=True), gap_s=0.001))
    instants = [outcome.sent_s, outcome.headers_s, *(c.at_s for c in outcome.chunks), outcome.end_s]
    assert instants == sorted(i for i in instants if i is not None)
    assert outcome.first_token_s == outcome.chunks[0].at_s
    assert outcome.last_token_s == outcome.chunks[-1].at_s


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_frames_cut_anywhere(size: int) -> None:
    pieces = [GOOD[i : i + size] for i in range(0, len(GOOD), size)]
    assert timeless(ask(writes(*pieces))) == timeless(ask(writes(GOOD)))


def test_carriage_returns_comments_and_data_over_several_lines() -> None:
    text = GOOD.replace(b', "choices"', b',\ndata: "choices"').replace(b"\n", b"\r\n")
    assert timeless(ask(writes(b": ping\r\n\r\n" + text))) == timeless(ask(writes(GOOD)))


def test_frames_of_one_read_share_a_stamp() -> None:
    outcome = ask(writes(GOOD))
    assert len({c.at_s for c in outcome.chunks}) == 1
    assert outcome.first_token_s == outcome.last_token_s


def test_a_role_frame_is_not_the_first_token_and_usage_is_not_the_last() -> None:
    stamps: list[float] = []
    tail = frame(count=1)
    outcome = ask(
        writes(ROLE, frame({"content": "a"}, "stop", 1), tail, DONE, gap_s=0.05, stamps=stamps)
    )
    role_s, token_s, usage_s, done_s = stamps
    assert outcome.error is None
    assert outcome.headers_s is not None and outcome.first_token_s is not None
    assert role_s < token_s <= outcome.first_token_s < usage_s
    assert outcome.last_token_s == outcome.first_token_s
    assert outcome.end_s >= done_s


def test_text_without_growth_of_the_count_is_no_token() -> None:
    stamps: list[float] = []
    echo, token = frame({"content": "asked "}, count=0), frame({"content": "told"}, "stop", 1)
    outcome = ask(writes(ROLE + echo, token + DONE, gap_s=0.02, stamps=stamps))
    assert outcome.error is None
    assert outcome.text == "asked told"
    assert [(c.tokens, c.text) for c in outcome.chunks] == [(1, "told")]
    assert outcome.first_token_s is not None and outcome.first_token_s >= stamps[1]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("running", [True, False])
def test_reasoning_counts_as_tokens_but_is_not_the_answer(name: str, running: bool) -> None:
    outcome = ask(
        writes(
            frame({name: "hm"}, count=1 if running else None),
            frame({"content": "a"}, "stop", 2 if running else None),
            frame(count=2),
            DONE,
        )
    )
    assert outcome.error is None
    assert outcome.text == "a"
    assert [(c.tokens, c.text) for c in outcome.chunks] == [(1, ""), (1, "a")]


def test_a_final_count_alone_is_spread_over_the_frames() -> None:
    outcome = ask(
        writes(
            frame({"role": "assistant", "content": ""}),
            frame({"content": "a"}),
            frame({"content": "b"}),
            frame({"content": "c"}),
            frame({}, "length"),
            frame(count=8),
            DONE,
        )
    )
    assert outcome.error is None
    assert [(c.tokens, c.text) for c in outcome.chunks] == [(3, "a"), (3, "b"), (2, "c")]
    assert outcome.output_tokens == 8


def test_a_count_in_the_last_choice_covers_the_frames_before_it() -> None:
    outcome = ask(writes(frame({"content": "a"}), frame({"content": "b"}, "stop", 4), DONE))
    assert outcome.error is None
    assert [c.tokens for c in outcome.chunks] == [2, 2]


def test_a_server_that_never_counts_gives_no_good_answer() -> None:
    outcome = ask(writes(frame({"content": "a"}), frame({}, "stop"), DONE))
    assert outcome.output_tokens is None
    assert outcome.text == "a"
    assert outcome.error is not None and "include_usage" in outcome.error


@pytest.mark.parametrize(
    "error",
    [
        b'data: {"error": {"message": "engine\\n is dead", "code": 500}}\n\n',
        b'data: {"error": "engine is dead"}\n\n',
        b'event: error\ndata: {"message": "engine is dead"}\n\n',
        b"event: error\ndata: engine is dead\n\n",
    ],
)
def test_an_error_frame_after_tokens_spoils_the_answer(error: bytes) -> None:
    outcome = ask(writes(ROLE, frame({"content": "a"}, count=1), error, DONE))
    assert outcome.error == "error in the stream: engine is dead"
    assert outcome.text == "a"
    assert len(outcome.chunks) == 1


def test_streams_that_end_early() -> None:
    start = ROLE + frame({"content": "a"}, count=1)
    finish = frame({"content": ""}, "stop", 2)
    cases = {
        start: "the stream ended without a finish reason",
        start + finish: "the stream ended without [DONE]",
        start + finish + b"data: [DO": "the stream ended without [DONE]",
        start + DONE: "[DONE] without a finish reason",
        b"": "the stream ended without a finish reason",
    }
    for text, error in cases.items():
        outcome = ask(writes(text) if text else writes())
        assert outcome.error == error
        assert outcome.first_token_s is None or outcome.end_s >= outcome.first_token_s


def test_a_connection_that_breaks_under_the_stream() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + frame({"content": "a"}, count=1))
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    outcome = ask(handler)
    assert outcome.error is not None and "\n" not in outcome.error
    assert outcome.finish_reason is None
    assert outcome.text == "a"


def test_an_answer_without_tokens() -> None:
    outcome = ask(writes(ROLE, frame({"content": ""}, "stop", 0), frame(count=0), DONE))
    assert outcome.error == "the answer has no tokens"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_engine_that_gave_up(reason: str) -> None:
    outcome = ask(writes(frame({"content": "a"}, reason, 1), DONE))
    assert outcome.error is not None and repr(reason) in outcome.error


@pytest.mark.parametrize("text", [b"data: {oops\n\n", b"data: 3\n\n", b"data: []\n\n"])
def test_an_unreadable_frame(text: bytes) -> None:
    outcome = ask(writes(frame({"content": "a"}, count=1), text, DONE))
    assert outcome.error is not None and outcome.error.startswith("unreadable frame: ")


def test_a_frame_of_odd_shape_is_no_fault_of_ours() -> None:
    odd = b'data: {"choices": [null], "usage": 3}\n\ndata: {"choices": [{"delta": null}]}\n\n'
    assert timeless(ask(writes(odd + GOOD))) == timeless(ask(writes(GOOD)))


def test_http_errors_carry_their_reason() -> None:
    async def json_error(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async def text_error(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>\nboom " + "x" * 5000, status=500)

    async def moved(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    outcome = ask(json_error)
    assert (outcome.status, outcome.error) == (400, "HTTP 400: too long")
    outcome = ask(text_error)
    assert outcome.error is not None
    assert outcome.error.startswith("HTTP 500: <html> boom")
    assert len(outcome.error) < 400
    assert ask(moved).status == 307


def test_an_answer_that_is_no_stream() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": []})

    outcome = ask(handler)
    assert outcome.error is not None and "text/event-stream" in outcome.error
    assert outcome.first_token_s is None


def test_a_refused_connection() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    async def main() -> StreamOutcome:
        async with open_session() as session:
            return await stream_chat(session, f"http://127.0.0.1:{port}", b"{}", "r", 5)

    outcome = asyncio.run(main())
    assert outcome.error is not None and "ClientConnectorError" in outcome.error
    assert (outcome.status, outcome.sent_s, outcome.headers_s) == (None, None, None)


def test_a_stall_ends_at_the_limit_and_keeps_what_came() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + frame({"content": "a"}, count=1))
        await asyncio.sleep(30)
        return response

    outcome = ask(handler, timeout_s=0.3)
    assert outcome.error == "timed out after 0.3 s"
    assert outcome.text == "a"
    assert outcome.sent_s is not None and outcome.end_s - outcome.sent_s < 10


def test_a_server_that_holds_the_connection_open_after_done_has_answered() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(GOOD)
        await asyncio.sleep(30)
        return response

    assert ask(handler, timeout_s=0.3).error is None
    assert ask(handler, timeout_s=20).error is None


def test_cancelling_keeps_what_came() -> None:
    started = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + frame({"content": "a"}, count=1))
        await asyncio.sleep(0.05)
        started.set()
        await asyncio.sleep(30)
        return response

    async def main() -> StreamOutcome:
        runner, url = await serve(handler)

        async def one() -> StreamOutcome:
            async with open_session() as session:
                try:
                    return await stream_chat(session, url, b"{}", "r-1", 20)
                except StreamInterrupted as cut:
                    return cut.outcome

        task = asyncio.create_task(one())
        await started.wait()
        task.cancel()
        outcome = await task
        await runner.cleanup()
        return outcome

    outcome = asyncio.run(main())
    assert outcome.error == "cancelled by the client"
    assert outcome.text == "a"
    assert outcome.sent_s is not None


def test_the_request_is_sent_as_given() -> None:
    seen: list[tuple[bytes, CIMultiDictProxy[str]]] = []
    body = b"x" * (3 * 2**20)

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((await request.read(), request.headers))
        return await writes(GOOD)(request)

    async def main() -> StreamOutcome:
        runner, url = await serve(handler)
        async with open_session({"Authorization": "Bearer k"}) as session:
            outcome = await stream_chat(session, url, body, "r-7", 10, {"X-Extra": "1"})
        await runner.cleanup()
        return outcome

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(main()).error is None
    sent, headers = seen[0]
    assert sent == body
    assert headers["X-Request-Id"] == "r-7"
    assert headers["Authorization"] == "Bearer k"
    assert headers["X-Extra"] == "1"
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == str(len(body))


def test_connections_are_reused_one_after_the_other_and_not_limited_side_by_side() -> None:
    n = 150
    ports: list[int] = []

    async def main() -> list[StreamOutcome]:
        all_in = asyncio.Event()
        in_flight = 0

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal in_flight
            assert request.transport is not None
            ports.append(request.transport.get_extra_info("peername")[1])
            if len(ports) > 3:
                in_flight += 1
                if in_flight == n:
                    all_in.set()
                await all_in.wait()
            return await writes(GOOD)(request)

        runner, url = await serve(handler)
        async with open_session() as session:
            for i in range(3):
                await stream_chat(session, url, b"{}", f"r-{i}", 10)
            outcomes = await asyncio.gather(
                *(stream_chat(session, url, b"{}", f"q-{i}", 30) for i in range(n))
            )
        await runner.cleanup()
        return outcomes

    outcomes = asyncio.run(main())
    assert all(o.error is None for o in outcomes)
    assert len(set(ports[:3])) == 1
    assert len(set(ports[3:])) == n
