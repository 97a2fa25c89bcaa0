"""Which experts are worth protecting: those whose absence costs most.

Re-routing moves an expert's secondary slots to the most similar expert at hand. A protected expert is
never moved away from, and so is read whenever a token picks it; each protected expert costs speed, so
the marks should go where moving away hurts. Load does not say where that is, and similarity only
in part: what counts is what becomes of the answers. So every expert of every layer is moved away
from in turn, alone, to its most similar expert, and the answers' loss is compared with the loss
where nothing is moved.

This module knows no model: whoever has one gives the loss (`harness.calibration.answers` for
checkpoints, `harness.pocket.protect` for the bundled one).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from harness.calibration.similarity import CalibrationError
from kernels.sere.reference import slot_ranks


class Reroute(NamedTuple):
    """One expert's secondary slots moved to another expert.

    Attributes:
        layer: row of the similarity tensor, 0 for the first layer that has experts.
        expert: moved away from.
        target: moved to.
    """

    layer: int
    expert: int
    target: int


Loss = Callable[[Reroute | None], float]
"""Mean loss of a fixed set of answers, with one re-routing or none; the same each time."""


def most_similar(similarity: Tensor) -> Tensor:
    """The expert that each expert is moved to: its most similar other one, the lowest id on ties.

    Args:
        similarity: float [layers, E, E], E > 1.

    Returns:
        int64 [layers, E].
    """
    own = torch.eye(similarity.shape[-1], dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(own, -torch.inf).argmax(-1)


def secondary_slots(ids: Tensor, weights: Tensor, rows: Tensor, primary_experts: int) -> Tensor:
    """The slots that re-routing may change: all but the heaviest of rows that a server decodes.

    Args:
        ids: [rows, slots] integer, experts.
        weights: [rows, slots] float, their shares.
        rows: [rows] bool, those decoded.
        primary_experts: K >= 1, slots of a row that stay.

    Returns:
        bool [rows, slots].
    """
    return (slot_ranks(ids, weights) >= primary_experts) & rows[:, None]


def rerouted(ids: Tensor, secondary: Tensor, reroute: Reroute) -> Tensor:
    """Expert ids once one expert's secondary slots are another's; weights stay as they are.

    Args:
        ids: [rows, slots] integer.
        secondary: bool [rows, slots], see `secondary_slots`.
        reroute: from where to where. Where a row has the target already, it then has it twice, and the
            sum of both weights is its share.

    Returns:
        [rows, slots], the type as given.
    """
    return torch.where(secondary & (ids == reroute.expert), reroute.target, ids)


def loss_increases(loss: Loss, similarity: Tensor) -> Tensor:
    """What moving away from each expert costs.

    Args:
        loss: called once with None, then for every layer and expert in ascending order, so that it
            may keep what the layers below a layer made.
        similarity: float [layers, E, E], E > 1, says where slots go.

    Returns:
        float64 [layers, E], `loss(reroute) - loss(None)`; about 0 or less where it costs nothing.

    Raises:
        CalibrationError: a loss is no finite number.
    """
    targets = most_similar(similarity).tolist()
    plain = finite(loss(None), None)
    rows = []
    for layer, row in enumerate(targets):
        tried = [Reroute(layer, expert, target) for expert, target in enumerate(row)]
        rows.append([finite(loss(reroute), reroute) - plain for reroute in tried])
    return torch.tensor(rows, dtype=torch.float64)


def mark_costliest(increases: Tensor, count: int) -> Tensor:
    """Mark the experts of each layer that cost most to move away from, the lowest id on ties.

    Args:
        increases: float [layers, E], as of `loss_increases`.
        count: experts to mark in each layer, 0 to E.

    Returns:
        uint8 [layers, E] with `count` ones in each row, as `save_protection` takes it.

    Raises:
        ValueError: `count` is out of range.
    """
    experts = increases.shape[1]
    if not 0 <= count <= experts:
        raise ValueError(f"count={count}: takes 0 to {experts}")
    order = increases.argsort(dim=1, descending=True, stable=True)
    marks = torch.zeros(increases.shape, dtype=torch.uint8, device=increases.device)
    return marks.scatter_(1, order[:, :count], 1)


def finite(loss: float, reroute: Reroute | None) -> float:
    """The loss, as it is.

    Raises:
        CalibrationError: it is no finite number.
    """
    if not math.isfinite(loss):
        raise CalibrationError(
            f"the loss with {reroute or 'nothing re-routed'} is {loss}; run the model in a wider type"
        )
    return loss
