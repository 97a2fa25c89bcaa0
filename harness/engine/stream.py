"""The streaming client: one chat request in, the raw instants and the outcome of its stream out.

Instants are `time.perf_counter` seconds. On Linux that is the system's monotonic clock, so that
they compare with stamps of other processes on the same machine.

When tokens arrived: every read off the socket is stamped before a byte of it is parsed. Frames that
came in one read share its stamp, since nothing finer was observed.

How many tokens a frame carried:

* With a running count in its frames (``stream_options.continuous_usage_stats`` of vLLM), a frame
  carries what the count grew by, whatever its text: the text may be empty (a token can hold part of
  a character, or none, as the end-of-sequence token does), and text without growth (an echoed
  prompt, text that was held back) is no token.
* Without one, a frame carries tokens if it brings content, reasoning or a tool call. The next count
  that the server does send, at the latest the final one, is spread over such frames as evenly as
  whole numbers allow. Per-frame counts are then an estimate; their sum, the first and the last
  instant are not.
* A server that never counts gives no output tokens, and the request is not good.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from harness.engine.sse import Event, EventParser

_DRAIN_S = 0.5
_EXCERPT = 300
_READ_BUFFER = 2**20
# Below the 5 s after which uvicorn, and so vLLM, closes an idle connection: a request that meets a
# closing one fails for no fault of the engine's.
_KEEPALIVE_S = 3.0
# What an engine says when it gave up; anything else (stop, length, tool_calls, …) is an end.
_FAILED_FINISH = frozenset({"abort", "error"})

_now = time.perf_counter


@dataclass(frozen=True)
class StreamChunk:
    """One frame that carried answer tokens: its read's instant [s], tokens, and answer text."""

    at_s: float
    tokens: int
    text: str


@dataclass(frozen=True)
class StreamOutcome:
    """What one request came to. Instants are absolute [s]; `None` means that it never happened.

    Attributes:
        request_id: as sent in ``X-Request-Id``.
        sent_s: just before the request's first byte was handed to the socket; name resolution and
            connecting come before it.
        headers_s: when status line and headers had arrived.
        first_token_s: arrival of the first frame that carried a token.
        last_token_s: arrival of the last one; usage and ``[DONE]`` frames do not move it.
        end_s: when the stream was over, whatever the outcome.
        status: HTTP status, if one came.
        chunks: every frame that carried tokens, in order.
        text: the answer's content, concatenated; reasoning and tool calls are not in it, though
            their tokens count.
        finish_reason: as the server said it.
        error: why this is not a good answer, in one line; `None` if it is one.
        prompt_tokens: the server's count.
        output_tokens: the server's count.
    """

    request_id: str
    sent_s: float | None
    headers_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    end_s: float
    status: int | None
    chunks: tuple[StreamChunk, ...]
    text: str
    finish_reason: str | None
    error: str | None
    prompt_tokens: int | None
    output_tokens: int | None


class StreamInterrupted(asyncio.CancelledError):
    """The task that streamed was cancelled; `outcome` is what had come so far."""

    def __init__(self, outcome: StreamOutcome) -> None:
        super().__init__(outcome.error)
        self.outcome = outcome


