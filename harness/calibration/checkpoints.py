"""Mixture-of-experts checkpoints as Transformers models: what they are, and then their weights."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from harness.calibration.similarity import CalibrationError

FAMILIES = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""Transformers' class by ``model_type``. Other types are tried as the class that their config names."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Outline:
    """A checkpoint's model, as known without its weights.

    Attributes:
        architecture: Transformers' class.
        layers: numbers of the layers that have experts, ascending.
        experts: of each of them.
        top_k: experts of a token.
        depth: all layers of the language model.
        hidden: width between layers.
        cached: elements of keys and values that one token leaves behind, all layers together.
        vocabulary: tokens that there are.
        parameters: of the whole model, vision encoder included.
    """

    architecture: str
    layers: tuple[int, ...]
    experts: int
    top_k: int
    depth: int
    hidden: int
    cached: int
    vocabulary: int
    parameters: int


def default_dtype(device: str) -> str:
    """What a model runs in unless told otherwise: exactly where that is affordable."""
    return "float32" if device == "cpu" else "bfloat16"


def check_device(device: str) -> None:
    """Whether there is such a device.

    Raises:
        CalibrationError: there is not.
    """
    if device == "cpu":
        return
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise CalibrationError(
            f"device={device}: PyTorch sees {torch.cuda.device_count()} GPUs here; take device=cpu, "
            "or install the gpu extra (python3 harness/bootstrap.py --extra gpu)"
        )


def outline(model_dir: Path) -> Outline:
    """What kind of model a checkpoint is; its weights are not read.

    Raises:
        CalibrationError: it is none that can be calibrated.
    """
    cls = _model_class(model_dir)
    try:
        config = cls.config_class.from_pretrained(model_dir, local_files_only=True)
        with torch.device("meta"):
            model = cls._from_config(config)
        text, blocks = config.get_text_config(), moe_blocks(model)
        counts = {expert_count(block.experts) for block in blocks.values()}
        heads = getattr(text, "num_key_value_heads", text.num_attention_heads)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        found = Outline(
            architecture=cls.__name__,
            layers=tuple(blocks),
            experts=max(counts),
            top_k=text.num_experts_per_tok,
            depth=text.num_hidden_layers,
            hidden=text.hidden_size,
            cached=2 * heads * width * text.num_hidden_layers,
            vocabulary=text.vocab_size,
            parameters=sum(p.numel() for p in model.parameters()),
        )
    except CalibrationError as error:
        raise CalibrationError(f"model={model_dir}: {error}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CalibrationError(
            f"model={model_dir}: config.json does not fit: {_one_line(error)}"
        ) from error
    if len(counts) > 1:
        raise CalibrationError(f"model={model_dir}: layers with {sorted(counts)} experts each")
    return found


def load_model(model_dir: Path, device: str, dtype: torch.dtype) -> nn.Module:
    """The model with its weights, for evaluation.

    Raises:
        CalibrationError: it cannot be loaded, or the checkpoint lacks weights.
    """
    cls = _model_class(model_dir)
    try:
        with _quiet_loading():
            model, info = cls.from_pretrained(
                model_dir, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise CalibrationError(
            f"model={model_dir}: {cls.__name__} cannot be loaded: {_one_line(error)}"
        ) from error
    if info["missing_keys"]:
        raise CalibrationError(
            f"model={model_dir}: has no weights for {min(info['missing_keys'])} and "
            f"{len(info['missing_keys']) - 1} others of {cls.__name__}; get the whole checkpoint"
        )
    return model.to(device).eval()


def load_tokenizer(model_dir: Path) -> Any:
    """The checkpoint's own tokenizer.

    Raises:
        CalibrationError: there is none that Transformers loads.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CalibrationError(
            f"model={model_dir}: has no tokenizer that Transformers loads: {_one_line(error)}"
        ) from error


def moe_blocks(model: nn.Module) -> dict[int, nn.Module]:
    """The model's mixture-of-experts blocks by layer number, ascending.

    Raises:
        CalibrationError: there are none.
    """
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        number = _LAYER.search(name + ".")
        parts = getattr(module, "gate", None), getattr(module, "experts", None)
        if number and all(isinstance(part, nn.Module) for part in parts):
            found[int(number[2])] = module
    if not found:
        raise CalibrationError(
            f"{type(model).__name__}: no mixture-of-experts block found; calibration needs a model "
            "whose layers have `gate` and fused `experts`"
        )
    return dict(sorted(found.items()))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The language model's layers in order, those without experts included."""
    block = next(iter(moe_blocks(model).values()))
    name = next(n for n, module in model.named_modules() if module is block)
    match = _LAYER.search(name + ".")
    assert match is not None
    layers = model.get_submodule(name[: match.end(1)])
    assert isinstance(layers, nn.ModuleList)
    return list(layers)


def expert_count(experts: Any) -> int:
    """How many experts a fused module holds."""
    return int(experts.num_experts)


def _one_line(error: Exception) -> str:
    """What it says, which of Transformers' errors may be a page."""
    return " ".join(str(error).split())


_LAYER = re.compile(r"((?:^|(?<=\.))layers)\.(\d+)\.")


def _model_class(model_dir: Path) -> Any:
    import transformers

    where = f"model={model_dir}"
    if not model_dir.is_dir():
        raise CalibrationError(
            f"{where}: no such folder; it takes a local checkpoint folder "
            "(`hf download ORG/NAME --local-dir FOLDER` makes one)"
        )
    try:
        config: Any = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{where}: its config.json cannot be read: {error}") from error
    config = config if isinstance(config, dict) else {}
    kind, named = config.get("model_type"), config.get("architectures")
    name = FAMILIES.get(str(kind)) or (named[0] if isinstance(named, list) and named else None)
    found = getattr(transformers, str(name), None)
    if found is None or not hasattr(found, "config_class"):
        raise CalibrationError(
            f"{where}: model_type {kind!r} with architecture {name!r} is none that Transformers "
            f"{transformers.__version__} has; takes {', '.join(FAMILIES)}"
        )
    return found


@contextlib.contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bar of the library's own; as it was before, afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
