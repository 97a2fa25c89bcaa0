"""The weights that training starts from, and which experts start alike."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from harness.pocket.network import Network

GAINS: dict[str, float] = {
    "projection_out": 0.3,
    "router": 0.5,
    "embedding": 0.3,
    "vision_positions": 0.1,
}
"""What `init` departs from plain fan-in by: multiples of it for the first two (the last matrix of
every branch; the router), standard deviations for the others."""


@torch.no_grad()
def init(network: Network, seed: int, *, families: int | None = None, noise: float = 0.3) -> None:
    """Draw all weights, scaled by fan-in: a branch then moves the residual stream from the start.

    Experts may start in families, the members of which share a base: weights as of sparse upcycling
    (arXiv 2212.05055), where all experts start from one dense MLP, but several of them, and with
    noise, without which members would stay equal but for what their routers send them. A layer's
    members are scattered over its experts.

    Every tensor has its own random stream, keyed by seed and name, the same on every device.

    Args:
        network: changed in place.
        seed: of the draw.
        families: of each layer; None draws experts independently.
        noise: share of a member's standard deviation that is its own, 0 to 1.

    Raises:
        ValueError: noise is out of range, or there are more families than experts, or none.
    """
    experts = network.recipe.experts
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be from 0 to 1, not {noise}")
    if families is not None and not 1 <= families <= experts:
        raise ValueError(f"families must be from 1 to {experts}, not {families}")
    for name, parameter in network.named_parameters():
        std = _std(name, parameter)
        if std is None:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        shape = tuple(parameter.shape)
        drawn = _normal(seed, name, shape)
        if families is not None and ".experts." in name:
            family = families_of(seed, name, experts, families)
            base = _normal(seed, f"{name}.base", (families, *shape[1:]))[family]
            drawn = math.sqrt(1 - noise**2) * base + noise * drawn
        parameter.copy_(std * drawn)


def families_of(seed: int, name: str, experts: int, families: int) -> Tensor:
    """The family of each expert, int64 [experts], of the layer whose parameter is called `name`."""
    layer = name.rpartition(".")[0]
    return torch.randperm(experts, generator=_stream(seed, f"{layer}.families")) % families


def _std(name: str, parameter: nn.Parameter) -> float | None:
    """Standard deviation that a tensor is drawn with; None for norms and biases."""
    if parameter.dim() == 1:
        return None
    if name.endswith("embed_tokens.weight"):
        return GAINS["embedding"]
    if name.endswith("pos_embed.weight"):
        return GAINS["vision_positions"]
    fused = ".experts." in name  # [experts, in, out]; the others are [out, in, …]
    fan_in = parameter.shape[1] if fused else parameter[0].numel()
    gain = 1.0
    if name.endswith(("o_proj.weight", "attn.proj.weight", "linear_fc2.weight", "down_proj")):
        gain = GAINS["projection_out"]
    elif name.endswith("mlp.gate.weight"):
        gain = GAINS["router"]
    return gain / math.sqrt(fan_in)


def _stream(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"pruneroute pocket/{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=_stream(seed, name))
