"""Losses on the routers: experts are to be used evenly, and all that are chosen are to count."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def balance_loss(router_logits: Tensor, valid: Tensor, top_k: int) -> Tensor:
    """Load balancing loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6), top-k form.

    For each layer E * sum over experts of (share of the rows' k choices that fell on it) * (mean
    probability it was given), averaged over layers: 1 where choices are spread evenly, up to E / k
    where all rows choose alike. Transformers' `load_balancing_loss_func` is k times as large, and
    counts the choices of all layers together, so that layers could make up for each other there.

    Args:
        router_logits: float32 [layers, B, L, experts].
        valid: bool [B, L], the rows that count; at least one.
        top_k: experts that a row keeps.

    Returns:
        float32 scalar, differentiable through the probabilities.
    """
    experts = router_logits.shape[-1]
    probabilities = router_logits.float().softmax(-1)
    which = router_logits.detach().topk(top_k, dim=-1, sorted=False).indices
    chosen = torch.zeros_like(probabilities).scatter(-1, which, 1.0)
    row = valid.float()
    row = (row / row.sum().clamp(min=1)).unsqueeze(-1)
    share = (chosen * row).sum((1, 2)) / top_k
    mean = (probabilities * row).sum((1, 2))
    return experts * (share * mean).sum(-1).mean()


def steepness_loss(router_logits: Tensor, valid: Tensor, top_k: int) -> Tensor:
    """How far the top-k experts' weights are from equal: ln k minus their entropy, mean over rows.

    0 when every chosen expert counts the same, ln k when one has all the weight. Minimised beside
    the task, it makes a model in which the secondary experts matter, as they do in large ones.

    Args:
        router_logits: float32 [layers, B, L, experts].
        valid: bool [B, L]; other rows do not count.
        top_k: experts that a row uses.

    Returns:
        float32 scalar >= 0.
    """
    weights = router_logits.softmax(-1).topk(top_k, dim=-1, sorted=False).values
    weights = weights / weights.sum(-1, keepdim=True)
    steep = math.log(top_k) + (weights * weights.clamp(min=1e-9).log()).sum(-1).mean(0)
    share = valid.to(steep.dtype)
    return (steep * share).sum() / share.sum()
