"""The server's process: started, watched, and never left behind. Real processes, no vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from harness.engine.server import EngineError, Server, free_port, likely_cause
from harness.engine.warden import group_alive

# A health endpoint with a child process behind it, as a vLLM server has its engine.
SERVER = textwrap.dedent(
    """
    import http.server, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503 if child.poll() is not None else 200)
            self.end_headers()
        def log_message(self, *args): pass
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)


def start(log: Path, code: str = SERVER, stop_timeout_s: float = 2.0) -> Server:
    port = free_port()
    return Server([sys.executable, "-c", code, str(port)], os.environ, port, log, stop_timeout_s)


def child_of(log: Path) -> int:
    return int(log.read_text().split("child")[1].split()[0])


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_it_becomes_healthy_and_stops_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    server = start(log)
    waits: list[float] = []
    server.wait_until_healthy(30, waits.append)
    child = child_of(log)
    assert server.failure() is None
    server.stop()
    assert gone(server.pid) and gone(child)
    assert not group_alive(server.pid)
    server.stop()  # again changes nothing


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
    server = start(tmp_path / "engine.log", stubborn, stop_timeout_s=0.5)
    server.wait_until_healthy(30)
    child = child_of(tmp_path / "engine.log")
    server.stop()
    assert gone(server.pid) and gone(child)


def test_a_server_that_dies_at_once_tells_its_last_lines_and_the_cause(tmp_path: Path) -> None:
    code = "import sys; print('api_server: error: unrecognized arguments: --speeed 9'); sys.exit(2)"
    server = start(tmp_path / "engine.log", code)
    with pytest.raises(EngineError) as error:
        server.wait_until_healthy(30)
    text = str(error.value)
    assert "status 2" in text
    assert "does not know the flag --speeed 9" in text
    assert "unrecognized arguments" in text.splitlines()[-1]


def test_a_server_that_never_comes_up_is_given_up_and_removed(tmp_path: Path) -> None:
    server = start(
        tmp_path / "engine.log", "print('thinking', flush=True)\nimport time; time.sleep(600)"
    )
    with pytest.raises(EngineError, match=r"not ready after .* \(engine.start_timeout_s=1\)"):
        server.wait_until_healthy(1)
    assert gone(server.pid)


def test_a_killed_server_is_noticed_and_its_child_removed(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    server = start(log)
    server.wait_until_healthy(30)
    child = child_of(log)
    os.kill(server.pid, signal.SIGKILL)
    reason = asyncio.run(asyncio.wait_for(server.watch(), 10))
    assert "ended with status 137" in reason
    assert gone(child)
    server.stop()


def test_a_dead_engine_behind_a_live_server_is_noticed(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    server = start(log)
    try:
        server.wait_until_healthy(30)
        os.kill(child_of(log), signal.SIGKILL)
        assert "503" in asyncio.run(asyncio.wait_for(server.watch(), 10))
    finally:
        server.stop()


def test_a_killed_warden_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    server = start(log)
    server.wait_until_healthy(30)
    child = child_of(log)
    os.kill(server._warden.pid, signal.SIGKILL)
    assert gone(server.pid), "the server must not outlive the warden"
    assert server.failure() is not None
    server.stop()
    assert gone(child)


def test_a_killed_harness_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    harness = textwrap.dedent(
        f"""
        import os, sys, time
        from pathlib import Path
        from harness.engine.server import Server, free_port
        port = free_port()
        command = [sys.executable, "-c", {SERVER!r}, str(port)]
        server = Server(command, os.environ, port, Path({str(log)!r}), 2.0)
        server.wait_until_healthy(30)
        print(server.pid, flush=True)
        time.sleep(600)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", harness], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    child = child_of(log)
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(pid) and gone(child)


@pytest.mark.parametrize(
    ("log", "status", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", 1, "not enough memory"),
        ("Address already in use", 1, "took the port"),
        ("ModuleNotFoundError: No module named 'vllm'", 1, "not installed"),
        ("Model architectures ['FooForCausalLM'] are not supported for now", 1, "FooForCausalLM"),
        ("safetensors_rust.SafetensorError: Error while deserializing header", 1, "damaged"),
        (
            "ValueError: PruneRoute's vision lever cannot serve pipeline_parallel_size > 1",
            1,
            "pipeline",
        ),
        (
            "kernels.sere.nvrtc.CompileError: cuda.bindings.nvrtc is missing (no such module)",
            1,
            "kernel cannot be had: cuda.bindings.nvrtc is missing",
        ),
        ("", 137, "SIGKILL"),
        ("", -9, "SIGKILL"),
    ],
)
def test_known_causes_are_named(log: str, status: int, words: str) -> None:
    assert words in (likely_cause(log, status) or "")


def test_an_unknown_end_is_not_explained_away() -> None:
    assert likely_cause("some new error", 1) is None
