"""Share of their vision tokens that images keep: the mean over images, and over tokens.

The two differ where images differ in size: a large image counts once in the first and by its tokens
in the second. Intervals are those of `metrics.intervals`; the images of a request compete with one
another, so a request is drawn as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metrics.intervals import Array, Estimate, of_means

Request = Sequence[tuple[int, int]]
"""Vision tokens before and after, of each image of one request."""


def by_image(requests: Sequence[Request]) -> Estimate:
    """Mean over images of after / before, in [0, 1].

    Raises:
        ValueError: there is no image, or one without tokens.
    """
    return _ratio([[(after / before, 1.0) for before, after in r] for r in _checked(requests)])


def by_token(requests: Sequence[Request]) -> Estimate:
    """Σ after / Σ before, in [0, 1].

    Raises:
        ValueError: there is no image, or one without tokens.
    """
    return _ratio(
        [[(float(after), float(before)) for before, after in r] for r in _checked(requests)]
    )


def _checked(requests: Sequence[Request]) -> list[Request]:
    with_images = [r for r in requests if r]
    if not with_images or any(before < 1 for r in with_images for before, _ in r):
        raise ValueError("retention needs images, each of at least one token")
    return with_images


def _ratio(requests: Sequence[Sequence[tuple[float, float]]]) -> Estimate:
    sums = np.array([np.sum(np.array(r), axis=0) for r in requests])

    def statistic(means: Array) -> Array:
        return means[..., 0] / means[..., 1]

    return of_means(statistic, sums)
