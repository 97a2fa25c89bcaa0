"""The control chooses at random, under the rules of the real thing, and always the same."""

from __future__ import annotations

import pytest
import torch

from kernels.visionzip.budget import kept_count
from kernels.visionzip.control import random_scores
from kernels.visionzip.selection import select_tokens


def chosen(seeds: list[int], image_tokens: list[int], ratio: float, floor: int = 1) -> torch.Tensor:
    keep = kept_count(image_tokens, ratio, floor)
    return select_tokens(random_scores(seeds, image_tokens), image_tokens, keep, floor)


def test_scores_follow_from_the_seeds_alone() -> None:
    scores = random_scores([5, 2**63 - 1], [40, 60])
    assert scores.shape == (100,)
    assert scores.dtype == torch.float32
    assert scores.min() >= 0 and scores.max() < 1
    torch.manual_seed(1)
    assert torch.equal(scores, random_scores([5, 2**63 - 1], [40, 60]))
    assert not torch.equal(scores[:40], random_scores([6], [40]))


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    random_scores([1], [10])
    assert torch.equal(before, torch.get_rng_state())


def test_an_images_scores_do_not_depend_on_its_neighbours() -> None:
    together = random_scores([1, 2, 3], [7, 11, 13])
    assert torch.equal(together[7:18], random_scores([2], [11]))


def test_budget_and_floor_hold() -> None:
    counts = [100, 3, 50]
    kept = chosen([1, 2, 3], counts, 0.3, floor=5)
    assert len(kept) == kept_count(counts, 0.3, 5)
    in_second = ((kept >= 100) & (kept < 103)).sum()
    assert in_second == 3
    assert torch.equal(kept, kept.sort().values)


def test_a_smaller_budget_keeps_a_part_of_a_larger_one() -> None:
    larger = set(chosen([9], [200], 0.6).tolist())
    assert set(chosen([9], [200], 0.2).tolist()) < larger


def test_every_place_is_as_likely_as_any_other() -> None:
    hits = torch.zeros(20)
    for seed in range(2000):
        hits[chosen([seed], [20], 0.25)] += 1
    # 5 of 20 each time: 500 expected a place, standard deviation 19.
    assert (hits - 500).abs().max() < 5 * 19.4


def test_seeds_and_images_must_pair() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        random_scores([1], [2, 3])
