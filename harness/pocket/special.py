"""Special tokens of Qwen3-VL and their ids in the bundled model."""

from __future__ import annotations

SPECIAL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""In order of their ids, which follow those of the 256 bytes."""


def token_id(token: str) -> int:
    """Id of a special token."""
    return 256 + SPECIAL_TOKENS.index(token)
