"""Which vision tokens stay: one budget over all images of a group, spent by their scores.

Every image's scores average 1, whatever it shows (see `kernels.visionzip.reference`), so which image
gets how much is decided by the shape of its scores alone, and how that is read makes the difference:

* ``raw``: the highest scores of all images. An image without content, whose scores hover around 1,
  is kept whole as soon as the budget reaches down to 1, and one with a few dominant tokens starves.
* ``sink_clipped``: the same after each image's scores are clipped at a quantile, so that a few sinks
  do not take all of its mass, and scaled back to an average of 1.
* ``rank``: the same after scores are replaced by their rank within the image; but for ties an equal
  share of every image.
* ``per_image``: an equal share of every image.
* ``excess``: images get shares in proportion to their size times their excess mass, mean(max(s - 1,
  0)), half the total variation distance from even attention; within an image the highest stay.
* ``log_excess``: the same with mean(max(ln s, 0)), in which a few very high scores count less than
  many that are somewhat high.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.visionzip.budget import split_budget

SINK_QUANTILE = 0.9
"""Of an image's scores; ``sink_clipped`` cuts those above it down to it."""


def select(
    scores: Tensor, image_tokens: Sequence[int], keep: int, floor: int, budget: str
) -> Tensor:
    """The tokens that stay under a rule.

    Args:
        scores: [Σ image_tokens] float32, an average of 1 in every image.
        image_tokens: tokens of each image.
        keep: tokens to keep in all, from `kernels.visionzip.budget.kept_count`.
        floor: fewest tokens of each image.
        budget: one of `BUDGETS`.

    Returns:
        [keep] int64 on the scores' device, ascending: images stay in order, and raster order holds
        inside each. The same scores always select the same tokens; ties go to the lower index.

    Raises:
        ValueError: the scores do not cover the images or are not finite, `keep` is out of range, or
            there is no such rule.
    """
    _check(scores, image_tokens, keep, floor)
    if budget in _COMPARABLE:
        per_image = [_COMPARABLE[budget](s) for s in scores.split(list(image_tokens))]
        return select_tokens(torch.cat(per_image), image_tokens, keep, floor)
    if budget not in _CONTENT:
        raise ValueError(f"budget {budget!r} must be one of {', '.join(BUDGETS)}")
    content = torch.stack([_CONTENT[budget](s) for s in scores.split(list(image_tokens))]).tolist()
    counts = split_budget(image_tokens, keep, floor, content)
    return best_of_each(scores, image_tokens, counts)


def select_tokens(scores: Tensor, image_tokens: Sequence[int], keep: int, floor: int) -> Tensor:
    """The `keep` highest scores of the group, with a floor per image.

    Every image first gets its own `floor` best tokens; the rest of the budget goes to the highest
    scores left, whichever image they are in.

    Args, Returns, Raises: as of `select`.
    """
    _check(scores, image_tokens, keep, floor)
    total = sum(image_tokens)
    if keep == total:
        return torch.arange(total, device=scores.device)
    ranked = scores.clone()
    start = 0
    for length in image_tokens:
        best = torch.argsort(scores[start : start + length], descending=True, stable=True)
        ranked[start + best[: min(floor, length)]] = torch.inf
        start += length
    order = torch.argsort(ranked, descending=True, stable=True)
    return order[:keep].sort().values


def best_of_each(scores: Tensor, image_tokens: Sequence[int], counts: Sequence[int]) -> Tensor:
    """The highest scores of each image, `counts` of them: [Σ counts] int64, ascending."""
    starts = [0, *itertools.accumulate(image_tokens)]
    parts = zip(starts, scores.split(list(image_tokens)), counts, strict=False)
    return torch.cat(
        [
            start + torch.argsort(own, descending=True, stable=True)[:count].sort().values
            for start, own, count in parts
        ]
    )


def grid_tokens(height: int, width: int, count: int) -> list[int]:
    """Tokens of one image at even distances, whatever it shows.

    Rows and columns are taken so that there are at least `count` crossings, as close to the image's
    proportions as that goes; of these every so many-th is left out.

    Args:
        height, width: of the image [tokens].
        count: tokens to take, 0 to height · width.

    Returns:
        `count` different indices in raster order, ascending.

    Raises:
        ValueError: `count` is out of range.
    """
    if not 0 <= count <= height * width:
        raise ValueError(f"cannot take {count} of {height} x {width} tokens")
    if count == 0:
        return []

    def distortion(rows: int) -> tuple[float, int]:
        columns = -(-count // rows)
        return abs(rows * width / (columns * height) - 1), rows * columns

    fitting = [r for r in range(1, height + 1) if -(-count // r) <= width]
    rows = min(fitting, key=distortion)
    columns = -(-count // rows)
    crossings = [
        (2 * r + 1) * height // (2 * rows) * width + (2 * c + 1) * width // (2 * columns)
        for r in range(rows)
        for c in range(columns)
    ]
    return [crossings[(2 * i + 1) * len(crossings) // (2 * count)] for i in range(count)]


def _check(scores: Tensor, image_tokens: Sequence[int], keep: int, floor: int) -> None:
    total = sum(image_tokens)
    if scores.shape != (total,):
        raise ValueError(f"{tuple(scores.shape)} scores for {total} tokens")
    floors = [min(floor, n) for n in image_tokens]
    if not sum(floors) <= keep <= total:
        raise ValueError(f"cannot keep {keep} of {total} tokens with floors {floors}")
    if keep < total and not bool(torch.isfinite(scores).all()):
        raise ValueError("scores must be finite")


def _sink_clipped(scores: Tensor) -> Tensor:
    clipped = scores.clamp(max=torch.quantile(scores, SINK_QUANTILE))
    # Scores are no negative numbers; all zero only where there is nothing to compare.
    return clipped / clipped.mean().clamp(min=torch.finfo(scores.dtype).tiny)


def _rank(scores: Tensor) -> Tensor:
    rank = torch.argsort(torch.argsort(scores, descending=True, stable=True))
    return 1 - rank.to(scores.dtype) / len(scores)


_COMPARABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": lambda s: s,
    "sink_clipped": _sink_clipped,
    "rank": _rank,
}
"""An image's scores, [n] to [n], before they are compared across images."""

_CONTENT: dict[str, Callable[[Tensor], Tensor]] = {
    "per_image": lambda s: s.new_ones(()),
    "excess": lambda s: (s - 1).clamp(min=0).mean(),
    "log_excess": lambda s: s.clamp(min=1).log().mean(),
}
"""How much there is in an image for each of its tokens, [n] to a scalar."""

BUDGETS = (*_COMPARABLE, *_CONTENT)
