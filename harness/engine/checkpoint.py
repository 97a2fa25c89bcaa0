"""What a checkpoint folder says about itself, read before anything is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """The folder holds no model that can be served; the message says why and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: its folder.
        architecture: name of the model class, as in ``config.json``.
        top_k: routed experts per token; `None` for a model without experts.
        experts: routed experts per layer; `None` likewise.
        moe_layers: layers that have experts; 0 likewise.
        has_vision: whether it takes images.
        vision_layers: layers of its vision encoder, where the configuration says so.
        whole_image_layers: those of them that attend to whole images, not within windows; `None` where
            the configuration names none, and all do.
    """

    path: Path
    architecture: str
    top_k: int | None
    experts: int | None
    moe_layers: int
    has_vision: bool
    vision_layers: int | None
    whole_image_layers: tuple[int, ...] | None = None

    def scores_in(self, layer: int) -> bool:
        """Whether vision tokens can be scored in `layer`; negative counts from the end."""
        if self.whole_image_layers is None or self.vision_layers is None:
            return True
        return layer % self.vision_layers in self.whole_image_layers


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read ``config.json`` and make sure that there are weights.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    where = f"model.path={folder}"
    if not folder.is_dir():
        raise CheckpointError(
            f"{where}: no such folder; it takes a local checkpoint folder "
            "(`hf download ORG/NAME --local-dir FOLDER` makes one)"
        )
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{where}: has no config.json; it takes a checkpoint folder"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{where}: config.json cannot be read: {e}") from e
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f"{where}: config.json names no architecture")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CheckpointError(f"{where}: has no weights (*.safetensors)")
    try:
        return _read_fields(folder, config)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{where}: config.json is damaged or incomplete: {e!r}") from e


def _read_fields(folder: Path, config: dict[str, Any]) -> Checkpoint:
    text = config.get("text_config", config)
    experts = text.get("num_experts") or text.get("n_routed_experts")
    vision = config.get("vision_config")
    whole = vision.get("fullatt_block_indexes") if vision is not None else None
    return Checkpoint(
        path=folder,
        architecture=str(config["architectures"][0]),
        top_k=int(text["num_experts_per_tok"]) if experts else None,
        experts=int(experts) if experts else None,
        moe_layers=_moe_layers(text) if experts else 0,
        has_vision=vision is not None,
        vision_layers=vision.get("depth") if vision is not None else None,
        whole_image_layers=None if whole is None else tuple(int(layer) for layer in whole),
    )


def _moe_layers(text: dict[str, Any]) -> int:
    """Layers with experts, by the rules of the Qwen-MoE and DeepSeek families' configurations."""
    dense = set(text.get("mlp_only_layers") or ())
    step = text.get("decoder_sparse_step") or 1
    first = text.get("first_k_dense_replace") or 0
    return sum(
        layer >= first and layer not in dense and (layer + 1) % step == 0
        for layer in range(text["num_hidden_layers"])
    )
