"""How many vision tokens a group of images keeps: known from sizes alone, before any is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def kept_count(image_tokens: Sequence[int], retain_ratio: float, floor: int) -> int:
    """Tokens that a group of images keeps: its whole budget, fixed before the content is seen.

    floor(retain_ratio · Σ tokens), and at least the sum of the images' floors. The ratio counts as
    the decimal that it was written as: 0.7 of 360 is 252, though 0.7 · 360 is 251.99… in binary.

    Args:
        image_tokens: tokens of each image, after the encoder's spatial merge; each >= 1.
        retain_ratio: share to keep, in (0, 1].
        floor: fewest tokens of each image; an image of fewer keeps all it has.

    Raises:
        ValueError: no images, an empty image, or a ratio or floor out of range.
    """
    if not image_tokens or min(image_tokens) < 1:
        raise ValueError(f"image_tokens {list(image_tokens)}: every image must have a token")
    if not 0 < retain_ratio <= 1:
        raise ValueError(f"retain_ratio {retain_ratio} is not in (0, 1]")
    if floor < 0:
        raise ValueError(f"floor {floor} is negative")
    share = Fraction(str(retain_ratio)) * sum(image_tokens)
    floors = sum(min(floor, n) for n in image_tokens)
    return max(int(share), floors, 1)
