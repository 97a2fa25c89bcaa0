"""Which experts are marked, given what moving away from them costs."""

from __future__ import annotations

import pytest
import torch

from harness.calibration.protection import (
    Spared,
    loss_increases,
    mark_costliest,
    pretended_steps,
)
from harness.calibration.similarity import CalibrationError


@pytest.mark.parametrize("batch", [1, 3, 8, 100])
def test_decoded_rows_are_dealt_to_steps_of_a_batch(batch: int) -> None:
    decoded = torch.arange(20) >= 4
    steps, count = pretended_steps(decoded, batch)
    assert (steps[:4] == -1).all()
    sizes = steps[4:].bincount(minlength=count).tolist()
    assert sum(sizes) == 16 and len(sizes) == count
    assert all(size == batch for size in sizes[:-1]) and 1 <= sizes[-1] <= batch
    assert torch.equal(pretended_steps(decoded, batch)[0], steps)
    # Neighbours of an answer are not each other's company.
    assert batch > 15 or steps[4:].tolist() != sorted(steps[4:].tolist())


def test_no_decoded_row_makes_no_step() -> None:
    steps, count = pretended_steps(torch.zeros(3, dtype=torch.bool), 4)
    assert (steps.tolist(), count) == ([-1, -1, -1], 0)


def test_asks_for_every_expert_once_in_order() -> None:
    asked: list[Spared | None] = []

    def loss(spared: Spared | None) -> float:
        asked.append(spared)
        return 2.0 if spared is None else 2.0 - spared.expert + spared.layer

    increases = loss_increases(loss, 2, 3)
    assert asked == [None, (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert increases.tolist() == [[0, 1, 2], [-1, 0, 1]]


def test_a_loss_that_is_no_number_is_refused() -> None:
    with pytest.raises(CalibrationError, match="everything re-routed is nan"):
        loss_increases(lambda _: float("nan"), 2, 3)
    with pytest.raises(CalibrationError, match=r"Spared\(layer=0, expert=0\) spared is inf"):
        loss_increases(lambda r: float("inf") if r else 1.0, 2, 3)


def test_marks_the_costliest_lowest_id_on_ties() -> None:
    increases = torch.tensor([[0.1, 0.3, 0.3, 0.2], [-1.0, -3.0, -2.0, -2.0]])
    assert mark_costliest(increases, 2).tolist() == [[0, 1, 1, 0], [1, 0, 1, 0]]
    assert mark_costliest(increases, 0).sum() == 0
    assert mark_costliest(increases, 4).min() == 1
    assert mark_costliest(increases, 2).dtype == torch.uint8
    for count in (-1, 5):
        with pytest.raises(ValueError, match="takes 0 to 4"):
            mark_costliest(increases, count)
