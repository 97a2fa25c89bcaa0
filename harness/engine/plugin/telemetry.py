"""What the levers did, counted where they act and fetched between cells.

Counters live on the device and are written inside the step (in a captured graph too); nothing is read
back until `LeverWorker.drain_telemetry` asks. A step costs the host one small append.
"""

from __future__ import annotations

import base64
import io
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness.engine.plugin.staging import Staging
from kernels.sere.reference import DECODE

MAX_STEPS = 65_536
"""Steps that can be held between two drains; older ones are overwritten and counted as lost."""
MAX_GROUPS = 65_536
"""Image groups whose counts are remembered; the least recently used go first."""

COUNTERS = ("experts_before", "experts_after", "slots_moved")


@dataclass
class VisionLog:
    """Vision tokens before and after, by group."""

    hooked: bool = False
    groups_encoded: int = 0
    _counts: OrderedDict[int, list[tuple[int, int]]] = field(default_factory=OrderedDict)

    def record(self, key: int, counts: list[tuple[int, int]]) -> None:
        """Note what a group's encoder run kept: (before, after) of each image, in order."""
        self.groups_encoded += 1
        self._counts[key] = counts
        self._counts.move_to_end(key)
        if len(self._counts) > MAX_GROUPS:
            self._counts.popitem(last=False)

    def find(self, key: int) -> list[tuple[int, int]] | None:
        """Counts of a group; also for a request that found its rows in a cache."""
        if key in self._counts:
            self._counts.move_to_end(key)
        return self._counts.get(key)


VISION = VisionLog()


@dataclass(frozen=True)
class Step:
    """One engine step with decode rows: its number, when, who decoded, and rows by kind."""

    number: int
    at_s: float
    decode_requests: tuple[str, ...]
    decode_rows: int
    prefill_rows: int


class StepLog:
    """Decode steps on the host, and per layer the device counters of each.

    Attributes:
        counters: [MAX_STEPS, layers, 3] int32 on the device, columns as in `COUNTERS`.
        slot: [1] int64 on the device: the row that the running step writes.
        row_kind: [rows] uint8 on the device: what its rows are, padding beyond them.
        settings: [5] int32 on the device: what the routing lever is set to for it.
    """

    def __init__(self, layers: int, device: torch.device, rows: int) -> None:
        self.counters = torch.zeros(
            MAX_STEPS, layers, len(COUNTERS), dtype=torch.int32, device=device
        )
        self._staging = Staging(rows, device)
        self.slot, self.row_kind = self._staging.slot, self._staging.row_kind
        self.settings = self._staging.settings
        self.steps: list[Step] = []
        self.lost = 0
        self._next = 0

    def begin(
        self, decode_requests: tuple[str, ...], kinds: np.ndarray, settings: Sequence[int]
    ) -> None:
        """Tell the device of the step that is about to run, and open its counters.

        Args:
            decode_requests: those that decode.
            kinds: [rows] uint8, of the step.
            settings: [5], see `RoutingSetting.numbers`.

        Raises:
            RuntimeError: more rows than were planned for.
        """
        self._staging.write(self._next % MAX_STEPS, settings, kinds)
        decode_rows = int(np.count_nonzero(kinds == DECODE))
        if decode_rows:
            rows = (decode_rows, len(kinds) - decode_rows)
            self.steps.append(Step(self._next, time.monotonic(), decode_requests, *rows))
            if len(self.steps) > MAX_STEPS:
                del self.steps[0]
                self.lost += 1
        self._next += 1

    def drain(self) -> tuple[list[Step], np.ndarray, int]:
        """All steps since the last drain, their counters [steps, layers, 3], and how many were lost."""
        live = [s for s in self.steps if s.number > self._next - 1 - MAX_STEPS]
        lost = self.lost + len(self.steps) - len(live)
        rows = torch.tensor([s.number % MAX_STEPS for s in live], dtype=torch.int64)
        counts = self.counters[rows.to(self.counters.device)].cpu().numpy()
        self.steps, self.lost = [], 0
        return live, counts, lost


def per_request(steps: list[Step], counts: np.ndarray) -> dict[str, dict[str, float]]:
    """What each request saw, averaged over its decode steps (and over layers).

    Returns:
        Request id → ``steps``, ``batch_size``, ``experts_before``, ``experts_after``, ``slots_moved``.
    """
    means = counts.mean(axis=1) if counts.size else np.zeros((len(steps), len(COUNTERS)))
    sums: dict[str, np.ndarray] = {}
    for step, mean in zip(steps, means, strict=True):
        row = np.array([1.0, step.decode_rows, *mean])
        for request in step.decode_requests:
            sums[request] = sums[request] + row if request in sums else row
    return {
        request: {
            "steps": int(total[0]),
            "batch_size": float(total[1] / total[0]),
            **{n: float(v / total[0]) for n, v in zip(COUNTERS, total[2:], strict=True)},
        }
        for request, total in sums.items()
    }


def pack_steps(steps: list[Step], counts: np.ndarray) -> str:
    """Steps as a compressed .npz in base64.

    ``at_s``, ``decode_rows`` and ``prefill_rows`` are [steps]; ``experts_before``, ``experts_after``
    and ``slots_moved`` [steps, layers].
    """
    arrays: dict[str, Any] = {
        "at_s": np.array([s.at_s for s in steps], dtype=np.float64),
        "decode_rows": np.array([s.decode_rows for s in steps], dtype=np.int32),
        "prefill_rows": np.array([s.prefill_rows for s in steps], dtype=np.int32),
        **{name: counts[:, :, i] for i, name in enumerate(COUNTERS)},
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return base64.b64encode(buffer.getvalue()).decode()
