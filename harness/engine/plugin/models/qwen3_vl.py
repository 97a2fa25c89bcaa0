"""Qwen3-VL, dense and mixture of experts. DeepStack's columns are part of an image row."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.model_executor.models.qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from harness.engine.plugin.model import FusedGroups
from harness.engine.plugin.processor import GroupDummyInputs, GroupInfo, GroupProcessor


class GroupQwen3VLProcessingInfo(GroupInfo, Qwen3VLProcessingInfo):
    """Qwen3-VL, dense."""


class GroupQwen3VLMoeProcessingInfo(GroupInfo, Qwen3VLMoeProcessingInfo):
    """Qwen3-VL, mixture of experts."""


class GroupQwen3VLProcessor(GroupProcessor, Qwen3VLMultiModalProcessor):
    """Both."""


class GroupQwen3VLDummyInputs(GroupDummyInputs, Qwen3VLDummyInputsBuilder):
    """Both."""


@MULTIMODAL_REGISTRY.register_processor(
    GroupQwen3VLProcessor, info=GroupQwen3VLProcessingInfo, dummy_inputs=GroupQwen3VLDummyInputs
)
class GroupQwen3VL(FusedGroups, Qwen3VLForConditionalGeneration):
    """Qwen3-VL, dense, with fused image groups."""


@MULTIMODAL_REGISTRY.register_processor(
    GroupQwen3VLProcessor,
    info=GroupQwen3VLMoeProcessingInfo,
    dummy_inputs=GroupQwen3VLDummyInputs,
)
class GroupQwen3VLMoe(FusedGroups, Qwen3VLMoeForConditionalGeneration):
    """Qwen3-VL, mixture of experts, with fused image groups."""
