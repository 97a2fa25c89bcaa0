"""One engine for a whole sweep: started here or found elsewhere, its hooks verified, its levers set."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.engine.checkpoint import Checkpoint
from harness.engine.command import (
    SERVED_NAME,
    serve_command,
    serve_environment,
    vllm_version,
    wants_trust_flag,
)
from harness.engine.control import HttpFailure, call
from harness.engine.levers import Hooks, Levers
from harness.engine.probe import probe
from harness.engine.server import EngineError, Server, free_port
from harness.settings import EngineSettings, Settings

SUPPORTED_VLLM = ((0, 26), (0, 33))


@dataclass(frozen=True)
class Engine:
    """A healthy server.

    Attributes:
        url: its base URL.
        model: name under which it serves the model.
        headers: to send with every request.
        levers: its control side.
        hooks: what the plugin holds; `None` without the plugin.
        failure: says why it can serve no more, `None` while it can; quick.
        watch: resolves with the reason when the engine dies.
    """

    url: str
    model: str
    headers: Mapping[str, str]
    levers: Levers
    hooks: Hooks | None
    failure: Callable[[], str | None]
    watch: Callable[[], Awaitable[str]]


@contextlib.contextmanager
def running(
    settings: EngineSettings,
    checkpoint: Checkpoint | None,
    log_path: Path,
    arms: Sequence[Settings],
    on_wait: Callable[[float], None] | None = None,
) -> Iterator[Engine]:
    """Start an engine (or connect to a remote one), check that it can serve all `arms`, and yield it.

    Args:
        settings: how.
        checkpoint: the model; `None` for a remote engine.
        log_path: where a started engine writes.
        arms: settings of all cells that will run on it.
        on_wait: told the seconds waited for it so far.

    Raises:
        EngineError: it does not start, or cannot set a lever that an arm needs.
    """
    if settings.kind == "remote":
        yield _connect(settings, arms)
        return
    assert checkpoint is not None
    check_vllm(vllm_version())
    port = free_port()
    command = serve_command(settings, checkpoint, port, trust_flag=wants_trust_flag())
    # A run that is gone on with keeps what earlier starts said.
    with log_path.open("a") as log:
        log.write(f"$ {json.dumps(command)}\n")
    server = Server(
        command, serve_environment(settings, os.environ), port, log_path, settings.stop_timeout_s
    )
    try:
        server.wait_until_healthy(settings.start_timeout_s, on_wait)
        levers = Levers(server.url)
        hooks = None
        if settings.plugin:
            hooks = levers.describe()
            refuse_unserved(hooks, arms)
            hooks = probe(server.url, SERVED_NAME, {}, levers, hooks)
        yield Engine(server.url, SERVED_NAME, {}, levers, hooks, server.failure, server.watch)
    finally:
        server.stop()


def check_vllm(version: str | None) -> None:
    """Refuse a missing vLLM, or one that the plugin's hooks were not checked against.

    Raises:
        EngineError: with what to install.
    """
    if version is None:
        raise EngineError(
            "vLLM is not installed; run `make doctor`, or `pip install 'pruneroute[gpu]'`"
        )
    major_minor = tuple(int(p) for p in version.split(".")[:2])
    low, high = SUPPORTED_VLLM
    if not low <= major_minor <= high:
        raise EngineError(
            f"vLLM {version} is not supported: PruneRoute hooks into releases "
            f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        )


def refuse_unserved(hooks: Hooks, arms: Sequence[Settings]) -> None:
    """Refuse arms whose levers the engine does not have: a lever is never silently ignored.

    Raises:
        EngineError: naming the lever and the reason.
    """
    routing_reason = hooks.routing_refusal or (
        None if hooks.layers else "the model has no mixture-of-experts layer"
    )
    if not hooks.vision and routing_reason:
        raise EngineError(
            f"the plugin serves neither lever of this model ({hooks.model_class}): it is no "
            f"Qwen2.5-VL, Qwen3-VL or Qwen3.5, and {routing_reason}; set engine.plugin=false to "
            "measure it as it is"
        )
    for arm in arms:
        if arm.vision.prunes and not hooks.vision:
            raise EngineError(
                f"vision.retain_ratio={arm.vision.retain_ratio}: {hooks.model_class} has no vision "
                "lever (it is built for Qwen2.5-VL, Qwen3-VL and Qwen3.5); take 1.0"
            )
        if arm.routing.policy != "off" and routing_reason:
            raise EngineError(f"routing.policy={arm.routing.policy}: {routing_reason}")


def _connect(settings: EngineSettings, arms: Sequence[Settings]) -> Engine:
    """A server that someone else started: found, asked for its model, and never stopped."""
    assert settings.url is not None
    url = settings.url.rstrip("/").removesuffix("/v1")
    headers = {}
    if settings.api_key_env is not None:
        key = os.environ.get(settings.api_key_env)
        if not key:
            raise EngineError(
                f"engine.api_key_env={settings.api_key_env}: no such environment variable is set"
            )
        headers["Authorization"] = f"Bearer {key}"
    model = _served_model(url, headers)
    levers = Levers(url, headers)
    hooks = None
    if settings.plugin:
        hooks = levers.describe()
        refuse_unserved(hooks, arms)
        hooks = probe(url, model, headers, levers, hooks)
    if any(a.load.caches == "cold" for a in arms):
        try:
            levers.reset_caches()
        except EngineError as e:
            raise EngineError(
                f"load.caches=cold: the caches of this server cannot be emptied ({e}); take "
                "load.caches=warm"
            ) from e

    async def watch() -> str:
        # Requests to a dead endpoint fail by themselves; there is no process to look at.
        await asyncio.Event().wait()
        raise AssertionError

    return Engine(url, model, headers, levers, hooks, lambda: None, watch)


def _served_model(url: str, headers: Mapping[str, str]) -> str:
    try:
        answer = call(f"{url}/v1/models", timeout_s=30, headers=headers)
        model = json.loads(answer)["data"][0]["id"]
    except (HttpFailure, ValueError, KeyError, IndexError, TypeError) as e:
        raise EngineError(
            f"engine.url={url}: asked {url}/v1/models for a model and got: {e}"
        ) from e
    return str(model)
