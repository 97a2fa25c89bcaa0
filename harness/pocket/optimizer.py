"""Muon for matrices, AdamW for the rest.

Muon (K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024) replaces a
matrix's momentum by the nearest matrix with equal singular values, by five Newton-Schulz steps. The
factor that lets it share AdamW's learning rate is that of arXiv 2502.16982, section 2.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_STEPS = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonal(x: Tensor) -> Tensor:
    """The polar factor of each matrix of [..., m, n], roughly: singular values in about [0.7, 1.2]."""
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in _STEPS:
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon takes it: a matrix, or a stack of them, between hidden states."""
    outside = ("embed", "lm_head", "gate.weight", "aux")
    return parameter.ndim in (2, 3) and not any(part in name for part in outside)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; the last two axes of a parameter are its matrix.

    Args:
        params: matrices, or stacks of them.
        lr: as one would give AdamW.
        momentum: Nesterov's.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step; gradients must be there."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[tuple(p.shape[-2:])].append(p)
            for shape, params in by_shape.items():
                for p in params:
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                grads = [p.grad for p in params if p.grad is not None]
                momenta = [self.state[p]["momentum"] for p in params]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                updates = torch._foreach_lerp(grads, momenta, group["momentum"])
                turned = orthogonal(torch.cat([u.view(-1, *shape) for u in updates]))
                lengths = [p.numel() // (shape[0] * shape[1]) for p in params]
                parts = [t.view_as(p) for t, p in zip(turned.split(lengths), params, strict=True)]
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * max(shape) ** 0.5
                torch._foreach_add_(params, parts, alpha=-group["lr"] * scale)
