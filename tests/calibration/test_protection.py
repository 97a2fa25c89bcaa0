"""Which experts are marked, given what moving away from them costs."""

from __future__ import annotations

import pytest
import torch

from harness.calibration.protection import (
    Reroute,
    loss_increases,
    mark_costliest,
    most_similar,
    rerouted,
    secondary_slots,
)
from harness.calibration.similarity import CalibrationError

SIMILARITY = torch.tensor(
    [
        [[1.0, 0.2, 0.9], [0.2, 1.0, 0.2], [0.9, 0.3, 1.0]],
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.6], [0.0, 0.0, 1.0]],
    ]
)


def test_most_similar_other_expert_lowest_on_ties() -> None:
    assert most_similar(SIMILARITY).tolist() == [[2, 0, 0], [1, 2, 0]]


def test_only_light_slots_of_decoded_rows_are_moved() -> None:
    ids = torch.tensor([[0, 1, 2], [2, 0, 1], [2, 0, 1]])
    weights = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.4, 0.3], [0.5, 0.3, 0.2]])
    decoded = torch.tensor([True, True, False])
    secondary = secondary_slots(ids, weights, decoded, 2)
    # Of equal weights the lower expert is the heavier.
    assert secondary.int().tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert rerouted(ids, secondary, Reroute(0, 0, 2)).tolist() == [[2, 1, 2], [2, 0, 1], [2, 0, 1]]
    assert rerouted(ids, secondary, Reroute(0, 1, 2)).tolist() == ids.tolist()
    assert secondary_slots(ids, weights, decoded, 3).sum() == 0


def test_asks_for_every_expert_once_in_order() -> None:
    asked: list[Reroute | None] = []

    def loss(reroute: Reroute | None) -> float:
        asked.append(reroute)
        return 2.0 if reroute is None else 2.0 + reroute.expert - reroute.layer

    increases = loss_increases(loss, SIMILARITY)
    assert asked == [None, (0, 0, 2), (0, 1, 0), (0, 2, 0), (1, 0, 1), (1, 1, 2), (1, 2, 0)]
    assert increases.tolist() == [[0, 1, 2], [-1, 0, 1]]


def test_a_loss_that_is_no_number_is_refused() -> None:
    with pytest.raises(CalibrationError, match="nothing re-routed is nan"):
        loss_increases(lambda _: float("nan"), SIMILARITY)
    with pytest.raises(CalibrationError, match="expert=0, target=2"):
        loss_increases(lambda r: float("inf") if r else 1.0, SIMILARITY)


def test_marks_the_costliest_lowest_id_on_ties() -> None:
    increases = torch.tensor([[0.1, 0.3, 0.3, 0.2], [-1.0, -3.0, -2.0, -2.0]])
    assert mark_costliest(increases, 2).tolist() == [[0, 1, 1, 0], [1, 0, 1, 0]]
    assert mark_costliest(increases, 0).sum() == 0
    assert mark_costliest(increases, 4).min() == 1
    assert mark_costliest(increases, 2).dtype == torch.uint8
    for count in (-1, 5):
        with pytest.raises(ValueError, match="takes 0 to 4"):
            mark_costliest(increases, count)
