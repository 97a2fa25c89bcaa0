"""Pixels as bytes on their way to the encoder, and what the image processor would have made of them.

A Qwen-VL image processor turns each byte of a picture into two floats (scaled, normalised, and every
patch twice, as if it were two frames of a film). In the API server that takes longer than all else done
to a picture, and then four times the bytes (at 16 bits a float) go through the engine's queue and to the
device. Here the processor is told to cut patches and no more; the rest is done where the encoder runs, in
the same float32 operations, so that the encoder gets the same bits.

Later releases of vLLM do much the same themselves (`mm_device_do_normalize`) and are left to it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AS_BYTES: Mapping[str, Any] = {
    "do_rescale": False,
    "do_normalize": False,
    "temporal_patch_size": 1,
}
"""Settings under which a Qwen-VL image processor gives patches of bytes, each once."""

_DECIDES = {*AS_BYTES, "do_convert_rgb", "rescale_factor", "image_mean", "image_std"}


def decides_floats(kwargs: Mapping[str, Any]) -> list[str]:
    """Which of a processor's arguments, flat or nested, decide what a byte becomes."""
    nested = kwargs.get("images_kwargs") or {}
    return sorted(_DECIDES & {*kwargs, *nested})


def sends_bytes(image_processor: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether bytes and `Normalization` give what the processor would.

    Args:
        image_processor: the checkpoint's.
        kwargs: the server's arguments for it.
    """
    return bool(
        image_processor.do_rescale and image_processor.do_normalize and not decides_floats(kwargs)
    )


def cutting_only(processor: Any) -> Any:
    """A multimodal processor like this one, whose images become patches of bytes."""
    processor = copy.copy(processor)
    processor.image_processor = copy.copy(processor.image_processor)
    for name, value in AS_BYTES.items():
        setattr(processor.image_processor, name, value)
    return processor


@dataclass(frozen=True)
class Normalization:
    """What the image processor does to a patch's bytes.

    Attributes:
        mean, std: of each channel, in bytes [0, 255].
        frames: how often each patch stands in its row (`temporal_patch_size`).
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    frames: int

    @classmethod
    def of(cls, image_processor: Any) -> Normalization:
        """Of a checkpoint's image processor."""
        # In the order of operations of Transformers' `_fuse_mean_std_and_rescale_factor`, for its bits.
        scale = 1.0 / image_processor.rescale_factor
        mean, std = (
            (torch.tensor(v) * scale).tolist()
            for v in (image_processor.image_mean, image_processor.image_std)
        )
        return cls(tuple(mean), tuple(std), image_processor.temporal_patch_size)

    def __call__(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """The encoder's input.

        Args:
            pixels: [patches, channels · side²] uint8, channel by channel.
            dtype: the encoder's.

        Returns:
            [patches, channels · frames · side²] of `dtype`.

        Raises:
            TypeError: these are no bytes.
        """
        if pixels.dtype != torch.uint8:
            raise TypeError(f"pixels of type {pixels.dtype} where bytes were to come")
        mean, std = (
            torch.tensor(v, device=pixels.device)[None, :, None, None]
            for v in (self.mean, self.std)
        )
        rows, width = pixels.shape
        planes = pixels.view(rows, len(self.mean), 1, width // len(self.mean)).to(torch.float32)
        normal = ((planes - mean) / std).to(dtype)
        return normal.expand(-1, -1, self.frames, -1).reshape(rows, width * self.frames)
