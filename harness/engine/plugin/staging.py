"""What the device is told of every step, sent ahead of it without waiting for the steps before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

DEPTH = 4
"""Steps that can be on their way at once; vLLM schedules one ahead."""
NUMBERS = 5
"""As many as `kernels.sere.fused.SETTINGS`."""
_SLOT, _HEAD = 8, 32
"""Bytes: the slot, and all before the rows' kinds."""


class Staging:
    """A step's number, what the lever is set to and a kind for each row, where captured graphs read them.

    On a GPU they go from page-locked memory in one asynchronous copy: one from ordinary memory would
    have the host wait for every step before it, and undo asynchronous scheduling.

    Attributes:
        slot: [1] int64 on the device.
        settings: [`NUMBERS`] int32 on the device.
        row_kind: [rows] uint8 on the device; 0 beyond the rows of the step.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._there = torch.zeros(_HEAD + rows, dtype=torch.uint8, device=device)
        self.slot = self._there[:_SLOT].view(torch.int64)
        self.settings = self._there[_SLOT : _SLOT + 4 * NUMBERS].view(torch.int32)
        self.row_kind = self._there[_HEAD:]
        # How many rows of the last step are not 0.
        self._used = 0
        self._turn = 0
        self._here: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        if self._there.is_cuda:
            self._here = [
                torch.zeros(_HEAD + rows, dtype=torch.uint8).pin_memory() for _ in range(DEPTH)
            ]
            self._sent = [torch.cuda.Event() for _ in range(DEPTH)]

    def write(self, slot: int, settings: Sequence[int], kinds: np.ndarray) -> None:
        """For the step that is about to run.

        Args:
            slot: its number.
            settings: `NUMBERS` of 32 bits.
            kinds: [rows of the step] uint8.

        Raises:
            RuntimeError: more rows than were planned for.
        """
        count = len(kinds)
        if count > len(self.row_kind):
            raise RuntimeError(f"a step of {count} rows; {len(self.row_kind)} were planned for")
        size = _HEAD + max(count, self._used)
        self._used = count
        if not self._here:
            _fill(self._there.numpy(), slot, settings, kinds, size)
            return
        self._turn = (self._turn + 1) % DEPTH
        here, sent = self._here[self._turn], self._sent[self._turn]
        sent.synchronize()
        _fill(here.numpy(), slot, settings, kinds, size)
        self._there[:size].copy_(here[:size], non_blocking=True)
        sent.record()


def _fill(
    into: np.ndarray, slot: int, settings: Sequence[int], kinds: np.ndarray, size: int
) -> None:
    into[:_SLOT].view(np.int64)[0] = slot
    into[_SLOT : _SLOT + 4 * NUMBERS].view(np.int32)[:] = settings
    into[_HEAD : _HEAD + len(kinds)] = kinds
    into[_HEAD + len(kinds) : size] = 0
