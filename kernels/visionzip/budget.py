"""How many vision tokens a group of images keeps, and how many of them each image gets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction


def kept_count(image_tokens: Sequence[int], retain_ratio: float, floor: int) -> int:
    """Tokens that a group of images keeps: its whole budget, known from sizes alone.

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


def split_budget(
    image_tokens: Sequence[int], keep: int, floor: int, content: Sequence[float]
) -> list[int]:
    """Share a group's budget out over its images, in proportion to size times content.

    An image gets λ · tokens · content, but no fewer than its floor and no more than all it has, with
    the one λ that spends the budget (water-filling). Fractions go to the largest remainders; ties to
    the first image. Where no image has any content, sizes alone count.

    Args:
        image_tokens: tokens of each image, each >= 1.
        keep: tokens in all, from `kept_count`.
        floor: fewest tokens of each image; an image of fewer keeps all it has.
        content: of each image, for each of its tokens; >= 0.

    Returns:
        Tokens of each image; they sum to `keep`.

    Raises:
        ValueError: content is negative or no number, or `keep` is less than the floors or more than
            there are tokens.
    """
    least = [min(floor, n) for n in image_tokens]
    if not sum(least) <= keep <= sum(image_tokens):
        raise ValueError(f"cannot split {keep} over images of {list(image_tokens)} tokens")
    if len(content) != len(image_tokens) or not all(0 <= c < math.inf for c in content):
        raise ValueError(f"content {list(content)} must be a number >= 0 for each image")
    # What is left when all others are full goes to images without content, by size.
    ground = max(content) * 1e-9 or 1.0
    weights = [n * (c + ground) for n, c in zip(image_tokens, content, strict=True)]

    def shares(level: float) -> list[float]:
        bounds = zip(weights, least, image_tokens, strict=True)
        return [min(max(level * w, low), high) for w, low, high in bounds]

    low, high = 0.0, max(n / w for n, w in zip(image_tokens, weights, strict=True))
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < keep else (low, middle)
    exact = shares(high)
    given = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (given[i] - exact[i], i))
    # Rounding errors can leave one more to give than there are fractions.
    for i in itertools.cycle(by_remainder):
        if sum(given) >= keep:
            break
        given[i] += given[i] < image_tokens[i]
    for i in itertools.cycle(reversed(by_remainder)):
        if sum(given) <= keep:
            return given
        given[i] -= given[i] > least[i]
    raise AssertionError("unreachable: there is always an image to give to or take from")
