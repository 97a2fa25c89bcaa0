"""One cell on a running engine: set the levers, warm up, measure, and join what the engine saw."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.datasets.sample import Image, Sample
from harness.engine.bodies import encode
from harness.engine.engine import Engine
from harness.engine.levers import Telemetry
from harness.engine.server import EngineError
from harness.engine.stream import StreamOutcome, open_session, stream_chat
from harness.load.generator import LoadRun, PreparedRequest, Progress, run_load
from harness.load.record import RequestRecord
from harness.load.schedule import Schedule, draw
from harness.plan import Cell
from harness.scoring import score
from harness.settings import LoadSettings, Settings
from harness.workload import Workload
from kernels.visionzip.budget import kept_count

_WARMUP_CONCURRENCY = 4
_DEATH_SHOWS_S = 4.0


@dataclass(frozen=True)
class CellOutcome:
    """What a cell left.

    Attributes:
        schedule: what was replayed.
        records: one for each request of the schedule, scored.
        steps: per-step telemetry as .npz bytes, where the engine gives it.
        failure: why the cell as a whole does not count; `None` if it does.
        stopped: why the load ended early (the engine died, or ``interrupted``); `None` if it did not.
    """

    schedule: Schedule
    records: tuple[RequestRecord, ...]
    steps: bytes | None
    failure: str | None
    stopped: str | None


async def run_cell(
    cell: Cell,
    engine: Engine,
    workload: Workload,
    similarity_path: str | None,
    on_progress: Callable[[Progress], None],
) -> CellOutcome:
    """Run one cell. Whatever goes wrong ends up in the outcome.

    Args:
        cell: what to run.
        engine: on what; no request of anybody else's may be running on it.
        workload: what to ask.
        similarity_path: the matrices, for a cell that re-routes.
        on_progress: told as requests are sent and answered.
    """
    settings = cell.settings
    schedule = draw(settings.load, len(workload.samples))
    asked = [workload.samples[i] for i in schedule.order]
    bodies = _prepare(asked, engine, settings, f"pr-{cell.id}")
    try:
        _set_levers(engine, settings, similarity_path)
        run, telemetry = await _measure(engine, settings, workload, schedule, bodies, on_progress)
    except EngineError as e:
        stopped = e.reason if isinstance(e, _Stopped) else await _death(engine)
        reason = stopped or first_line(str(e))
        error = f"not sent: {reason}"
        unsent = tuple(
            RequestRecord(b.request_id, b.sample_id, offset, error=error)
            for b, offset in zip(bodies, schedule.offsets_s, strict=True)
        )
        return CellOutcome(schedule, _scored(unsent, asked), None, reason, stopped)
    records = _scored(_joined(run.records, telemetry), asked)
    failure = run.stopped or _broken_promise(records, asked, settings, telemetry)
    return CellOutcome(
        schedule, records, telemetry.steps if telemetry else None, failure, run.stopped
    )


def _set_levers(engine: Engine, settings: Settings, similarity_path: str | None) -> None:
    if engine.hooks is not None and engine.hooks.layers and engine.hooks.routing_refusal is None:
        engine.levers.set_routing(settings.routing, similarity_path)
    if settings.load.caches == "cold":
        engine.levers.reset_caches()


async def _measure(
    engine: Engine,
    settings: Settings,
    workload: Workload,
    schedule: Schedule,
    bodies: Sequence[PreparedRequest],
    on_progress: Callable[[Progress], None],
) -> tuple[LoadRun, Telemetry | None]:
    """Warm up, empty the caches again, run the load, and fetch what the engine saw of it."""
    url = f"{engine.url}/v1/chat/completions"

    async def watch() -> str:
        return first_line(await engine.watch())

    async with open_session() as session:

        async def send(request: PreparedRequest) -> StreamOutcome:
            return await stream_chat(
                session,
                url,
                request.body,
                request.request_id,
                timeout_s=settings.load.request_timeout_s,
                headers=engine.headers,
            )

        warmups = workload.warmups[: settings.load.warmup_requests]
        if warmups:
            warm = await run_load(
                schedule=draw(_warmup_load(settings.load, len(warmups)), len(warmups)),
                bodies=_prepare(warmups, engine, settings, "pr-warmup"),
                send=send,
                abort=watch,
            )
            if warm.stopped is not None:
                raise _Stopped(warm.stopped)
            if settings.load.caches == "cold":
                engine.levers.reset_caches()
        if engine.hooks is not None:
            engine.levers.drain()
        run = await run_load(
            schedule=schedule, bodies=bodies, send=send, on_progress=on_progress, abort=watch
        )
    if engine.hooks is None or (run.stopped is not None and engine.failure() is not None):
        return run, None
    return run, engine.levers.drain()


async def _death(engine: Engine) -> str | None:
    """Whether a control call failed because the engine is dying: that shows a moment later."""
    deadline = asyncio.get_running_loop().time() + _DEATH_SHOWS_S
    while asyncio.get_running_loop().time() < deadline:
        failure = engine.failure()
        if failure is not None:
            return first_line(failure)
        await asyncio.sleep(0.2)
    return None


class _Stopped(EngineError):
    """The warm-up was stopped, so that nothing was measured; `reason` as in `LoadRun.stopped`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _warmup_load(load: LoadSettings, requests: int) -> LoadSettings:
    return dataclasses.replace(
        load,
        arrival="closed",
        qps=None,
        concurrency=min(_WARMUP_CONCURRENCY, requests),
        requests=requests,
    )


