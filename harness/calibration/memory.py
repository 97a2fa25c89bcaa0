"""How much memory a calibration will take, and how much there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.calibration.similarity import CalibrationError

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Need:
    """Bytes that a calibration takes at most, all at the same time.

    Attributes:
        model: its weights, in the type that it runs in.
        sums: what is added up, in host memory.
        work: what passes through, where the model runs.
    """

    model: int
    sums: int
    work: int


def size(count: float) -> str:
    """Bytes in the decimal unit that suits them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def check_fits(need: Need, device: str, free: Mapping[str, int | None]) -> None:
    """Whether everything fits at once.

    Args:
        need: in all.
        device: where the model runs. A GPU gets it by way of the host's memory.
        free: bytes by device, ``cpu`` and `device` among them; None where that is not known.

    Raises:
        CalibrationError: it does not; the message says what takes how much.
    """
    wanted = {"cpu": need.model + need.sums}
    wanted[device] = need.model + need.work + (need.sums if device == "cpu" else 0)
    for where, count in wanted.items():
        available = free[where]
        if available is not None and count > available:
            raise CalibrationError(
                f"device={device}: {where} has {size(available)} of memory free, and this takes "
                f"{size(count)}: model {size(need.model)}, sums {size(need.sums)}, work "
                f"{size(need.work)}; take dtype=bfloat16, fewer max_tokens, or a larger machine"
            )


def free_bytes(device: str) -> int | None:
    """Memory that a program may still take, on the host or on a GPU; None if it cannot be told."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    known = [n for n in (_system_free(), _cgroup_free()) if n is not None]
    return min(known) if known else None


def _system_free() -> int | None:
    return _entry(MEMINFO, "MemAvailable:", 1024)


def _cgroup_free() -> int | None:
    """Of the container's limit, where there is one; cached files give way, so they count as free."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return None
    return limit - used + (_entry(CGROUP / "memory.stat", "inactive_file", 1) or 0)


def _entry(file: Path, name: str, unit: int) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.split()[:1] == [name]]
    return int(found[0][1]) * unit if found else None
