"""Weights of the pocket model from a file, or why they are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from harness.pocket.network import Network
from harness.pocket.recipe import Recipe


def misfit(weights: Mapping[str, Tensor]) -> str | None:
    """Why these are not the pocket model's weights; None if they are.

    Args:
        weights: tensors by name.
    """
    wanted = {k: v.shape for k, v in Network(Recipe()).state_dict().items()}
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in weights:
            return f"the weights lack {name}; give the model.safetensors of harness.pocket.train"
        if name not in wanted:
            return f"the weights hold {name}, which the model has not; give its model.safetensors"
        if weights[name].shape != wanted[name]:
            return (
                f"{name} is {tuple(weights[name].shape)} and not {tuple(wanted[name])}: these are "
                "weights of another model"
            )
    return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of `harness.pocket.train`'s ``model.safetensors``, by name.

    Raises:
        ValueError: it is no such file; the message names it.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ValueError(f"{path}: is no file")
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: is no safetensors file, or damaged ({error})") from error
    reason = misfit(weights)
    if reason is not None:
        raise ValueError(f"{path}: {reason}")
    return weights
