"""Thresholds by quantile: of experts' best candidates, layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.calibration.quantiles import best_similarities, quantile_thresholds
from kernels.sere.reference import DECODE, sere


def matrices(layers: int = 3, experts: int = 10) -> Tensor:
    """Not symmetric, or the two most alike would always tie."""
    drawn = torch.rand(layers, experts, experts, generator=torch.Generator().manual_seed(0))
    scaled = torch.tensor([1.0, 0.1, 0.5])[:layers, None, None] * drawn
    scaled.diagonal(dim1=1, dim2=2).fill_(1)
    return scaled


def test_best_is_of_other_experts_by_row() -> None:
    similarity = torch.tensor([[[1.0, 0.2, 0.9], [0.3, 1.0, 0.1], [0.0, 0.4, 1.0]]])
    assert best_similarities(similarity).tolist() == torch.tensor([[0.9, 0.3, 0.4]]).tolist()


@pytest.mark.parametrize("quantile", [0, 0.1, 0.29, 0.5, 0.77, 0.9, 1])
def test_the_share_that_lies_below(quantile: float) -> None:
    similarity = matrices()
    thresholds = quantile_thresholds(similarity, quantile)
    assert thresholds.shape == (3,) and thresholds.dtype == torch.float32
    below = best_similarities(similarity) < thresholds[:, None]
    assert below.sum(1).tolist() == [round(10 * quantile)] * 3
    # One number for all layers could not do that.
    assert thresholds[0] > best_similarities(similarity)[1].max()


def test_what_lies_below_is_what_cannot_be_rerouted() -> None:
    similarity = matrices(1)[0]
    threshold = quantile_thresholds(similarity[None], 0.6)[0]
    moved = []
    for expert in range(10):
        # Every other expert is read anyway, and this one is a secondary expert.
        ids = torch.tensor([[other, expert] for other in range(10) if other != expert])
        weights = torch.tensor([[0.9, 0.1]]).expand(9, 2)
        kinds = torch.full((9,), DECODE)
        after = sere(
            ids, weights, kinds, similarity, torch.zeros(10, dtype=torch.bool), 1, threshold
        )
        moved.append(not torch.equal(after, ids))
    assert sum(moved) == 4


def test_ties_and_ends() -> None:
    symmetric = (matrices() + matrices().mT) / 2
    best = best_similarities(symmetric).sort(dim=1).values
    assert torch.equal(best[:, -1], best[:, -2])
    assert torch.equal(quantile_thresholds(symmetric, 0.9), best[:, -1])
    twins = torch.ones(1, 4, 4)
    assert quantile_thresholds(twins, 0.5).tolist() == [1]
    above = quantile_thresholds(twins, 1.0)
    assert above > 1 and above < 1.000_001
    assert quantile_thresholds(matrices().double(), 1).dtype == torch.float64


def test_what_is_refused() -> None:
    for quantile in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="takes 0 to 1"):
            quantile_thresholds(matrices(), quantile)
    with pytest.raises(ValueError, match=r"expected \[layers, E, E\], got \[10, 10\]"):
        quantile_thresholds(matrices()[0], 0.5)
    with pytest.raises(ValueError, match="one expert"):
        quantile_thresholds(torch.ones(2, 1, 1), 0.5)
    with pytest.raises(ValueError, match="expected float32 or float64"):
        quantile_thresholds(matrices().bfloat16(), 0.5)
    broken = matrices()
    broken[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="holds NaN"):
        quantile_thresholds(broken, 0.5)
