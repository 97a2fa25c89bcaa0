"""The multimodal processor that joins the images of a turn into one group of fixed length.

Runs in vLLM's API server, on every request, before it is admitted: a request that cannot be served
gets vLLM's ordinary error here and never reaches the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.parse import ImageProcessorItems

from harness.engine.plugin import group as layout
from harness.engine.plugin.pixels import (
    Normalization,
    cutting_only,
    decides_floats,
    sends_bytes,
)
from kernels.visionzip.budget import kept_count

_TURN_END = "<|im_end|>"
_LONGEST = 200
"""Long side over short side that Qwen-VL's `smart_resize` takes. What vLLM makes of its error names no
reason."""
_MARKERS = 2
"""Tokens around an image: its start and its end."""
_REQUEST_KEYS = {f.name for f in dataclasses.fields(layout.VisionRequest)}


class GroupInfo:
    """Mixed in before a Qwen-VL processing info: sizes for items that hold all images of a turn."""

    ctx: Any
    allowed_mm_limits: Mapping[str, int]
    get_max_image_tokens: Callable[[], int]

    @cached_property
    def normalization(self) -> Normalization | None:
        """What is left to do for the model; None where it gets pictures as ever.

        The same for all requests of a server, since they share batches.
        """
        processor = super().get_hf_processor().image_processor  # type: ignore[misc]
        # A vLLM that normalises on the device itself says so in these arguments.
        server = self.ctx.get_merged_mm_kwargs({})
        return Normalization.of(processor) if sends_bytes(processor, server) else None

    def get_hf_processor(self, **kwargs: object) -> Any:
        """As the stock method; where there is a `normalization`, one that leaves bytes as they are."""
        processor = super().get_hf_processor(**kwargs)  # type: ignore[misc]
        return processor if self.normalization is None else cutting_only(processor)

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """As the stock method; a group may be as long as the context."""
        largest = dict(super().get_mm_max_tokens_per_item(seq_len, mm_counts))  # type: ignore[misc]
        # vLLM asks for one item, whatever a request may hold, while a group holds them all and the
        # text between; only the context bounds that.
        images = self.allowed_mm_limits.get("image", 1)
        if images > 1:
            largest["image"] = max(largest["image"], seq_len)
        return largest

    def whole_group(self, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Counts of dummy inputs: where vLLM asks for one item, a whole group of the largest images."""
        if not mm_counts.get("image"):
            return mm_counts
        fit = self.ctx.model_config.max_model_len // (self.get_max_image_tokens() + _MARKERS)
        most = min(self.allowed_mm_limits.get("image", 1), fit)
        return {**mm_counts, "image": max(mm_counts["image"], most)}


class GroupDummyInputs:
    """Mixed in before a Qwen-VL builder of dummy inputs: vLLM up to 0.30 profiles what it gives."""

    info: Any

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], *args: Any, **kwargs: Any
    ) -> Any:
        """As the stock method, for a whole group."""
        counts = self.info.whole_group(mm_counts)
        return super().get_dummy_processor_inputs(seq_len, counts, *args, **kwargs)  # type: ignore[misc]


