"""What a step is told reaches the device whole and in order, however many are on their way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.engine.plugin.staging import NUMBERS, Staging
from kernels.sere import fused

ROWS = 40


def told(number: int) -> tuple[int, list[int], np.ndarray]:
    """Slot, settings and kinds of a step; all differ from those of its neighbours."""
    rng = np.random.default_rng(number)
    kinds = rng.integers(1, 3, size=int(rng.integers(0, ROWS + 1)), dtype=np.uint8)
    return 2**40 + number, [number * 7 + i for i in range(NUMBERS)], kinds


def check(slot: torch.Tensor, settings: torch.Tensor, kinds: torch.Tensor, number: int) -> None:
    want_slot, want_settings, want_kinds = told(number)
    assert slot.tolist() == [want_slot]
    assert settings.tolist() == want_settings
    assert kinds.tolist() == want_kinds.tolist() + [0] * (ROWS - len(want_kinds))


def test_a_step_leaves_nothing_of_the_one_before() -> None:
    staging = Staging(ROWS, torch.device("cpu"))
    for number in range(30):
        staging.write(*told(number))
        check(staging.slot, staging.settings, staging.row_kind, number)


def test_settings_are_as_many_as_the_kernel_reads() -> None:
    staging = Staging(ROWS, torch.device("cpu"))
    assert len(fused.SETTINGS) == NUMBERS == len(staging.settings)
    assert staging.settings.dtype == torch.int32
    with pytest.raises(RuntimeError, match="a step of 41 rows; 40 were planned for"):
        staging.write(0, [0] * NUMBERS, np.ones(ROWS + 1, dtype=np.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_steps_that_are_on_their_way_do_not_mix() -> None:
    """The GPU is kept busy, so that many steps are written before the first is read."""
    staging = Staging(ROWS, torch.device("cuda"))
    seen = []
    for number in range(100):
        if number % 10 == 0:
            torch.cuda._sleep(20_000_000)
        staging.write(*told(number))
        seen.append([t.clone() for t in (staging.slot, staging.settings, staging.row_kind)])
    for number, (slot, settings, kinds) in enumerate(seen):
        check(slot, settings, kinds, number)
