"""16-bit grey pictures: vLLM would clip them to white.

Pillow turns modes of more than 8 bits into RGB by clipping at 255, and vLLM leaves it at that, so that
a 16-bit PNG (a scan, an X-ray) arrives as a white page. Here they are scaled.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from PIL import Image

logger = logging.getLogger("vllm.pruneroute")

_DEEP = ("I;16", "I;16B", "I;16L", "I;16N", "I")


def to_eight_bits(image: Image.Image) -> Image.Image:
    """A picture of mode ``I;16`` or ``I``, 0 to 65,535, as mode ``L``; any other as it is."""
    if image.mode not in _DEEP:
        return image
    # Integers of 32 bits first: `point` has no scale for the 16-bit modes.
    return image.convert("I").point(lambda v: v * (1 / 257) + 0.5).convert("L")


def install() -> None:
    """Have vLLM's converter scale such pictures; again changes nothing."""
    import vllm.multimodal.image
    import vllm.multimodal.parse  # noqa: F401

    places: list[Any] = [
        module
        for name, module in [*sys.modules.items()]
        if name.startswith("vllm.multimodal.") and hasattr(module, "convert_image_mode")
    ]
    if not places:
        logger.warning(
            "PruneRoute: vLLM's image converter is not where it was; 16-bit pictures clip"
        )
    for place in places:
        if not hasattr(place.convert_image_mode, "scales_sixteen_bits"):
            place.convert_image_mode = _scaling(place.convert_image_mode)


def _scaling(convert: Callable[..., Image.Image]) -> Callable[..., Image.Image]:
    @functools.wraps(convert)
    def wrapped(image: Image.Image, *args: Any, **kwargs: Any) -> Image.Image:
        return convert(to_eight_bits(image), *args, **kwargs)

    wrapped.scales_sixteen_bits = True  # type: ignore[attr-defined]
    return wrapped