class GroupProcessor:
    """Mixed in before a Qwen-VL processor: stock processing, then one item for each turn's images."""

    info: Any
    _apply_hf_processor: Callable[..., Any]

    def apply(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock method, with image items fused; see `harness.engine.plugin.group`.

        Raises:
            ValueError: the request's vision settings are wrong, it holds a video, or pruning would
                push positions past the model's rotary table.
        """
        processor_kwargs = dict(inputs.hf_processor_mm_kwargs)
        asked = {k: processor_kwargs.pop(k) for k in _REQUEST_KEYS & processor_kwargs.keys()}
        request = layout.VisionRequest(**asked)
        self._check(inputs, request, processor_kwargs)
        inputs = dataclasses.replace(inputs, hf_processor_mm_kwargs=processor_kwargs)
        full_tokens = None
        if request.policy == "downscale" and request.prunes and "image" in inputs.mm_data_items:
            inputs, full_tokens = self._downscaled(inputs, request)
        plain = super().apply(inputs, *args, **kwargs)  # type: ignore[misc]
        if plain["mm_placeholders"].get("image"):
            self._fuse(plain, request, full_tokens)
        return plain

    def get_dummy_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], *args: Any, **kwargs: Any
    ) -> Any:
        """As the stock method, for a whole group; vLLM from 0.31 on profiles what it gives."""
        counts = self.info.whole_group(mm_counts)
        return super().get_dummy_inputs(seq_len, counts, *args, **kwargs)  # type: ignore[misc]

    def _downscaled(self, inputs: Any, request: layout.VisionRequest) -> tuple[Any, list[int]]:
        """Inputs with smaller images, and the tokens that each image would have had as it was."""
        config = self.info.get_hf_config().vision_config
        side = config.patch_size * config.spatial_merge_size
        processor = self.info.get_image_processor(**inputs.hf_processor_mm_kwargs)
        smaller, tokens = [], []
        for image in inputs.mm_data_items["image"].get_all():
            if not isinstance(image, Image.Image):
                raise ValueError(
                    f"policy=downscale takes images as files, not as {type(image).__name__}"
                )
            size, count = self.info._get_vision_info(
                image_width=image.width,
                image_height=image.height,
                num_frames=1,
                image_processor=processor,
                mm_kwargs=inputs.hf_processor_mm_kwargs,
            )
            tokens.append(count)
            due = kept_count([count], request.retain_ratio, request.min_tokens_per_image)
            rows, columns = layout.downscaled_grid(size.height // side, size.width // side, due)
            smaller.append(
                image.convert("RGB").resize((columns * side, rows * side), Image.Resampling.BICUBIC)
            )
        # The processor would scale an image below its least size up again.
        size = {"shortest_edge": side * side, "longest_edge": processor.size["longest_edge"]}
        return dataclasses.replace(
            inputs,
            mm_data_items=type(inputs.mm_data_items)(
                {**inputs.mm_data_items, "image": ImageProcessorItems(smaller)}
            ),
            hf_processor_mm_kwargs={**inputs.hf_processor_mm_kwargs, "size": size},
        ), tokens

    def _cached_apply_hf_processor(self, inputs: Any, timing_ctx: Any) -> Any:
        """Never from the cache: it hands out no tensors on a hit, and a group needs them all."""
        return self._apply_hf_processor(inputs, timing_ctx)

    def _check(
        self, inputs: Any, request: layout.VisionRequest, processor_kwargs: Mapping[str, Any]
    ) -> None:
        floats = decides_floats(processor_kwargs)
        if floats and self.info.normalization is not None:
            raise ValueError(
                f"mm_processor_kwargs: {', '.join(floats)} cannot differ from request to request; "
                "start the server with --mm-processor-kwargs"
            )
        if inputs.mm_data_items.get_all_counts().get("video", 0):
            raise ValueError(
                "PruneRoute's vision lever serves images, not videos; send frames as images, or "
                "start the server without the plugin"
            )
        vision = self.info.get_hf_config().vision_config
        depth = vision.depth
        if not -depth <= request.layer < depth:
            raise ValueError(
                f"layer={request.layer}: the vision encoder has layers 0 to {depth - 1} "
                f"(or -{depth} to -1)"
            )
        whole = getattr(vision, "fullatt_block_indexes", None)
        layout.check_scored_layer(request, depth, whole)
        if "image" in inputs.mm_data_items:
            images = inputs.mm_data_items.get_items("image", ImageProcessorItems)
            for i in range(images.get_count()):
                width, height = images.get_image_size(i)
                if max(width, height) > _LONGEST * min(width, height):
                    raise ValueError(
                        f"image {i + 1} is {width} x {height} px: its aspect ratio is more than "
                        f"{_LONGEST}, which the model's processor does not take; cut it up"
                    )

    def _fuse(
        self, plain: Any, request: layout.VisionRequest, full_tokens: list[int] | None
    ) -> None:
        """Replace the image items of a processed prompt by groups, in place.

        Args:
            plain: the processed prompt.
            request: the vision lever.
            full_tokens: of each image before it was made smaller; None where none was.
        """
        config = self.info.get_hf_config()
        merge = config.vision_config.spatial_merge_size
        turn_end = self.info.get_tokenizer().convert_tokens_to_ids(_TURN_END)
        ids: list[int] = list(plain["prompt_token_ids"])
        spans = [layout.Span(p.offset, p.length) for p in plain["mm_placeholders"]["image"]]
        items = plain["mm_kwargs"]["image"]
        hashes = plain["mm_hashes"]["image"]

        fused_ids: list[int] = []
        fused_items: list[MultiModalKwargsItem] = []
        fused_hashes: list[str] = []
        ranges: list[PlaceholderRange] = []
        groups: list[tuple[layout.Span, int]] = []
        done = 0
        for members in layout.group_spans(ids, spans, turn_end):
            first, last = spans[members[0]], spans[members[-1]]
            gaps = [ids[spans[a].end : spans[b].offset] for a, b in itertools.pairwise(members)]
            grids = torch.stack([items[i]["image_grid_thw"].data for i in members])
            counts = [spans[i].length for i in members]
            spend = layout.spend_of(request, counts)
            own_hashes = [hashes[i] for i in members]
            identifier = layout.group_hash(own_hashes, grids.tolist(), gaps, spend)

            fused_ids += ids[done : first.offset]
            offset = len(fused_ids)
            placeholder = ids[first.offset]
            for share, gap in zip(
                layout.proportional_split(counts, spend.keep), [*gaps, []], strict=True
            ):
                fused_ids += [placeholder] * share + gap
            done = last.end

            span = layout.Span(offset, len(fused_ids) - offset)
            merged = [(t, h // merge, w // merge) for t, h, w in grids.tolist()]
            groups.append((span, layout.group_extent(merged, [len(g) for g in gaps])))
            ranges.append(PlaceholderRange(offset=span.offset, length=span.length))
            fused_hashes.append(identifier)
            pixels = [items[i]["pixel_values"].data for i in members]
            if self.info.normalization and any(p.dtype != torch.uint8 for p in pixels):
                raise ValueError("images given as arrays have to be of bytes (uint8)")
            seeds = [0] * len(members)
            if request.policy == "random" and spend.keep < sum(counts):
                seeds = [
                    layout.image_seed(p, g) for p, g in zip(pixels, grids.tolist(), strict=True)
                ]
            fused_items.append(
                _group_item(
                    pixel_values=torch.cat(pixels),
                    grids=grids,
                    gap_ids=[t for g in gaps for t in g],
                    gap_lengths=[len(g) for g in gaps],
                    seeds=seeds,
                    full_tokens=counts
                    if full_tokens is None
                    else [full_tokens[i] for i in members],
                    spend=spend,
                    key=layout.group_key(identifier),
                )
            )
        fused_ids += ids[done:]
        self._check_positions(len(fused_ids), groups)

        plain["prompt_token_ids"] = fused_ids
        plain["mm_kwargs"] = MultiModalKwargsItems({**plain["mm_kwargs"], "image": fused_items})
        plain["mm_hashes"] = {**plain["mm_hashes"], "image": fused_hashes}
        plain["mm_placeholders"] = {**plain["mm_placeholders"], "image": ranges}

    def _check_positions(self, prompt_length: int, groups: list[tuple[layout.Span, int]]) -> None:
        """Kept tokens keep their positions, which so can pass the number of tokens."""
        _, shift = layout.prompt_positions(prompt_length, groups)
        table = self.info.get_hf_config().get_text_config().max_position_embeddings
        longest = self.info.ctx.model_config.max_model_len
        if shift > 0 and longest + shift > table:
            raise ValueError(
                f"pruning leaves positions {shift} ahead of the token count, so that a request of "
                f"max_model_len={longest} tokens could pass the model's {table} positions; lower "
                "engine.max_model_len or raise vision.retain_ratio"
            )


def _group_item(
    *,
    pixel_values: torch.Tensor,
    grids: torch.Tensor,
    gap_ids: list[int],
    gap_lengths: list[int],
    seeds: list[int],
    full_tokens: list[int],
    spend: layout.Spend,
    key: int,
) -> MultiModalKwargsItem:
    """One group as vLLM's item: what `harness.engine.plugin.model` reads back.

    Fields (concatenated over the groups of an encoder call unless said otherwise): `pixel_values`
    [patches, width]; `image_grid_thw` [images, 3], in patches; `gap_ids` [tokens]; `gap_lengths`
    [images - 1]; `image_seeds` [images], of random choices; `full_tokens` [images], before any
    lever; `group_spend` [groups, 8] of images, the fields of `Spend`, key.
    """

    def flat(data: torch.Tensor, *, keep_on_cpu: bool) -> MultiModalFieldElem:
        field = MultiModalFlatField(slices=[slice(0, len(data))], keep_on_cpu=keep_on_cpu)
        return _element("image", data, field)

    # Positions are computed from fields on the CPU; a prefix-cache hit over the whole group strips
    # all others.
    return MultiModalKwargsItem(
        {
            "pixel_values": flat(pixel_values, keep_on_cpu=False),
            "image_grid_thw": flat(grids, keep_on_cpu=True),
            "gap_ids": flat(torch.tensor(gap_ids, dtype=torch.int64), keep_on_cpu=True),
            "gap_lengths": flat(torch.tensor(gap_lengths, dtype=torch.int64), keep_on_cpu=True),
            "image_seeds": flat(torch.tensor(seeds, dtype=torch.int64), keep_on_cpu=True),
            "full_tokens": flat(torch.tensor(full_tokens, dtype=torch.int64), keep_on_cpu=True),
            "group_spend": _element(
                "image",
                torch.tensor([len(grids), *dataclasses.astuple(spend), key], dtype=torch.int64),
                MultiModalBatchedField(keep_on_cpu=True),
            ),
        }
    )


def _element(modality: str, data: torch.Tensor, field: Any) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=field)
