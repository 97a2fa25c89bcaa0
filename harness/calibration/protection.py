"""Which experts are worth protecting: those that re-routing away from costs most.

Re-routing moves an expert's secondary slots to the most similar expert at hand. A protected expert is
never moved away from, and so is read whenever a token picks it; each protected expert costs speed, so
the marks should go where moving away hurts. Load does not say where that is, and similarity only
in part: what counts is what becomes of the answers. And it counts among all that is moved: errors add
up, so that moving away from one expert alone, in a model that is otherwise left as it is, ranks
experts otherwise, and on the pocket model worse than load does (`runs/reference/rerouting`). So answers are
read with everything re-routed as in decode steps of a batch; then every expert of every layer is
protected in turn, alone; and its cost is what that saves.

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


class Spared(NamedTuple):
    """One expert that is protected while all others are re-routed.

    Attributes:
        layer: row of the similarity tensor, 0 for the first layer that has experts.
        expert: its number.
    """

    layer: int
    expert: int


Loss = Callable[[Spared | None], float]
"""Mean loss of a fixed set of answers with everything re-routed but one expert, or nothing; the same
each time."""


def pretended_steps(decoded: Tensor, batch: int, seed: int = 0) -> tuple[Tensor, int]:
    """Deal the rows of one answer to decode steps, as if they were as many requests at any moment.

    Args:
        decoded: [rows] bool, those that a server decodes.
        batch: rows of a step; one step may have fewer.
        seed: of the deal.

    Returns:
        int64 [rows], the number of each row's step and -1 for rows not decoded; and how many steps.
    """
    count = int(decoded.sum())
    deal = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) // batch
    steps = torch.full(decoded.shape, -1, dtype=torch.int64, device=decoded.device)
    steps[decoded] = deal.to(decoded.device)
    return steps, -(-count // batch)


def loss_increases(loss: Loss, layers: int, experts: int) -> Tensor:
    """What re-routing away from each expert costs, among all others that are re-routed.

    Args:
        loss: called once with None, then for every layer and expert in ascending order, so that it
            may keep what the layers below a layer made.
        layers: that have experts.
        experts: E, of a layer.

    Returns:
        float64 [layers, E], `loss(None) - loss(spared)`; about 0 or less where it costs nothing.

    Raises:
        CalibrationError: a loss is no finite number.
    """
    moved = finite(loss(None), None)
    rows = []
    for layer in range(layers):
        spared = [Spared(layer, expert) for expert in range(experts)]
        rows.append([moved - finite(loss(one), one) for one in spared])
    return torch.tensor(rows, dtype=torch.float64)


def mark_costliest(increases: Tensor, count: int) -> Tensor:
    """Mark the experts of each layer that cost most to re-route away from, the lowest id on ties.

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


def finite(loss: float, spared: Spared | None) -> float:
    """The loss, as it is.

    Raises:
        CalibrationError: it is no finite number.
    """
    if not math.isfinite(loss):
        raise CalibrationError(
            f"the loss with {spared or 'everything'} {'spared' if spared else 're-routed'} is {loss}; run "
            "the model in a wider type"
        )
    return loss
