"""The load generator: who is sent when, and that no record is ever lost."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from harness.engine.stream import (
    StreamChunk,
    StreamInterrupted,
    StreamOutcome,
    open_session,
    stream_chat,
)
from harness.load.clock import now
from harness.load.generator import LoadRun, PreparedRequest, Progress, run_load
from harness.load.schedule import Schedule


def open_loop(*offsets_s: float) -> Schedule:
    n = len(offsets_s)
    return Schedule("constant", 0, 1.0, None, None, offsets_s, tuple(range(n)))


def closed_loop(n: int, concurrency: int) -> Schedule:
    return Schedule("closed", 0, None, None, concurrency, (0.0,) * n, tuple(range(n)))


def requests(n: int) -> list[PreparedRequest]:
    return [PreparedRequest(f"r-{i}", f"s-{i}", b"{}") for i in range(n)]


def outcome(request: PreparedRequest, sent_s: float, error: str | None = None) -> StreamOutcome:
    at_s = now()
    return StreamOutcome(
        request_id=request.request_id,
        sent_s=sent_s,
        headers_s=sent_s,
        first_token_s=at_s,
        last_token_s=at_s,
        end_s=at_s,
        status=200,
        chunks=(StreamChunk(at_s, 1, "a"),),
        text="a",
        finish_reason=None if error else "stop",
        error=error,
        prompt_tokens=1,
        output_tokens=1,
    )


def run(
    schedule: Schedule,
    send: Callable[[PreparedRequest], Awaitable[StreamOutcome]],
    *,
    on_progress: Callable[[Progress], None] | None = None,
    abort: Callable[[], Awaitable[str]] | None = None,
    cancel_when: Callable[[], bool] | None = None,
) -> LoadRun:
    async def main() -> LoadRun:
        task = asyncio.create_task(
            run_load(
                schedule=schedule,
                bodies=requests(len(schedule)),
                send=send,
                on_progress=on_progress,
                abort=abort,
                origin_delay_s=0.01,
            )
        )
        if cancel_when:
            await asyncio.sleep(0.001)  # a task cancelled before its first step never runs
            while not cancel_when():
                await asyncio.sleep(0.001)
            task.cancel()
        return await asyncio.wait_for(task, 30)

    return asyncio.run(main())


def ids(result: LoadRun) -> list[str]:
    return [r.request_id for r in result.records]


def test_a_stalled_server_does_not_hold_requests_back() -> None:
    n = 20
    sent: list[str] = []
    all_sent = asyncio.Event()

    async def send(request: PreparedRequest) -> StreamOutcome:
        at_s = now()
        sent.append(request.request_id)
        if len(sent) == n:
            all_sent.set()
        await all_sent.wait()  # nobody is answered before everybody has asked
        return outcome(request, at_s)

    result = run(open_loop(*(0.005 * (i + 1) for i in range(n))), send)
    assert result.stopped is None
    assert all(r.good for r in result.records)
    assert ids(result) == [f"r-{i}" for i in range(n)]
    for i, record in enumerate(result.records):
        assert record.scheduled_s == 0.005 * (i + 1)
        assert record.sent_s is not None and record.sent_s >= record.scheduled_s
        assert record.first_token_s is not None
        assert record.first_token_s >= result.records[-1].scheduled_s


def test_lateness_does_not_add_up() -> None:
    n, busy_s, gap_s = 30, 0.005, 0.01

    async def send(request: PreparedRequest) -> StreamOutcome:
        at_s = now()
        time.sleep(busy_s)  # holds the event loop, as an encoder would
        return outcome(request, at_s)

    result = run(open_loop(*(gap_s * (i + 1) for i in range(n))), send)
    lags = [r.sent_s - r.scheduled_s for r in result.records if r.sent_s is not None]
    # With relative sleeps the last ones would be late by all the busy time before them.
    assert min(lags[-5:]) < n * busy_s / 2


def test_requests_due_together_leave_together() -> None:
    in_flight = most = 0

    async def send(request: PreparedRequest) -> StreamOutcome:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        at_s = now()
        await asyncio.sleep(0.01)
        in_flight -= 1
        return outcome(request, at_s)

    assert all(r.good for r in run(open_loop(*([0.0] * 200)), send).records)
    assert most == 200


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    in_flight, seen, frees = 0, [], []

    async def send(request: PreparedRequest) -> StreamOutcome:
        nonlocal in_flight
        in_flight += 1
        seen.append(in_flight)
        at_s = now()
        await asyncio.sleep(0.003)
        in_flight -= 1
        frees.append(now())
        return outcome(request, at_s)

    result = run(closed_loop(20, 3), send)
    assert max(seen) == 3
    assert all(r.good for r in result.records)
    assert ids(result) == [f"r-{i}" for i in range(20)]
    # The scheduled instant is when the slot freed: never before an answer made room.
    for k, record in enumerate(result.records[3:]):
        assert record.scheduled_s + result.origin_s >= frees[k]


def test_more_slots_than_requests() -> None:
    async def send(request: PreparedRequest) -> StreamOutcome:
        return outcome(request, now())

    assert len(run(closed_loop(2, 50), send).records) == 2


def hanging(started: list[str]) -> Callable[[PreparedRequest], Awaitable[StreamOutcome]]:
    """The first request is answered; the others hang, and have a partial outcome when cut."""

    async def send(request: PreparedRequest) -> StreamOutcome:
        at_s = now()
        started.append(request.request_id)
        if request.request_id != "r-0":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError as error:
                raise StreamInterrupted(outcome(request, at_s, "cancelled")) from error
        return outcome(request, at_s)

    return send


@pytest.mark.parametrize(
    "schedule", [open_loop(0.0, 0.0, 0.0, 50.0, 51.0), closed_loop(5, 2)], ids=["open", "closed"]
)
def test_cancelling_loses_nothing(schedule: Schedule) -> None:
    started: list[str] = []
    result = run(schedule, hanging(started), cancel_when=lambda: len(started) == 3)
    assert result.stopped == "interrupted"
    assert ids(result) == [f"r-{i}" for i in range(5)]
    errors = [r.error for r in result.records]
    assert errors == [None, *["cut off: interrupted"] * 2, *["not sent: interrupted"] * 2]
    assert result.records[1].text == "a"  # what had come is kept
    assert result.records[1].sent_s is not None
    assert result.records[4].sent_s is None
    assert not any(r.good for r in result.records[1:])


def test_cancelling_before_the_origin() -> None:
    result = run(open_loop(5.0, 6.0), hanging([]), cancel_when=lambda: True)
    assert [r.error for r in result.records] == ["not sent: interrupted"] * 2


def test_ctrl_c_comes_back_with_the_records() -> None:
    started: list[str] = []

    async def press() -> None:
        while len(started) < 2:
            await asyncio.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    async def main() -> LoadRun:
        pressing = asyncio.create_task(press())
        result = await run_load(
            schedule=open_loop(0.0, 0.0, 60.0), bodies=requests(3), send=hanging(started)
        )
        await pressing
        return result

    result = asyncio.run(main())
    assert result.stopped == "interrupted"
    assert [r.good for r in result.records] == [True, False, False]


def test_a_dead_server_stops_the_load_with_its_reason() -> None:
    started: list[str] = []

    async def died() -> str:
        while len(started) < 2:
            await asyncio.sleep(0.001)
        return "the engine exited with code -9"

    result = run(open_loop(0.0, 0.0, 60.0), hanging(started), abort=died)
    assert result.stopped == "the engine exited with code -9"
    assert [r.error for r in result.records] == [
        None,
        "cut off: the engine exited with code -9",
        "not sent: the engine exited with code -9",
    ]


def test_a_watcher_that_fails_stops_the_load_too() -> None:
    async def broken() -> str:
        raise RuntimeError("no such process")

    result = run(open_loop(60.0), hanging([]), abort=broken)
    assert result.stopped == "RuntimeError: no such process"


def test_a_watcher_is_given_up_when_the_load_ends() -> None:
    given_up = False

    async def watch() -> str:
        nonlocal given_up
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            given_up = True
            raise
        return "never"

    async def send(request: PreparedRequest) -> StreamOutcome:
        return outcome(request, now())

    assert run(open_loop(0.0), send, abort=watch).stopped is None
    assert given_up


def test_a_fault_of_one_request_is_its_record() -> None:
    async def send(request: PreparedRequest) -> StreamOutcome:
        if request.request_id == "r-1":
            raise KeyError("x")
        return outcome(request, now())

    result = run(open_loop(0.0, 0.0, 0.0), send)
    assert [r.good for r in result.records] == [True, False, True]
    assert result.records[1].error == "client: KeyError: 'x'"
    assert result.records[1].end_s is not None


def test_progress_counts_and_its_faults_are_raised() -> None:
    told: list[Progress] = []

    async def send(request: PreparedRequest) -> StreamOutcome:
        return outcome(request, now(), "bad" if request.request_id == "r-1" else None)

    run(open_loop(0.0, 0.001, 0.002), send, on_progress=told.append)
    assert (told[-1].total, told[-1].sent, told[-1].done, told[-1].failed) == (3, 3, 3, 1)
    assert [p.sent for p in told] == sorted(p.sent for p in told)

    def broken(progress: Progress) -> None:
        raise RuntimeError("bar")

    with pytest.raises(RuntimeError, match="bar"):
        run(open_loop(0.0, 0.0), send, on_progress=broken)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_during_the_load_and_is_put_back(enabled: bool) -> None:
    during: list[bool] = []

    async def send(request: PreparedRequest) -> StreamOutcome:
        during.append(gc.isenabled())
        return outcome(request, now())

    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        run(open_loop(0.0), send)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert during == [False]
    assert gc.get_freeze_count() == 0


def test_bodies_and_schedule_must_match() -> None:
    async def main(bodies: list[PreparedRequest]) -> None:
        await run_load(schedule=open_loop(0.0, 0.0), bodies=bodies, send=hanging([]))

    with pytest.raises(ValueError, match="1 for a schedule of 2"):
        asyncio.run(main(requests(1)))
    with pytest.raises(ValueError, match="repeat"):
        asyncio.run(main(requests(1) * 2))


def test_with_the_real_client_against_a_server_that_dies() -> None:
    frame = (
        b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}],'
        b'"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    )

    async def main() -> LoadRun:
        streaming = 0
        enough = asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal streaming
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(frame)
            streaming += 1
            if streaming == 3:
                await asyncio.sleep(0.1)
                enough.set()
            await asyncio.sleep(60)
            return response

        async def died() -> str:
            await enough.wait()
            return "the engine is gone"

        app = web.Application()
        app.router.add_post("/", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with open_session() as session:

            async def send(r: PreparedRequest) -> StreamOutcome:
                return await stream_chat(
                    session, f"http://{host}:{port}/", r.body, r.request_id, 30
                )

            result = await run_load(
                schedule=open_loop(0.0, 0.01, 0.02, 60.0), bodies=requests(4), send=send, abort=died
            )
        await runner.cleanup()
        return result

    result = asyncio.run(main())
    assert [r.error for r in result.records[:3]] == ["cut off: the engine is gone"] * 3
    assert result.records[3].error == "not sent: the engine is gone"
    for record in result.records[:3]:
        assert record.text == "a"
        assert record.first_token_s is not None and record.sent_s is not None
        assert record.scheduled_s <= record.sent_s <= record.first_token_s