def open_session(headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """A session for `stream_chat`: no limit on connections, and no time-out of its own.

    To be called in a running event loop, and closed by the caller (``async with``). Proxies named
    in the environment are not used: they would stand between the clock and the engine.

    Args:
        headers: sent with every request (authorisation, for instance).
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_stamp_sent)
    trace.on_request_end.append(_stamp_headers)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=dict(headers or {}),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        trust_env=False,
        read_bufsize=_READ_BUFFER,
        trace_configs=[trace],
    )


async def stream_chat(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    request_id: str,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> StreamOutcome:
    """Send one chat request and read its stream to the end. Failures are outcomes, not exceptions.

    Args:
        session: from `open_session`, which installs the hooks that stamp.
        url: of the chat-completions endpoint.
        body: from `harness.engine.bodies.encode`.
        request_id: sent as ``X-Request-Id``.
        timeout_s: limit for the whole exchange, connecting included [s].
        headers: more headers of this request.

    Raises:
        StreamInterrupted: the task was cancelled; a `CancelledError` that carries the partial
            outcome.
    """
    state = _Exchange()
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await _exchange(session, url, body, request_id, headers or {}, state)
    except TimeoutError as error:
        state.fail(f"timed out after {timeout_s:g} s" if limit.expired() else _words(error))
    except (aiohttp.ClientError, OSError) as error:
        state.fail(_words(error))
    except asyncio.CancelledError as error:
        state.fail("cancelled by the client")
        raise StreamInterrupted(state.outcome(request_id)) from error
    return state.outcome(request_id)


async def _exchange(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    request_id: str,
    headers: Mapping[str, str],
    state: _Exchange,
) -> None:
    async with session.post(
        url,
        data=io.BytesIO(body),  # aiohttp sends it in pieces: a large one does not stop the loop
        headers={
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",  # a compressor would hold tokens back
            **headers,
            "X-Request-Id": request_id,
        },
        allow_redirects=False,
        trace_request_ctx=state,
    ) as response:
        state.status = response.status
        if response.status != 200 or response.content_type != "text/event-stream":
            excerpt = _words_of_body(await response.content.read(2**14))
            if response.status != 200:
                state.fail(f"HTTP {response.status}: {excerpt}")
            else:
                state.fail(f"expected text/event-stream, got {response.content_type}: {excerpt}")
            return
        parser = EventParser()
        while not state.over:
            data = await response.content.readany()
            at_s = _now()
            if not data:
                state.close(at_s)
            for event in parser.feed(data):
                state.take(event, at_s)
        if state.error is None:
            await _drain(response)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read to the end of the response, so that its connection can serve another request."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError):
        response.close()  # the answer is complete; only the connection is lost


@dataclass
class _Exchange:
    """What is known so far of one request; `take` interprets one event of its stream."""

    sent_s: float | None = None
    headers_s: float | None = None
    end_s: float | None = None
    status: int | None = None
    over: bool = False
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    chunks: list[StreamChunk] = field(default_factory=list)
    uncounted: list[int] = field(default_factory=list)  # chunks that no usage count covers yet
    text: list[str] = field(default_factory=list)

    def fail(self, error: str, at_s: float | None = None) -> None:
        """End with an error, unless the stream is over: nothing after its end counts."""
        if not self.over:
            self.error = error
            self._end(at_s)

    def close(self, at_s: float) -> None:
        """The server closed the stream at `at_s`, without ``[DONE]``."""
        if self.finish_reason is None:
            self.fail("the stream ended without a finish reason", at_s)
        else:
            self.fail("the stream ended without [DONE]", at_s)

    def take(self, event: Event, at_s: float) -> None:
        """Interpret an event that the read at `at_s` completed; nothing counts after the end."""
        if self.over:
            return
        if event.data.strip() == "[DONE]":
            self._done(at_s)
            return
        try:
            frame = json.loads(event.data)
        except ValueError:
            frame = None
        if event.type == "error":
            self.fail(f"error in the stream: {_message_of(frame, event.data)}", at_s)
        elif not isinstance(frame, dict):
            self.fail(f"unreadable frame: {_one_line(event.data)}", at_s)
        elif frame.get("error"):
            self.fail(f"error in the stream: {_message_of(frame, event.data)}", at_s)
        else:
            self._take_frame(frame, at_s)

    def _take_frame(self, frame: Mapping[str, Any], at_s: float) -> None:
        choice = _first(frame.get("choices"))
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        content = delta.get("content")
        text = content if isinstance(content, str) else ""
        count, grown = self._count(frame.get("usage"))
        if count and not self.uncounted:
            carries = bool(choice) and grown > 0  # the final usage frame has no choice
        else:
            carries = bool(text or _speaks(delta))
        if carries:
            self.uncounted.append(len(self.chunks))
            self.chunks.append(StreamChunk(at_s, 1, text))
        if text:
            self.text.append(text)
        if count:
            self._spread(grown)
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason

    def _count(self, usage: Any) -> tuple[bool, int]:
        """Take a usage count: whether there was one, and the answer tokens that are new in it."""
        if not isinstance(usage, dict):
            return False, 0
        if isinstance(prompt := usage.get("prompt_tokens"), int):
            self.prompt_tokens = prompt
        if not isinstance(total := usage.get("completion_tokens"), int):
            return False, 0
        known = self.output_tokens or 0
        self.output_tokens = max(known, total)
        return True, self.output_tokens - known

    def _spread(self, tokens: int) -> None:
        """Share `tokens` among the chunks not counted yet; earlier ones take the remainder."""
        n = len(self.uncounted)
        for rank, i in enumerate(self.uncounted):
            share = tokens // n + (rank < tokens % n)
            self.chunks[i] = StreamChunk(self.chunks[i].at_s, share, self.chunks[i].text)
        self.uncounted.clear()

    def _done(self, at_s: float) -> None:
        if self.finish_reason is None:
            self.error = "[DONE] without a finish reason"
        elif self.finish_reason in _FAILED_FINISH:
            self.error = f"the engine gave up: finish reason {self.finish_reason!r}"
        elif self.output_tokens is None:
            self.error = "no token count: the server ignores stream_options.include_usage"
        elif self.output_tokens == 0 or not self.chunks:
            self.error = "the answer has no tokens"
        self._end(at_s)

    def _end(self, at_s: float | None) -> None:
        self.over = True
        self.end_s = _now() if at_s is None else at_s

    def outcome(self, request_id: str) -> StreamOutcome:
        """The frozen result."""
        if self.end_s is None:
            raise RuntimeError(f"request {request_id}: its stream is not over")
        return StreamOutcome(
            request_id=request_id,
            sent_s=self.sent_s,
            headers_s=self.headers_s,
            first_token_s=self.chunks[0].at_s if self.chunks else None,
            last_token_s=self.chunks[-1].at_s if self.chunks else None,
            end_s=self.end_s,
            status=self.status,
            chunks=tuple(self.chunks),
            text="".join(self.text),
            finish_reason=self.finish_reason,
            error=self.error,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )


async def _stamp_sent(
    session: aiohttp.ClientSession,
    context: types.SimpleNamespace,
    params: aiohttp.TraceRequestHeadersSentParams,
) -> None:
    context.trace_request_ctx.sent_s = _now()


async def _stamp_headers(
    session: aiohttp.ClientSession,
    context: types.SimpleNamespace,
    params: aiohttp.TraceRequestEndParams,
) -> None:
    context.trace_request_ctx.headers_s = _now()


def _first(choices: Any) -> dict[str, Any]:
    """The first choice (one is asked for), or an empty one."""
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _speaks(delta: Mapping[str, Any]) -> bool:
    """Whether a delta brings reasoning (under either of its names) or a tool call."""
    return any(delta.get(name) for name in ("reasoning", "reasoning_content", "tool_calls"))


def _message_of(frame: Any, raw: str) -> str:
    """The words of an error frame, in any of its usual shapes."""
    error = frame.get("error", frame) if isinstance(frame, dict) else frame
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return _one_line(error["message"])
    return _one_line(error if isinstance(error, str) else raw)


def _words_of_body(body: bytes) -> str:
    text = body.decode("utf-8", errors="replace")
    try:
        return _message_of(json.loads(text), text)
    except ValueError:
        return _one_line(text) or "empty body"


def _words(error: Exception) -> str:
    return _one_line(f"{type(error).__name__}: {error}".rstrip(": "))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[: _EXCERPT - 1] + "…"
