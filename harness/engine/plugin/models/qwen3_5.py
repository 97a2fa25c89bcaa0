"""Qwen3.5, dense and mixture of experts: Qwen3-VL's encoder without DeepStack.

Most layers of its language model are recurrent: they read rows in the order in which they come. Kept
tokens and text stay in prompt order, so that such a layer reads what it would have read, with gaps.
"""

from __future__ import annotations

from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeProcessingInfo,
    Qwen3_5ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from harness.engine.plugin.model import FusedGroups
from harness.engine.plugin.models.qwen3_vl import GroupQwen3VLDummyInputs, GroupQwen3VLProcessor
from harness.engine.plugin.processor import GroupInfo


class GroupQwen35ProcessingInfo(GroupInfo, Qwen3_5ProcessingInfo):
    """Qwen3.5, dense."""


class GroupQwen35MoeProcessingInfo(GroupInfo, Qwen3_5MoeProcessingInfo):
    """Qwen3.5, mixture of experts."""


@MULTIMODAL_REGISTRY.register_processor(
    GroupQwen3VLProcessor, info=GroupQwen35ProcessingInfo, dummy_inputs=GroupQwen3VLDummyInputs
)
class GroupQwen35(FusedGroups, Qwen3_5ForConditionalGeneration):
    """Qwen3.5, dense, with fused image groups."""


@MULTIMODAL_REGISTRY.register_processor(
    GroupQwen3VLProcessor, info=GroupQwen35MoeProcessingInfo, dummy_inputs=GroupQwen3VLDummyInputs
)
class GroupQwen35Moe(FusedGroups, Qwen3_5MoeForConditionalGeneration):
    """Qwen3.5, mixture of experts, with fused image groups."""