def _prepare(
    samples: Sequence[Sample], engine: Engine, settings: Settings, prefix: str
) -> list[PreparedRequest]:
    """Bodies, encoded before any clock starts."""
    processor: Mapping[str, Any] | None = None
    if engine.hooks is not None and engine.hooks.vision:
        processor = dataclasses.asdict(settings.vision)
    w = settings.workload
    return [
        PreparedRequest(
            f"{prefix}-{i:05d}",
            s.id,
            encode(
                s,
                model=engine.model,
                max_tokens=w.max_tokens,
                temperature=w.temperature,
                ignore_eos=w.ignore_eos,
                seed=w.seed,
                mm_processor_kwargs=processor if s.images else None,
            ),
        )
        for i, s in enumerate(samples)
    ]


def _joined(
    records: Sequence[RequestRecord], telemetry: Telemetry | None
) -> tuple[RequestRecord, ...]:
    """Records with what the engine saw of them."""
    if telemetry is None:
        return tuple(records)
    return tuple(
        dataclasses.replace(
            r,
            images=telemetry.images.get(r.request_id),
            routing=telemetry.routing.get(r.request_id),
        )
        for r in records
    )


def _scored(
    records: Sequence[RequestRecord], samples: Sequence[Sample]
) -> tuple[RequestRecord, ...]:
    return tuple(score(r, s) for r, s in zip(records, samples, strict=True))


def _broken_promise(
    records: Sequence[RequestRecord],
    samples: Sequence[Sample],
    settings: Settings,
    telemetry: Telemetry | None,
) -> str | None:
    """What the levers did that they should not have; `None` if all is as set."""
    if telemetry is None:
        return None
    if telemetry.lost_steps:
        return (
            f"telemetry of {telemetry.lost_steps} engine steps was lost; take fewer load.requests"
        )
    vision = settings.vision
    for record, sample in zip(records, samples, strict=True):
        if not record.good or not sample.images:
            continue
        if record.images is None or len(record.images) != len(sample.images):
            return (
                f"request {record.request_id}: the engine does not say what it kept of its images"
            )
        start = 0
        for message in sample.messages:  # every turn has a budget of its own
            count = sum(isinstance(p, Image) for p in message.parts)
            turn, start = record.images[start : start + count], start + count
            if not turn:
                continue
            ratio = vision.retain_ratio if vision.prunes else 1.0
            due = kept_count([i.before for i in turn], ratio, vision.min_tokens_per_image)
            kept = sum(i.after for i in turn)
            # The sides of a smaller image are whole tokens, so that it can have a few less.
            if kept > due or (kept < due and vision.policy != "downscale"):
                return (
                    f"request {record.request_id}: the engine kept {kept} vision tokens of a turn "
                    f"where vision.retain_ratio={vision.retain_ratio} asks for {due}"
                )
    return None


def first_line(text: str) -> str:
    """The first line of a message that may go on with a log's tail."""
    return text.splitlines()[0] if text else text
