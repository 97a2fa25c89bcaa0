"""Thresholds that mean the same in every layer.

Frobenius similarity is relative to the farthest pair of its own layer (`harness.calibration.measures`),
so one rho for all layers leaves most experts of one layer free to move and none of another's. A
quantile of what a layer's experts could get is the same share of experts everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best_similarities(similarity: Tensor) -> Tensor:
    """How alike each expert's most similar other expert is: what re-routing it gets at best.

    Args:
        similarity: float [layers, E, E], E > 1; row i of a layer is of expert i.

    Returns:
        [layers, E], the type as given: the maximum over j != i of ``similarity[layer, i, j]``.

    Raises:
        ValueError: another shape, or a single expert.
    """
    if similarity.ndim != 3 or similarity.shape[1] != similarity.shape[2]:
        raise ValueError(f"similarity: expected [layers, E, E], got {list(similarity.shape)}")
    if similarity.shape[1] < 2:
        raise ValueError("similarity: one expert has no other to be like")
    own = torch.eye(similarity.shape[1], dtype=torch.bool, device=similarity.device)
    return similarity.masked_fill(own, -torch.inf).amax(-1)


def quantile_thresholds(similarity: Tensor, quantile: float) -> Tensor:
    """Per layer, the threshold below which a share `quantile` of experts' best similarities lie.

    With b_0 <= ... <= b_(E-1) a layer's `best_similarities` in order and n the whole number nearest to
    ``quantile * E`` (halves to the even one), rho = b_n. Re-routing takes what is *at least* rho
    (`kernels.sere.reference`), so E - n experts can move and n cannot, wherever they are sent. Experts
    that tie with b_n all can, and then fewer lie below: so it is at the top, where similarity is
    symmetric and the two most alike experts are each other's best. At n = E none can: rho is the next
    number above b_(E-1), which is above 1 where two experts are one.

    Args:
        similarity: float32 or float64 [layers, E, E], E > 1, without NaN.
        quantile: in [0, 1]. 0 lets every expert move that finds its best candidate, 1 none.

    Returns:
        [layers], the type as given.

    Raises:
        ValueError: a shape, type or value does not fit.
    """
    if similarity.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"similarity: expected float32 or float64, got {similarity.dtype}")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile={quantile}: takes 0 to 1")
    best = best_similarities(similarity).sort(dim=1).values
    if best.isnan().any():
        raise ValueError("similarity: holds NaN")
    below, experts = round(quantile * best.shape[1]), best.shape[1]
    if below < experts:
        return best[:, below]
    return torch.nextafter(best[:, -1], torch.full_like(best[:, -1], torch.inf))
