"""The second pass, as a vLLM plugin: Qwen3-VL-MoE that takes rows of images instead of pixels."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm import ModelRegistry
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLMultiModalProcessor,
)
from vllm.model_executor.models.qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)


class RowsProcessor(Qwen3VLMultiModalProcessor):
    """Stock processing, then fewer placeholders and rows from a file in place of pixels."""

    def apply(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock method, if the request names no ``rows_file``."""
        asked = dict(inputs.hf_processor_mm_kwargs)
        file = asked.pop("rows_file", None)
        inputs = dataclasses.replace(inputs, hf_processor_mm_kwargs=asked)
        plain = super().apply(inputs, *args, **kwargs)
        if file is not None:
            self._take_rows(plain, Path(file))
        return plain

    def _cached_apply_hf_processor(self, inputs: Any, timing_ctx: Any) -> Any:
        return self._apply_hf_processor(inputs, timing_ctx)

    def _take_rows(self, plain: Any, file: Path) -> None:
        tensors = load_file(file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        ids, done = list(plain["prompt_token_ids"]), 0
        new_ids: list[int] = []
        ranges, items, hashes = [], [], []
        for image, where in enumerate(plain["mm_placeholders"]["image"]):
            rows, kept = tensors[f"rows.{image}"], tensors[f"kept.{image}"]
            new_ids += ids[done : where.offset]
            ranges.append(PlaceholderRange(offset=len(new_ids), length=len(kept)))
            new_ids += [ids[where.offset]] * len(kept)
            done = where.offset + where.length
            grid = plain["mm_kwargs"]["image"][image]["image_grid_thw"].data
            items.append(
                MultiModalKwargsItem(
                    {
                        "rows": _flat(rows, on_cpu=False),
                        "kept": _flat(kept, on_cpu=True),
                        "counts": _number(torch.tensor(len(kept))),
                        "image_grid_thw": _number(grid),
                    }
                )
            )
            hashes.append(f"{digest}-{image}")
        plain["prompt_token_ids"] = new_ids + ids[done:]
        plain["mm_kwargs"] = MultiModalKwargsItems({**plain["mm_kwargs"], "image": items})
        plain["mm_hashes"] = {**plain["mm_hashes"], "image": hashes}
        plain["mm_placeholders"] = {**plain["mm_placeholders"], "image": ranges}


def _flat(data: Tensor, *, on_cpu: bool) -> MultiModalFieldElem:
    field = MultiModalFlatField(slices=[slice(0, len(data))], keep_on_cpu=on_cpu)
    return MultiModalFieldElem(data=data, field=field)


def _number(data: Tensor) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=True))


@MULTIMODAL_REGISTRY.register_processor(
    RowsProcessor, info=Qwen3VLMoeProcessingInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class RowsModel(Qwen3VLMoeForConditionalGeneration):
    """Rows go in as they are, at the positions of the tokens that they were."""

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Rows of every image, if there are rows."""
        if "rows" not in kwargs:
            return super().embed_multimodal(**kwargs)
        counts = torch.as_tensor(kwargs["counts"]).flatten().tolist()
        return kwargs["rows"].split(counts)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[Any], **_: Any
    ) -> tuple[Tensor, int]:
        """Position of every token: of its place in the grid, of the line of text."""
        merge = self.config.vision_config.spatial_merge_size
        columns: list[Tensor] = []
        done, position = 0, 0
        for feature in sorted(mm_features, key=lambda f: f.mm_position.offset):
            where, data = feature.mm_position, feature.data
            text = where.offset - done
            columns.append((position + torch.arange(text)).expand(3, -1))
            position += text
            _, height, width = data["image_grid_thw"].data.flatten().tolist()
            height, width = height // merge, width // merge
            kept = data["kept"].data
            grid = torch.stack([torch.zeros_like(kept), kept // width, kept % width])
            columns.append(position + grid)
            position += max(height, width)
            done = where.offset + where.length
        text = len(input_tokens) - done
        columns.append((position + torch.arange(text)).expand(3, -1))
        return torch.cat(columns, dim=1), position + text - len(input_tokens)


def register() -> None:
    """The plugin's entry point."""
    ModelRegistry.register_model(
        "Qwen3VLMoeForConditionalGeneration", "tests.engine.two_pass.plugin:RowsModel"
    )
