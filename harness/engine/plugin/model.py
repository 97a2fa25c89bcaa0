"""Qwen3-VL with fused image groups: encode, score, select, and put rows where they belong."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from vllm.multimodal import MULTIMODAL_REGISTRY

from harness.engine.plugin import group as layout
from harness.engine.plugin.processor import (
    GroupQwen3VLMoeProcessingInfo,
    GroupQwen3VLProcessingInfo,
    GroupQwen3VLProcessor,
)
from harness.engine.plugin.telemetry import VISION
from kernels.visionzip.budget import split_budget
from kernels.visionzip.contextual import contextual_targets, merge_contextual
from kernels.visionzip.control import random_scores
from kernels.visionzip.reference import attention_received, merge_unit_scores
from kernels.visionzip.selection import BUDGETS, grid_tokens, select, select_tokens

logger = logging.getLogger("vllm.pruneroute")


class FusedGroups:
    """Mixed in before a Qwen3-VL class: image items are groups, and rows carry their positions."""

    def _start_groups(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                "PruneRoute's vision lever cannot serve pipeline_parallel_size > 1: only the first "
                "stage sees where kept tokens belong; use tensor parallelism"
            )
        if self.use_data_parallel:  # type: ignore[attr-defined]
            raise ValueError(
                "PruneRoute's vision lever cannot serve mm_encoder_tp_mode=data; leave it at "
                "'weights'"
            )
        # Read by captured graphs, so one buffer for good; padding can take a step past
        # max_num_batched_tokens.
        longest = vllm_config.scheduler_config.max_num_batched_tokens + 1024
        self._row_offsets = torch.zeros(3, longest, dtype=torch.int64)
        self._row_offsets_used = 0
        VISION.hooked = True
        logger.info("PruneRoute: vision lever in %s", type(self).__name__)

    # -- encoder ---------------------------------------------------------------------------------

    def embed_multimodal(self, **kwargs: Any) -> tuple[Tensor, ...] | None:
        """Rows of every group, in prompt order, each row with its position offset behind it.

        Groups are encoded one by one: what a group keeps must not depend on its batch mates.

        Returns:
            One [keep + gap tokens, width + offset columns] tensor for each group.
        """
        if "group_spend" not in kwargs:
            return super().embed_multimodal(**kwargs)  # type: ignore[misc]
        grids = kwargs["image_grid_thw"].tolist()
        gap_ids, gap_lengths = kwargs["gap_ids"].tolist(), kwargs["gap_lengths"].tolist()
        pixel_values: Tensor = kwargs["pixel_values"]
        seeds, full_tokens = kwargs["image_seeds"].tolist(), kwargs["full_tokens"].tolist()
        out = []
        for images, *numbers, key in torch.as_tensor(kwargs["group_spend"]).tolist():
            own_grids, grids = grids[:images], grids[images:]
            own_lengths, gap_lengths = gap_lengths[: images - 1], gap_lengths[images - 1 :]
            own_ids, gap_ids = gap_ids[: sum(own_lengths)], gap_ids[sum(own_lengths) :]
            own_seeds, seeds = seeds[:images], seeds[images:]
            own_tokens, full_tokens = full_tokens[:images], full_tokens[images:]
            patches = sum(t * h * w for t, h, w in own_grids)
            own_pixels, pixel_values = pixel_values[:patches], pixel_values[patches:]
            spend = layout.Spend(*numbers)
            features, kept = self._encode_group(own_pixels, own_grids, own_seeds, spend)
            out.append(self._place_group(features, kept, own_grids, own_ids, own_lengths))
            counts = [t * h * w for t, h, w in self._merged_grids(own_grids)]
            after = layout.kept_per_image(kept, counts)
            VISION.record(key, list(zip(own_tokens, after, strict=True)))
        return tuple(out)

    def _encode_group(
        self,
        pixel_values: Tensor,
        grids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        spend: layout.Spend,
    ) -> tuple[Tensor, Tensor]:
        """Features of all tokens of a group, [tokens, width], and which stay, [keep] ascending."""
        visual = self.visual  # type: ignore[attr-defined]
        merged = self._merged_grids(grids)
        counts = [t * h * w for t, h, w in merged]
        grid_tensor = torch.tensor(grids, dtype=torch.int64)
        policy = layout.POLICIES[spend.policy]
        if policy == "visionzip" and spend.keep < sum(counts):
            return self._zipped(pixel_values, grid_tensor, counts, spend)
        features = visual(pixel_values, grid_thw=grid_tensor)
        if spend.keep == sum(counts):
            return features, torch.arange(spend.keep)
        if policy == "random":
            scores = random_scores(seeds, counts)
            return features, select_tokens(scores, counts, spend.keep, spend.floor)
        if policy != "grid":
            raise RuntimeError(f"policy {policy} cannot keep {spend.keep} of {sum(counts)} tokens")
        shares = split_budget(counts, spend.keep, spend.floor, [1.0] * len(counts))
        starts = itertools.accumulate(counts, initial=0)
        return features, torch.tensor(
            [
                start + token
                for start, (_, h, w), share in zip(starts, merged, shares, strict=False)
                for token in grid_tokens(h, w, share)
            ],
            dtype=torch.int64,
        )

    def _zipped(
        self, pixel_values: Tensor, grid_thw: Tensor, counts: Sequence[int], spend: layout.Spend
    ) -> tuple[Tensor, Tensor]:
        """As `_encode_group`, by attention; rows that others are merged into are in their place."""
        visual = self.visual  # type: ignore[attr-defined]
        unit = visual.spatial_merge_size**2
        attention = visual.blocks[spend.layer].attn.attn
        with _captured(attention, keys=spend.contextual > 0) as captured:
            features = visual(pixel_values, grid_thw=grid_thw)
        received, keys = captured.pop()
        dominant = select(
            merge_unit_scores(received, unit),
            counts,
            spend.keep - spend.contextual,
            spend.floor,
            BUDGETS[spend.budget],
        )
        if keys is None:
            return features, dominant
        targets = contextual_targets(dominant, sum(counts), spend.contextual)
        # DeepStack's columns, behind the embedding's own, go with their token as they are.
        width = features.shape[1] // (1 + self._deepstack_levels())
        keys = keys.view(len(features), unit, -1).mean(1)
        features[targets, :width] = merge_contextual(
            features[:, :width], keys, counts, dominant, targets
        )
        return features, torch.cat([dominant, targets]).sort().values

    def _deepstack_levels(self) -> int:
        config = self.config.vision_config  # type: ignore[attr-defined]
        return len(getattr(config, "deepstack_visual_indexes", None) or ())

    def _merged_grids(self, grids: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
        """(t, h, w) of each image in merged tokens, from patches."""
        merge = self.visual.spatial_merge_size  # type: ignore[attr-defined]
        return [(t, h // merge, w // merge) for t, h, w in grids]

    def _place_group(
        self,
        features: Tensor,
        kept: Tensor,
        grids: Sequence[Sequence[int]],
        gap_ids: Sequence[int],
        gap_lengths: Sequence[int],
    ) -> Tensor:
        """Rows of a group: kept tokens and text in prompt order, offsets behind them."""
        merged = self._merged_grids(grids)
        counts = [t * h * w for t, h, w in merged]
        total = sum(counts)
        is_image = layout.image_rows(counts, gap_lengths)
        kept_mask = torch.zeros(total, dtype=torch.bool)
        kept_mask[kept.cpu()] = True
        stays = np.ones(len(is_image), dtype=bool)
        stays[is_image] = kept_mask.numpy()
        offsets = torch.from_numpy(layout.group_offsets(merged, gap_lengths)[:, stays])

        rows = features.new_zeros(int(stays.sum()), features.shape[1])
        image_at = torch.from_numpy(np.flatnonzero(is_image[stays])).to(features.device)
        rows[image_at] = features[kept.to(features.device)]
        if gap_ids:
            text_at = torch.from_numpy(np.flatnonzero(~is_image[stays])).to(features.device)
            ids = torch.tensor(gap_ids, device=features.device)
            text = self.language_model.embed_input_ids(ids)  # type: ignore[attr-defined]
            rows[text_at, : text.shape[1]] = text.to(rows.dtype)
        return layout.append_offsets(rows, offsets)

    # -- language model --------------------------------------------------------------------------

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Iterable[Tensor] | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """As the stock method; takes the position offsets off the rows and notes them for `forward`."""
        self._row_offsets[:, : self._row_offsets_used] = 0
        self._row_offsets_used = 0
        if multimodal_embeddings is not None and len(multimodal_embeddings):  # type: ignore[arg-type]
            rows, offsets = zip(
                *(layout.split_offsets(e) for e in multimodal_embeddings), strict=True
            )
            assert is_multimodal is not None
            at = is_multimodal.nonzero().squeeze(1).to(self._row_offsets.device)
            self._row_offsets[:, at] = torch.cat(offsets, dim=1)
            self._row_offsets_used = len(is_multimodal)
            multimodal_embeddings = rows
        return super().embed_input_ids(  # type: ignore[misc]
            input_ids, multimodal_embeddings, is_multimodal=is_multimodal
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the stock method, at the positions that the rows carried."""
        if positions.dim() == 2:
            # In place, in the runner's own buffer, which it fills anew for every step: compiled
            # code and captured graphs have that buffer's address and strides built in, unchecked.
            positions += self._row_offsets[:, : positions.shape[1]]
        return super().forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[Any], **_: Any
    ) -> tuple[Tensor, int]:
        """Positions at admission, [3, tokens] int64, and the offset of the tokens after the prompt."""
        merge = self.config.vision_config.spatial_merge_size  # type: ignore[attr-defined]
        groups = []
        for feature in sorted(mm_features, key=lambda f: f.mm_position.offset):
            data = feature.data
            if data is None or "gap_lengths" not in data:
                raise RuntimeError(
                    f"a {feature.modality} item reached the model without the fields of a group; "
                    "the engine bypassed PruneRoute's processor"
                )
            grids = [
                (t, h // merge, w // merge) for t, h, w in data["image_grid_thw"].data.tolist()
            ]
            extent = layout.group_extent(grids, data["gap_lengths"].data.tolist())
            where = feature.mm_position
            groups.append((layout.Span(where.offset, where.length), extent))
        positions, shift = layout.prompt_positions(len(input_tokens), groups)
        return torch.from_numpy(positions), shift


@contextlib.contextmanager
def _captured(attention: nn.Module, *, keys: bool) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """While open, the next call of `attention` leaves its tokens' scores, [patches] float32.

    Where `keys` is set, also their keys, mean over heads, [patches, head_dim] float32.

    `attention` is vLLM's encoder attention: query and key arrive after rotary embedding, each
    [1, patches, heads of this rank, head_dim]. Ranks sum their heads, so that all select alike.
    """
    found: list[tuple[Tensor, Tensor | None]] = []

    def capture(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key = kwargs["query"], kwargs["key"]
        received = attention_received(
            query.flatten(0, 1), key.flatten(0, 1), kwargs["cu_seqlens"], module.scale
        )
        own = key.flatten(0, 1).float().mean(1) if keys else None
        ranks = get_tensor_model_parallel_world_size()
        if ranks > 1:
            received = tensor_model_parallel_all_reduce(received) / ranks
            own = None if own is None else tensor_model_parallel_all_reduce(own) / ranks
        found.append((received, own))

    handle = attention.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
    if not found:
        raise RuntimeError("the scored layer of the vision encoder never ran its attention")


@MULTIMODAL_REGISTRY.register_processor(
    GroupQwen3VLProcessor, info=GroupQwen3VLProcessingInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class GroupQwen3VL(FusedGroups, Qwen3VLForConditionalGeneration):
    """Qwen3-VL, dense, with fused image groups."""

    def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._start_groups(vllm_config)


@MULTIMODAL_REGISTRY.register_processor(
    GroupQwen3VLProcessor,
    info=GroupQwen3VLMoeProcessingInfo,
    dummy_inputs=Qwen3VLDummyInputsBuilder,
)
class GroupQwen3VLMoe(FusedGroups, Qwen3VLMoeForConditionalGeneration):
    """Qwen3-VL, mixture of experts, with fused image groups."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        # Not `super()`: the stock class skips its parent's constructor by hand.
        Qwen3VLMoeForConditionalGeneration.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self._start_groups(vllm_config)
