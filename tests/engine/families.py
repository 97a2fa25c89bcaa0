"""Tiny checkpoints of the other model families: random weights, the bundled model's tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from harness.pocket.model import ensure
from harness.pocket.recipe import Recipe, image_processor_config, video_processor_config
from harness.pocket.special import token_id
from tests.engine.oracle import Prompt
from tests.engine.requests_under_test import Conversation, conversation

FULL_ATTENTION = (1, 3)
"""Layers of the tiny Qwen2.5-VL's encoder that attend to whole images; the other two do not."""

_TOKENS = {
    "image_token_id": token_id("<|image_pad|>"),
    "video_token_id": token_id("<|video_pad|>"),
    "vision_start_token_id": token_id("<|vision_start|>"),
    "vision_end_token_id": token_id("<|vision_end|>"),
}
_TEXT = {
    "vocab_size": Recipe().vocab_size,
    "hidden_size": 128,  # heads of 32: vLLM on a CPU has none smaller
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "bos_token_id": token_id("<|endoftext|>"),
    "eos_token_id": token_id("<|im_end|>"),
    "pad_token_id": token_id("<|endoftext|>"),
    "tie_word_embeddings": False,
}
_VISION = {"hidden_size": 80, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 128}


def qwen2_5_vl(folder: Path) -> Path:
    """Windows of 4x4 tokens, two layers of the encoder that have them and two that do not."""
    config = Qwen2_5_VLConfig(
        text_config={
            **_TEXT,
            "num_hidden_layers": 3,
            "intermediate_size": 160,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            **_VISION,
            "depth": 4,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": list(FULL_ATTENTION),
            "hidden_act": "silu",
        },
        tie_word_embeddings=False,
        **_TOKENS,
    )
    recipe = dataclasses.replace(Recipe(), patch_size=14, min_pixels=56**2, max_pixels=448**2)
    return _write(folder, config, recipe, "Qwen2_5_VLProcessor")


def qwen3_5(folder: Path, *, experts: int = 0) -> Path:
    """Recurrent layers and layers of attention in turn; a mixture if it has `experts`."""
    text: dict[str, Any] = {
        **_TEXT,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    if experts:
        text |= {
            "num_experts": experts,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        }
    else:
        text["intermediate_size"] = 160
    kind = Qwen3_5MoeConfig if experts else Qwen3_5Config
    config = kind(
        text_config=text,
        vision_config={
            **_VISION,
            "depth": 3,
            "patch_size": 16,
            "num_position_embeddings": 256,
            "hidden_act": "gelu_pytorch_tanh",
        },
        tie_word_embeddings=False,
        **_TOKENS,
    )
    return _write(folder, config, Recipe(), "Qwen3VLProcessor")


def _write(folder: Path, config: PreTrainedConfig, recipe: Recipe, processor: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _draw(model)
    # Weights that bf16 holds exactly, so that an engine in bf16 and an oracle in fp32 have the same.
    model.to(torch.bfloat16).to(torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(ensure() / name, folder / name)
    tokenizer = json.loads((ensure() / "tokenizer_config.json").read_text())
    files = {
        "tokenizer_config.json": tokenizer,
        "preprocessor_config.json": image_processor_config(recipe),
        "video_preprocessor_config.json": video_processor_config(recipe),
    }
    for name, document in files.items():
        document["processor_class"] = processor
        (folder / name).write_text(json.dumps(document))
    return folder


def _draw(model: nn.Module) -> None:
    """Weights under which attention is uneven and answers differ: larger than training starts from."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "norm" not in name:
            width = weight[0].numel() if weight.dim() != 3 else weight.shape[-1]
            sharp = 2.0 if any(part in name for part in ("qkv", "q_proj", "k_proj")) else 1.0
            nn.init.normal_(weight, std=sharp * width**-0.5)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.ones_(weight)  # twice as sharp each: Qwen3.5 adds 1
        elif name.endswith("bias"):
            nn.init.normal_(weight, std=0.1)


def asked(seeds: range, **changes: Any) -> list[Conversation]:
    """Conversations of one to three images a turn, both orientations, one or two turns."""
    settings: dict[str, Any] = {"images_per_turn": (1, 1, 2, 3), "turns": (1, 1, 2)} | changes
    return [conversation(seed, **settings) for seed in seeds]


def is_varied(conversations: list[Conversation]) -> bool:
    """Whether they have one, two and three images, portrait and landscape, and more than one turn."""
    counts = {len(c.images) for c in conversations}
    ways = {i.width > i.height for c in conversations for i in c.images}
    return (
        counts >= {1, 2, 3} and len(ways) == 2 and any(len(c.messages) > 2 for c in conversations)
    )


def worst_kept(prompt: Prompt) -> Prompt:
    """A prompt whose least important tokens stay."""
    return dataclasses.replace(prompt, scores=-prompt.scores)


def flat_positions(prompt: Prompt) -> Prompt:
    """A prompt whose tokens are all counted as text."""
    line = torch.arange(len(prompt.ids))
    return dataclasses.replace(prompt, positions=line.expand(3, -1))
