"""What the bundled model is: sizes, special tokens, and the configuration files they imply.

The layout is that of the published Qwen3-VL-MoE checkpoints, shrunk. ``hidden_size`` differs from
``2 * moe_intermediate_size``, so that expert weights in the wrong orientation do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.pocket.special import token_id
from harness.pocket.tokenizer import vocab_size


@dataclass(frozen=True)
class Recipe:
    """Sizes of the bundled model.

    Attributes:
        mrope_section: rotary frequencies for time, height and width; sums to ``head_dim / 2``.
        vision_taps: encoder layers whose output reaches the first language-model layers
            (DeepStack), one layer each.
        vision_grid: side of the square grid of learned vision positions [patches].
        min_pixels, max_pixels: bounds of an image's area after resizing [px].
    """

    hidden_size: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mrope_section: tuple[int, int, int] = (12, 10, 10)
    rope_theta: float = 5_000_000.0
    experts: int = 32
    experts_per_token: int = 8
    moe_intermediate_size: int = 64
    max_position_embeddings: int = 32_768
    vision_hidden_size: int = 192
    vision_depth: int = 6
    vision_heads: int = 3
    vision_intermediate_size: int = 384
    vision_taps: tuple[int, ...] = (1, 3)
    vision_grid: int = 16
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    min_pixels: int = 64 * 64
    max_pixels: int = 512 * 512

    @property
    def vocab_size(self) -> int:
        """All tokens of the tokenizer; no unused rows."""
        return vocab_size()


def model_config(r: Recipe) -> dict[str, Any]:
    """``config.json``, with the field names of the published checkpoints."""
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "dtype": "bfloat16",
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_moe_text",
            "dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": token_id("<|endoftext|>"),
            "eos_token_id": token_id("<|im_end|>"),
            "pad_token_id": token_id("<|endoftext|>"),
            "decoder_sparse_step": 1,
            "head_dim": r.head_dim,
            "hidden_act": "silu",
            "hidden_size": r.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": 4 * r.hidden_size,
            "max_position_embeddings": r.max_position_embeddings,
            "mlp_only_layers": [],
            "moe_intermediate_size": r.moe_intermediate_size,
            "norm_topk_prob": True,
            "num_attention_heads": r.heads,
            "num_experts": r.experts,
            "num_experts_per_tok": r.experts_per_token,
            "num_hidden_layers": r.layers,
            "num_key_value_heads": r.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": list(r.mrope_section),
                "rope_type": "default",
            },
            "rope_theta": r.rope_theta,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": r.vocab_size,
        },
        "vision_config": {
            "model_type": "qwen3_vl_moe",
            "deepstack_visual_indexes": list(r.vision_taps),
            "depth": r.vision_depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": r.vision_hidden_size,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": r.vision_intermediate_size,
            "num_heads": r.vision_heads,
            "num_position_embeddings": r.vision_grid**2,
            "out_hidden_size": r.hidden_size,
            "patch_size": r.patch_size,
            "spatial_merge_size": r.spatial_merge_size,
            "temporal_patch_size": r.temporal_patch_size,
        },
    }


def generation_config() -> dict[str, Any]:
    """``generation_config.json``: greedy; an answer ends with the turn or the text."""
    return {
        "bos_token_id": token_id("<|endoftext|>"),
        "do_sample": False,
        "eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")],
        "pad_token_id": token_id("<|endoftext|>"),
    }


def _pixels(r: Recipe) -> dict[str, Any]:
    return {
        "patch_size": r.patch_size,
        "temporal_patch_size": r.temporal_patch_size,
        "merge_size": r.spatial_merge_size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def image_processor_config(r: Recipe) -> dict[str, Any]:
    """``preprocessor_config.json``. The names ``*_edge`` are historical: both bound the area."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": r.min_pixels, "longest_edge": r.max_pixels},
        **_pixels(r),
    }


def video_processor_config(r: Recipe) -> dict[str, Any]:
    """``video_preprocessor_config.json``: the area bounds hold for all frames together."""
    return {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 4 * r.min_pixels, "longest_edge": 4 * r.max_pixels},
        **_pixels(r),
    }
