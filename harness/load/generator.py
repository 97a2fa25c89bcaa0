"""The load generator: sends prepared requests as a schedule says, and keeps a record of each.

An open loop aims at absolute instants and waits for nobody: a stalled server changes when answers
come, never when requests go. Each request keeps its scheduled *and* its sent instant, so that delay
on this side of the socket shows as dispatch lag and is not taken for the server's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from harness.engine.stream import StreamInterrupted, StreamOutcome
from harness.load.clock import collector_paused, now, sleep_until
from harness.load.record import Chunk, RequestRecord
from harness.load.schedule import Schedule


@dataclass(frozen=True)
class PreparedRequest:
    """A request whose body is encoded: all that is left to do is to send it."""

    request_id: str
    sample_id: str
    body: bytes


@dataclass(frozen=True)
class Progress:
    """How far a load is: counts of requests, and seconds since its origin (negative before it)."""

    total: int
    sent: int
    done: int
    failed: int
    elapsed_s: float


@dataclass(frozen=True)
class LoadRun:
    """What a load left.

    Attributes:
        records: one for every request of the schedule, in its order, whatever happened.
        origin_s: instant of offset 0, on the clock of `harness.load.clock.now`; instants in the
            records count from it.
        stopped: why the load ended early; `None` if it ran to its end.
    """

    records: tuple[RequestRecord, ...]
    origin_s: float
    stopped: str | None


Send = Callable[[PreparedRequest], Awaitable[StreamOutcome]]


async def run_load(
    *,
    schedule: Schedule,
    bodies: Sequence[PreparedRequest],
    send: Send,
    on_progress: Callable[[Progress], None] | None = None,
    abort: Callable[[], Awaitable[str]] | None = None,
    origin_delay_s: float = 0.1,
) -> LoadRun:
    """Send every request of `schedule` and wait for every answer.

    Args:
        schedule: when to send. An open loop sends request i at its offset; a closed loop sends the
            next request when one of `schedule.concurrency` slots frees, and that is its scheduled
            instant.
        bodies: one prepared request for each of the schedule's, in its order.
        send: sends one and returns its outcome, or raises `StreamInterrupted` when cancelled. Any
            other exception becomes the record's error.
        on_progress: told after each sending and each ending; must be quick.
        abort: called once; when what it returns resolves, the load stops, with that text as the
            reason (also if it raises). Given up when the load ends first.
        origin_delay_s: from this call to the schedule's offset 0 [s].

    Returns:
        The records. On abort, and when the calling task is cancelled (Ctrl-C), streams under way
        are cut and requests not sent yet are recorded as failed; nothing is lost and nothing is
        raised. After a cancellation `LoadRun.stopped` is ``"interrupted"``, and it is for the
        caller to go no further.

    Raises:
        ValueError: `bodies` and `schedule` differ in length, or request ids repeat.
    """
    if len(bodies) != len(schedule):
        raise ValueError(f"bodies: {len(bodies)} for a schedule of {len(schedule)} requests")
    if len({b.request_id for b in bodies}) < len(bodies):
        raise ValueError("bodies: request ids repeat")
    with collector_paused():
        load = _Load(schedule, bodies, send, on_progress, now() + origin_delay_s)
        stopped = await _run(load, abort)
    return LoadRun(load.records(stopped), load.origin_s, stopped)


async def _run(load: _Load, abort: Callable[[], Awaitable[str]] | None) -> str | None:
    """Drive `load` to its end or to what stops it; the reason, if something did."""
    driver = asyncio.create_task(load.drive())
    watcher = asyncio.create_task(_reason(abort)) if abort else None
    waiting: set[asyncio.Task[None] | asyncio.Task[str]] = {driver}
    if watcher:
        waiting.add(watcher)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stopped = None if driver.done() or watcher is None else watcher.result()
    except asyncio.CancelledError:
        stopped = "interrupted"
    if watcher:
        watcher.cancel()
    if stopped is not None or driver.exception() is not None:
        load.cut(stopped or "the load generator failed")
        driver.cancel()
        await asyncio.wait({driver, *load.tasks})
    if not driver.cancelled():
        driver.result()  # a fault here or in `on_progress` must not pass in silence
    return stopped


async def _reason(abort: Callable[[], Awaitable[str]]) -> str:
    try:
        return await abort()
    except Exception as error:  # whatever the watcher met, the load cannot go on unwatched
        return f"{type(error).__name__}: {error}"


class _Load:
    """One load under way."""

    def __init__(
        self,
        schedule: Schedule,
        bodies: Sequence[PreparedRequest],
        send: Send,
        on_progress: Callable[[Progress], None] | None,
        origin_s: float,
    ) -> None:
        self.origin_s = origin_s
        self.tasks: list[asyncio.Task[None]] = []
        self._schedule = schedule
        self._bodies = bodies
        self._send = send
        self._on_progress = on_progress
        self._records: list[RequestRecord | None] = [None] * len(bodies)
        self._sent = self._done = self._failures = 0
        self._cut: str | None = None
        self._cut_at_s = 0.0

    async def drive(self) -> None:
        """Send everything and wait for everything."""
        if self._schedule.arrival == "closed":
            await self._closed_loop()
        else:
            await self._open_loop()

    async def _open_loop(self) -> None:
        for i, offset_s in enumerate(self._schedule.offsets_s):
            await sleep_until(self.origin_s + offset_s)
            self.tasks.append(asyncio.create_task(self._one(i, offset_s)))
        await asyncio.gather(*self.tasks)

    async def _closed_loop(self) -> None:
        await sleep_until(self.origin_s)
        queue = iter(range(len(self._bodies)))

        async def slot() -> None:
            for i in queue:
                if self._cut is not None:
                    return
                await self._one(i, now() - self.origin_s)

        slots = min(self._schedule.concurrency or 1, len(self._bodies))
        self.tasks.extend(asyncio.create_task(slot()) for _ in range(slots))
        await asyncio.gather(*self.tasks)

    async def _one(self, i: int, scheduled_s: float) -> None:
        request = self._bodies[i]
        due = RequestRecord(request.request_id, request.sample_id, scheduled_s)
        self._sent += 1
        self._tell()
        try:
            record = self._answered(due, await self._send(request))
        except StreamInterrupted as cut:
            record = self._answered(due, cut.outcome)
            if record.error is not None:  # else the answer was complete when the cut came
                record = dataclasses.replace(record, error=self._cut_off())
        except asyncio.CancelledError:
            record = self._failed(due, self._cut_off())
        except Exception as error:  # one request's fault must not take the others' records along
            record = self._failed(due, f"client: {type(error).__name__}: {error}")
        self._records[i] = record
        self._done += 1
        self._failures += not record.good
        self._tell()

    def cut(self, reason: str) -> None:
        """Cancel the streams under way and send no more."""
        self._cut = reason
        self._cut_at_s = now() - self.origin_s
        for task in self.tasks:
            task.cancel()

    def records(self, stopped: str | None) -> tuple[RequestRecord, ...]:
        """One record a request; those never sent say why."""
        return tuple(
            record or self._not_sent(i, stopped or "the load ended")
            for i, record in enumerate(self._records)
        )

    def _not_sent(self, i: int, reason: str) -> RequestRecord:
        request = self._bodies[i]
        closed = self._schedule.arrival == "closed"
        return RequestRecord(
            request.request_id,
            request.sample_id,
            # No slot of a closed loop freed for it: the stop is the first instant it was not due.
            self._cut_at_s if closed else self._schedule.offsets_s[i],
            error=f"not sent: {reason}",
        )

    def _cut_off(self) -> str:
        return f"cut off: {self._cut or 'cancelled'}"

    def _failed(self, due: RequestRecord, error: str) -> RequestRecord:
        return dataclasses.replace(due, end_s=now() - self.origin_s, error=error)

    def _answered(self, due: RequestRecord, outcome: StreamOutcome) -> RequestRecord:
        """The outcome, its instants counted from the origin."""
        origin_s = self.origin_s
        return dataclasses.replace(
            due,
            sent_s=_since(origin_s, outcome.sent_s),
            headers_s=_since(origin_s, outcome.headers_s),
            first_token_s=_since(origin_s, outcome.first_token_s),
            last_token_s=_since(origin_s, outcome.last_token_s),
            end_s=_since(origin_s, outcome.end_s),
            status=outcome.status,
            chunks=tuple(Chunk(c.at_s - origin_s, c.tokens, c.text) for c in outcome.chunks),
            text=outcome.text,
            finish_reason=outcome.finish_reason,
            error=outcome.error,
            prompt_tokens=outcome.prompt_tokens,
            output_tokens=outcome.output_tokens,
        )

    def _tell(self) -> None:
        if self._on_progress:
            self._on_progress(
                Progress(
                    total=len(self._bodies),
                    sent=self._sent,
                    done=self._done,
                    failed=self._failures,
                    elapsed_s=now() - self.origin_s,
                )
            )


def _since(origin_s: float, instant_s: float | None) -> float | None:
    return None if instant_s is None else instant_s - origin_s
