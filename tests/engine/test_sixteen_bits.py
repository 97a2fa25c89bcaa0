"""Grey pictures of 16 bits are scaled, and nothing else changes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from harness.engine.plugin.sixteen_bits import to_eight_bits

GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)


def test_values_are_scaled() -> None:
    deep = Image.fromarray(GREY).convert("I").point(lambda v: v * 257)
    buffer = io.BytesIO()
    deep.convert("I;16").save(buffer, "PNG")
    stored = Image.open(buffer)
    assert stored.mode == "I;16"
    for image in (stored, deep):
        found = to_eight_bits(image)
        assert found.mode == "L" and np.array_equal(np.asarray(found), GREY)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_others_are_left_alone(mode: str) -> None:
    image = Image.fromarray(GREY).convert(mode)
    assert to_eight_bits(image) is image
