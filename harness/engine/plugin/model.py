"""What every model with fused image groups does: encode, score, select, put rows where they belong.

`harness.engine.plugin.models` mixes it into vLLM's classes, a file for each family.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from harness.engine.plugin import group as layout
from harness.engine.plugin.scored import scored
from harness.engine.plugin.shards import gathered, share_out
from harness.engine.plugin.telemetry import VISION
from kernels.visionzip.budget import split_budget
from kernels.visionzip.contextual import contextual_targets, merge_contextual
from kernels.visionzip.control import random_scores
from kernels.visionzip.reference import merge_unit_scores
from kernels.visionzip.selection import BUDGETS, grid_tokens, select, select_tokens

logger = logging.getLogger("vllm.pruneroute")

_BY_TEXT = ("ngram", "suffix")
"""Ways of speculative decoding that look at the text alone."""


class FusedGroups:
    """Mixed in before a Qwen-VL class: image items are groups, and rows carry their positions.

    A family whose encoder computes in another order than that of its rows overrides `_to_raster`.
    """

    config: Any
    visual: Any
    language_model: Any
    use_data_parallel: bool

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self._start_groups(vllm_config)

    def _start_groups(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                "PruneRoute's vision lever cannot serve pipeline_parallel_size > 1: only the first "
                "stage sees where kept tokens belong; use tensor parallelism"
            )
        if getattr(parallel, "use_ubatching", False):
            raise ValueError(
                "PruneRoute cannot serve batches that are cut in two (enable_dbo, ubatch_size): each "
                "half would get the positions of the first; leave them off"
            )
        drafts = getattr(vllm_config, "speculative_config", None)
        if drafts is not None and drafts.method not in _BY_TEXT:
            raise ValueError(
                f"PruneRoute's vision lever cannot serve speculative decoding by {drafts.method!r}: a "
                "draft model would be handed the rows of a group as they are; use one of "
                f"{', '.join(_BY_TEXT)}"
            )
        for option in ("cudagraph_mm_encoder", "compile_mm_encoder"):
            if getattr(vllm_config.compilation_config, option, False):
                raise ValueError(
                    f"PruneRoute's vision lever cannot serve {option}=true: neither groups nor scores "
                    "pass through a captured encoder; leave it at false"
                )
        # Read by captured graphs, so one buffer for good; padding can take a step past
        # max_num_batched_tokens.
        longest = vllm_config.scheduler_config.max_num_batched_tokens + 1024
        self._row_offsets = torch.zeros(3, longest, dtype=torch.int64)
        self._row_offsets_used = 0
        # One image of the largest size is what an encoder call must hold in any case, and what vLLM
        # sets memory aside for.
        info = MULTIMODAL_REGISTRY.get_processing_info(vllm_config.model_config)
        self._patches_at_once = info.get_max_image_tokens() * self._merge_unit()
        self._normalization = info.normalization
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
        merged = self._merged_grids(grids)
        counts = [t * h * w for t, h, w in merged]
        policy = layout.POLICIES[spend.policy]
        if policy == "visionzip" and spend.keep < sum(counts):
            return self._zipped(pixel_values, grids, counts, spend)
        features = self._features(pixel_values, grids)
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

    def _features(self, pixel_values: Tensor, grids: Sequence[Sequence[int]]) -> Tensor:
        """Features of all tokens, [tokens, width]."""
        return self._encoded(pixel_values, grids, None, keys=False)[0]

    def _encoded(
        self, pixel_values: Tensor, grids: Sequence[Sequence[int]], layer: int | None, *, keys: bool
    ) -> tuple[Tensor, ...]:
        """As `_encoded_here`, each image by one rank where ranks hold the encoder whole."""
        ranks = get_tensor_model_parallel_world_size() if self.use_data_parallel else 1
        if ranks == 1:
            return self._encoded_here(pixel_values, grids, layer, keys=keys)
        patches = [t * h * w for t, h, w in grids]
        shares = share_out(patches, ranks)
        mine = shares[get_tensor_model_parallel_rank()]
        pixels = pixel_values.split(patches)
        found = self._encoded_here(
            torch.cat([pixels[i] for i in mine]) if mine else pixel_values[:0],
            [grids[i] for i in mine],
            layer,
            keys=keys,
        )
        tokens = [n // self._merge_unit() for n in patches]
        return tuple(
            gathered(own, rows, shares, lambda t: tensor_model_parallel_all_gather(t, dim=0))
            for own, rows in zip(found, (tokens, patches, patches), strict=False)
        )

    def _encoded_here(
        self, pixel_values: Tensor, grids: Sequence[Sequence[int]], layer: int | None, *, keys: bool
    ) -> tuple[Tensor, ...]:
        """Encode a few images at a time, as memory allows, all of them on this rank.

        Returns:
            Features of all tokens, [tokens, width]; where `layer` scores, the attention that each
            patch receives in it, [patches] float32; and if `keys`, the patches' keys there, [patches,
            head_dim] float32.
        """
        visual = self.visual
        patches = [t * h * w for t, h, w in grids]
        attention = None if layer is None else visual.blocks[layer].attn.attn
        if not patches:
            head = 0 if attention is None else attention.head_size
            weight = next(visual.parameters())
            nothing = weight.new_zeros((0, visual.out_hidden_size))
            scores = weight.new_zeros(0, dtype=torch.float32)
            own_keys = weight.new_zeros((0, head), dtype=torch.float32)
            return (nothing,) if layer is None else (nothing, scores, own_keys)[: 2 + keys]
        out = []
        with contextlib.ExitStack() as stack:
            captured = []
            if attention is not None:
                sharded = not self.use_data_parallel
                captured = stack.enter_context(
                    scored(attention, patches, keys=keys, sharded=sharded)
                )
            for first, end in layout.micro_batches(patches, self._patches_at_once):
                sizes = [sum(patches[first:end]), sum(patches[end:])]
                own, pixel_values = pixel_values.split(sizes)
                own = self._encoder_input(own)
                out.append(visual(own, grid_thw=[list(g) for g in grids[first:end]]))
        features = out[0] if len(out) == 1 else torch.cat(out)
        received = (torch.cat([r for r, _ in captured]),) if captured else ()
        found_keys = (torch.cat([k for _, k in captured if k is not None]),) if keys else ()
        return (features, *received, *found_keys)

    def _encoder_input(self, pixels: Tensor) -> Tensor:
        """Pixels as the encoder takes them, whoever left it to the model to normalise them."""
        if self._normalization is not None:
            return self._normalization(pixels, self.visual.dtype)
        # vLLM 0.28 and 0.29 normalise bytes before the encoder is called, later ones inside it.
        before = getattr(self, "input_norm", None)
        if before is not None:
            return before(pixels, self.visual.dtype)
        if pixels.dtype == torch.uint8 and not hasattr(self.visual, "input_norm"):
            raise RuntimeError(
                "pictures came as bytes to an encoder that does not normalise them; start the server "
                "with --no-mm-device-do-normalize"
            )
        return pixels

    def _zipped(
        self,
        pixel_values: Tensor,
        grids: Sequence[Sequence[int]],
        counts: Sequence[int],
        spend: layout.Spend,
    ) -> tuple[Tensor, Tensor]:
        """As `_encode_group`, by attention; rows that others are merged into are in their place."""
        features, scores, keys = self._scored(
            pixel_values, grids, spend.layer, keys=spend.contextual > 0
        )
        dominant = select(
            scores, counts, spend.keep - spend.contextual, spend.floor, BUDGETS[spend.budget]
        )
        if keys is None:
            return features, dominant
        targets = contextual_targets(dominant, sum(counts), spend.contextual)
        # DeepStack's columns, behind the embedding's own, go with their token as they are.
        width = features.shape[1] // (1 + self._deepstack_levels())
        features[targets, :width] = merge_contextual(
            features[:, :width], keys, counts, dominant, targets
        )
        return features, torch.cat([dominant, targets]).sort().values

    def _scored(
        self, pixel_values: Tensor, grids: Sequence[Sequence[int]], layer: int, *, keys: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features, scores and, if `keys`, the keys of all tokens, each in the rows' order.

        Returns:
            [tokens, width]; [tokens] float32; [tokens, head_dim] float32 or None.
        """
        unit = self._merge_unit()
        features, received, *found_keys = self._encoded(pixel_values, grids, layer, keys=keys)
        scores = self._to_raster(merge_unit_scores(received, unit), grids)
        if not keys:
            return features, scores, None
        token_keys = found_keys[0].view(len(features), unit, -1).mean(1)
        return features, scores, self._to_raster(token_keys, grids)

    def _to_raster(self, values: Tensor, grids: Sequence[Sequence[int]]) -> Tensor:
        """Values of all tokens, from the order of the encoder's blocks to that of its output.

        Args:
            values: [tokens, ...].
            grids: (t, h, w) of each image, in patches.
        """
        del grids
        return values

    def _merge_unit(self) -> int:
        """Patches that become one token."""
        return int(self.config.vision_config.spatial_merge_size) ** 2

    def _deepstack_levels(self) -> int:
        config = self.config.vision_config
        return len(getattr(config, "deepstack_visual_indexes", None) or ())

    def _merged_grids(self, grids: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
        """(t, h, w) of each image in merged tokens, from patches."""
        merge = self.visual.spatial_merge_size
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
            text = self.language_model.embed_input_ids(ids)
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
            offsets = self._row_offsets[:, : positions.shape[1]]
            positions += offsets
            # Idle steps of a data-parallel rank bring neither new positions nor new rows.
            offsets.zero_()
        return super().forward(  # type: ignore[misc]
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[Any], **_: Any
    ) -> tuple[Tensor, int]:
        """Positions at admission, [3, tokens] int64, and the offset of the tokens after the prompt."""
        merge = self.config.vision_config.spatial_merge_size
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
