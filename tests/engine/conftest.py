"""Real servers for the tests that need one, shared by the tests of a module: an idle one takes a core."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from harness.engine.checkpoint import read_checkpoint
from harness.engine.command import SERVED_NAME, serve_command, serve_environment, wants_trust_flag
from harness.engine.server import Server, free_port
from harness.help import conf_folder
from harness.pocket.model import ensure
from harness.settings import EngineSettings

# The engine has a core to itself; a second thread here would wait for it at every operation.
torch.set_num_threads(1)


@dataclass(frozen=True)
class RunningServer:
    """Where a test's server is, and what it serves."""

    url: str
    model: str
    model_path: Path
    server: Server


def engine_settings(**changes: object) -> EngineSettings:
    """`conf/engine/cpu.yaml` with changes, in fp32 so that greedy answers compare exactly."""
    tree = yaml.safe_load((conf_folder() / "engine" / "cpu.yaml").read_text())
    tree["extra_args"] = tuple(tree["extra_args"])
    return dataclasses.replace(EngineSettings(**tree), **{"dtype": "float32", **changes})  # type: ignore[arg-type]


ServerWith = Callable[..., contextlib.AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session")
def server_with(tmp_path_factory: pytest.TempPathFactory) -> ServerWith:
    """Start a server for a `with` block: `server_with(plugin=True, max_num_batched_tokens=64)`.

    `model_path` names another checkpoint than the bundled one.
    """

    @contextlib.contextmanager
    def start(model_path: Path | None = None, **changes: object) -> Iterator[RunningServer]:
        settings = engine_settings(**changes)
        model, port = read_checkpoint(model_path or ensure()), free_port()
        log = tmp_path_factory.mktemp("engine") / "engine.log"
        server = Server(
            serve_command(settings, model, port, trust_flag=wants_trust_flag()),
            serve_environment(settings, os.environ),
            port,
            log,
            settings.stop_timeout_s,
        )
        try:
            server.wait_until_healthy(settings.start_timeout_s)
            yield RunningServer(server.url, SERVED_NAME, model.path, server)
        finally:
            server.stop()

    return start


@pytest.fixture(scope="module")
def plugin_server(server_with: ServerWith) -> Iterator[RunningServer]:
    """A server with the plugin."""
    with server_with(plugin=True) as server:
        yield server


@pytest.fixture(scope="module")
def stock_server(server_with: ServerWith) -> Iterator[RunningServer]:
    """The same server without the plugin."""
    with server_with(plugin=False) as server:
        yield server
