"""Qwen2.5-VL: most layers of its encoder attend within windows, and all compute in window order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from harness.engine.plugin.model import FusedGroups
from harness.engine.plugin.processor import GroupDummyInputs, GroupInfo, GroupProcessor


class GroupQwen25VLProcessingInfo(GroupInfo, Qwen2_5_VLProcessingInfo):
    """Qwen2.5-VL."""


class GroupQwen25VLProcessor(GroupProcessor, Qwen2_5_VLMultiModalProcessor):
    """Qwen2.5-VL."""


class GroupQwen25VLDummyInputs(GroupDummyInputs, Qwen2_5_VLDummyInputsBuilder):
    """Qwen2.5-VL."""


@MULTIMODAL_REGISTRY.register_processor(
    GroupQwen25VLProcessor, info=GroupQwen25VLProcessingInfo, dummy_inputs=GroupQwen25VLDummyInputs
)
class GroupQwen25VL(FusedGroups, Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL with fused image groups."""

    def _to_raster(self, values: Tensor, grids: Sequence[Sequence[int]]) -> Tensor:
        """Undo the permutation of merge units by which the encoder puts windows in a row.

        Its output has been put back; what was seen inside its blocks has not.
        """
        out = torch.empty_like(values)
        start = 0
        for t, h, w in grids:
            place, _ = self.visual.get_window_index_thw(t, h, w)
            end = start + len(place)
            out[start + place.to(values.device)] = values[start:end]
            start = end
        return out
