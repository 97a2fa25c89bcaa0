"""Tiny random checkpoints of the families that are calibrated, as Transformers writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from harness.pocket.model import FOLDER
from harness.pocket.recipe import Recipe

LAYERS, EXPERTS, TOP_K, HIDDEN = 2, 8, 4, 32

TEXT: dict[str, Any] = {
    "vocab_size": Recipe().vocab_size,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}


def configuration(family: str) -> Any:
    """Of one model type; of Qwen3.5 the first layer is of linear attention, the second is not."""
    if family == "qwen2_moe":
        return transformers.Qwen2MoeConfig(**TEXT)
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**TEXT)
    if family == "qwen3_vl_moe":
        text = TEXT | {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
        vision = VISION | {"deepstack_visual_indexes": []}
        return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    linear = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    return transformers.Qwen3_5MoeConfig(text_config=TEXT | linear, vision_config=VISION)


FAMILIES = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}


def model(family: str, seed: int = 0) -> nn.Module:
    """With random weights, routers and experts unlike enough for routes to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found: nn.Module = getattr(transformers, FAMILIES[family])(configuration(family))
        for name, weight in found.named_parameters():
            if name.endswith(("gate.weight", "gate_up_proj", "down_proj")):
                nn.init.normal_(weight, std=0.3)
    return found.eval()


def write(folder: Path, family: str, seed: int = 0) -> Path:
    """A checkpoint folder, with the bundled tokenizer."""
    model(family, seed).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(FOLDER / name, folder)
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path
