"""Bytes sent to the model and normalised there are, bit for bit, what the image processor makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen2VLImageProcessor

from harness.engine.plugin.model import FusedGroups
from harness.engine.plugin.pixels import (
    Normalization,
    cutting_only,
    decides_floats,
    sends_bytes,
)
from harness.pocket.model import ensure

SIZES = ((33, 77), (64, 64), (300, 211), (500, 40))


def processors() -> list[Any]:
    """Qwen3-VL's (patches of 16) and Qwen2-VL's own settings (of 14, other means)."""
    return [AutoImageProcessor.from_pretrained(ensure()), Qwen2VLImageProcessor()]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_the_same_bits(which: int, mode: str) -> None:
    stock = processors()[which]
    wrapped = cutting_only(SimpleNamespace(image_processor=stock)).image_processor
    normalized = Normalization.of(stock)
    rng = np.random.default_rng(0)
    images = [
        Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)).convert(mode)
        for w, h in SIZES
    ]
    want, got = (p(images, return_tensors="pt") for p in (stock, wrapped))
    assert got["pixel_values"].dtype == torch.uint8
    assert got["pixel_values"].shape[1] * 2 == want["pixel_values"].shape[1]
    assert torch.equal(got["image_grid_thw"], want["image_grid_thw"])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(normalized(got["pixel_values"], dtype), want["pixel_values"].to(dtype))


def test_every_byte_in_every_channel() -> None:
    stock = processors()[0]
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16).repeat(4, 0).repeat(4, 1)
    image = Image.fromarray(np.stack([levels, levels[::-1], levels.T], -1))
    want = stock([image], return_tensors="pt")["pixel_values"]
    wrapped = cutting_only(SimpleNamespace(image_processor=stock)).image_processor
    got = wrapped([image], return_tensors="pt")["pixel_values"]
    assert len(got.unique()) == 256
    assert torch.equal(Normalization.of(stock)(got, torch.float32), want)


def test_the_checkpoints_own_processor_is_left_as_it_is() -> None:
    stock = processors()[0]
    cutting_only(SimpleNamespace(image_processor=stock))
    assert (stock.do_rescale, stock.do_normalize, stock.temporal_patch_size) == (True, True, 2)


def test_floats_are_refused_and_nothing_is_nothing() -> None:
    normalized = Normalization.of(processors()[0])
    with pytest.raises(TypeError, match="float32 where bytes"):
        normalized(torch.rand(3, 1536), torch.float32)
    assert normalized(torch.zeros(0, 768, dtype=torch.uint8), torch.float32).shape == (0, 1536)


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({}, []),
        ({"size": {"shortest_edge": 1}}, []),
        ({"do_normalize": True}, ["do_normalize"]),
        ({"images_kwargs": {"image_mean": [0, 0, 0]}}, ["image_mean"]),
        ({"rescale_factor": 1, "do_rescale": True}, ["do_rescale", "rescale_factor"]),
    ],
)
def test_what_the_server_says_about_floats_counts(kwargs: dict[str, Any], found: list[str]) -> None:
    assert decides_floats(kwargs) == found
    assert sends_bytes(processors()[0], kwargs) == (not found)


@pytest.mark.parametrize("name", ["do_rescale", "do_normalize"])
def test_a_checkpoint_that_does_less_keeps_its_processor(name: str) -> None:
    stock = processors()[0]
    setattr(stock, name, False)
    assert not sends_bytes(stock, {})


def encoder_input(pixels: torch.Tensor, **model: Any) -> torch.Tensor:
    """What `FusedGroups` hands to the encoder, of a model with these attributes."""
    visual = SimpleNamespace(dtype=torch.bfloat16, **model.pop("visual", {}))
    owner = SimpleNamespace(visual=visual, **{"_normalization": None, **model})
    return FusedGroups._encoder_input(owner, pixels)  # type: ignore[arg-type]


def test_whoever_is_to_normalise_does_so_once() -> None:
    pixels = torch.arange(6, dtype=torch.uint8).view(1, 6)

    def halved(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (given / 2).to(dtype)

    assert torch.equal(encoder_input(pixels, _normalization=halved), halved(pixels, torch.bfloat16))
    assert torch.equal(encoder_input(pixels, input_norm=halved), halved(pixels, torch.bfloat16))
    inside = encoder_input(pixels, visual={"input_norm": halved})
    assert inside is pixels
    floats = pixels.to(torch.bfloat16)
    assert encoder_input(floats) is floats
    with pytest.raises(RuntimeError, match="no-mm-device-do-normalize"):
        encoder_input(pixels)
