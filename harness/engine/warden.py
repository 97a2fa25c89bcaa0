"""Runs one command and makes sure that nothing of it outlives whoever asked for it.

    python -m harness.engine.warden GRACE_S COMMAND…

The command gets a process group of its own. When it ends, or when standard input closes (its owner let
go, or was killed), the whole group is told to stop and, after the grace, killed. A server leaves
engine processes behind when it is killed; a harness that is killed cannot clean up. This can.

Prints the command's process id, which is its group's too; exits with the command's status.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1


def group_alive(group: int) -> bool:
    """Whether a process group still has a member (a zombie counts until it is reaped)."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def stop_group(group: int, grace_s: float) -> None:
    """SIGTERM to all of a group, SIGKILL to what is left after `grace_s` seconds. Returns when none is."""
    for sig, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        if not group_alive(group):
            return
        try:
            os.killpg(group, sig)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            _reap()
            if not group_alive(group):
                return
            time.sleep(_POLL_S)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run the command until it ends or its owner lets go; gives its exit status."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    # Engine processes whose server was killed become this process's children, and can be reaped.
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        process_group=0,
        preexec_fn=_die_with_parent,
    )
    print(child.pid, flush=True)
    # Signals go the same way as a closed input: through the loop below, once.
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not stopping and child.poll() is None:
        ready, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if ready and not os.read(sys.stdin.fileno(), 1):
            break
    # The group goes as a whole, also when the command itself is already gone.
    status = child.poll()
    stop_group(child.pid, grace_s if status is None else 1.0)
    if status is None:
        status = child.returncode if child.returncode is not None else -signal.SIGTERM
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
