"""Which tokens stay: against a person's way of picking them, and what each rule is for."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.visionzip.budget import kept_count, split_budget
from kernels.visionzip.contextual import contextual_count, contextual_targets, merge_contextual
from kernels.visionzip.selection import BUDGETS, grid_tokens, select, select_tokens


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[float], list[int], int, int]:
    """Scores with many ties, image sizes, a floor, and a budget that they allow."""
    counts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    floor = draw(st.integers(0, 5))
    values = draw(st.sampled_from([[0.0, 1.0], [0.0, -0.0, 0.5, 1.0, 2.0], None]))
    element = st.floats(0, 1e6, width=32) if values is None else st.sampled_from(values)
    scores = draw(st.lists(element, min_size=sum(counts), max_size=sum(counts)))
    least = sum(min(floor, n) for n in counts)
    keep = draw(st.integers(least, sum(counts)))
    return scores, counts, keep, floor


def brute_force(scores: list[float], counts: list[int], keep: int, floor: int) -> list[int]:
    """Pick one token after the other, as a person would."""
    image_of = [i for i, n in enumerate(counts) for _ in range(n)]
    chosen: set[int] = set()

    def best(candidates: list[int]) -> int:
        top = max(scores[c] for c in candidates)
        return min(c for c in candidates if scores[c] == top)

    for image, n in enumerate(counts):
        for _ in range(min(floor, n)):
            mine = [t for t in range(len(scores)) if image_of[t] == image and t not in chosen]
            chosen.add(best(mine))
    while len(chosen) < keep:
        chosen.add(best([t for t in range(len(scores)) if t not in chosen]))
    return sorted(chosen)


@given(selections())
@settings(max_examples=400, deadline=None)
def test_selection_is_the_brute_force_one(case: tuple[list[float], list[int], int, int]) -> None:
    scores, counts, keep, floor = case
    got = select_tokens(torch.tensor(scores), counts, keep, floor)
    assert got.dtype == torch.int64
    assert got.tolist() == brute_force(scores, counts, keep, floor)


def test_ties_go_to_the_lower_index_in_images_of_any_size() -> None:
    """Sorting is only by luck stable for a few elements, and not for many."""
    counts = [700, 900]
    flat = torch.ones(1600)
    assert select_tokens(flat, counts, 14, 7).tolist() == [*range(7), *range(700, 707)]
    assert select_tokens(flat, counts, 500, 7).tolist() == [*range(493), *range(700, 707)]


@given(selections())
@settings(max_examples=200, deadline=None)
def test_a_larger_budget_only_adds(case: tuple[list[float], list[int], int, int]) -> None:
    scores, counts, keep, floor = case
    got = set(select_tokens(torch.tensor(scores), counts, keep, floor).tolist())
    assert len(got) == keep
    if keep < len(scores):
        more = set(select_tokens(torch.tensor(scores), counts, keep + 1, floor).tolist())
        assert got < more


@given(selections(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_images_share_one_budget_whatever_their_order(
    case: tuple[list[float], list[int], int, int], random: Any
) -> None:
    """With distinct scores the kept tokens do not depend on the order of the images."""
    _, counts, keep, floor = case
    values = random.sample(range(10_000), sum(counts))
    images, at = [], 0
    for n in counts:
        images.append([float(v) for v in values[at : at + n]])
        at += n
    flat = [v for image in images for v in image]
    first = {flat[i] for i in select_tokens(torch.tensor(flat), counts, keep, floor).tolist()}
    random.shuffle(images)
    flat = [v for image in images for v in image]
    second = select_tokens(torch.tensor(flat), [len(i) for i in images], keep, floor)
    assert {flat[i] for i in second.tolist()} == first


@pytest.mark.parametrize(
    ("scores", "counts", "keep", "floor", "match"),
    [
        ([1.0, 2.0], [3], 1, 0, "scores for 3 tokens"),
        ([[1.0, 2.0]], [2], 1, 0, "scores for 2 tokens"),
        ([1.0, 2.0], [1, 1], 1, 1, "cannot keep 1"),
        ([1.0, 2.0], [2], 3, 0, "cannot keep 3"),
        ([1.0, 2.0], [2], -1, 0, "cannot keep -1"),
        ([1.0, math.nan], [2], 1, 0, "finite"),
        ([1.0, math.inf], [2], 1, 0, "finite"),
    ],
)
def test_impossible_selections_are_refused(
    scores: list[Any], counts: list[int], keep: int, floor: int, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        select_tokens(torch.tensor(scores), counts, keep, floor)


# -- the rules ------------------------------------------------------------------------------------


def group() -> tuple[torch.Tensor, list[int]]:
    """Scores of a blank image, one with two sinks, and one with much detail; 256 tokens each."""
    g = torch.Generator().manual_seed(0)
    blank = 1 + 0.02 * torch.randn(256, generator=g)
    sinks = 0.4 + 0.02 * torch.rand(256, generator=g)
    sinks[[7, 99]] = 80.0
    detail = 0.4 + 0.05 * torch.rand(256, generator=g)
    detail[torch.randperm(256, generator=g)[:100]] = 2.0
    images = [s / s.mean() for s in (blank, sinks, detail)]
    return torch.cat(images), [256] * 3


def split(budget: str, ratio: float) -> list[int]:
    scores, counts = group()
    kept = select(scores, counts, kept_count(counts, ratio, 1), 1, budget)
    return torch.bincount(kept // 256, minlength=3).tolist()


def test_the_raw_budget_keeps_the_blank_image_whole() -> None:
    assert split("raw", 0.5)[0] == 256 > split("raw", 0.5)[2]


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.6])
@pytest.mark.parametrize("budget", ["excess", "log_excess"])
def test_two_stage_budgets_give_detail_more_than_nothing(budget: str, ratio: float) -> None:
    blank, _, detail = split(budget, ratio)
    assert detail > 3 * blank


def test_few_sinks_count_less_once_they_are_clipped_or_in_logarithms() -> None:
    assert split("log_excess", 0.3)[1] < split("excess", 0.3)[1] / 3
    scores, counts = group()
    kept = select(scores, counts, 230, 1, "sink_clipped")
    # Clipping gives the mass of the two sinks back to the rest of their image.
    assert torch.bincount(kept // 256, minlength=3)[1] > split("raw", 0.3)[1]


@pytest.mark.parametrize("budget", ["per_image", "rank"])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_equal_shares_of_equal_images(budget: str, ratio: float) -> None:
    counts = split(budget, ratio)
    assert max(counts) - min(counts) <= 1


@given(selections(), st.sampled_from(BUDGETS))
@settings(max_examples=300, deadline=None)
def test_every_rule_spends_the_budget_and_keeps_the_floors(
    case: tuple[list[float], list[int], int, int], budget: str
) -> None:
    scores, counts, keep, floor = case
    kept = select(torch.tensor(scores), counts, keep, floor, budget)
    assert kept.dtype == torch.int64 and len(kept) == keep
    assert kept.tolist() == sorted(set(kept.tolist()))
    bounds = [0, *itertools.accumulate(counts)]
    for (a, b), n in zip(itertools.pairwise(bounds), counts, strict=True):
        own = [t for t in kept.tolist() if a <= t < b]
        assert len(own) >= min(floor, n)
        # The best of the image, in whatever way the images compare.
        if own and budget != "sink_clipped":
            rest = [scores[t] for t in range(a, b) if t not in own]
            assert not rest or max(rest) <= min(scores[t] for t in own)
    again = select(torch.tensor(scores), counts, keep, floor, budget)
    assert torch.equal(kept, again)


def test_a_rule_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="budget 'fair' must be one of raw, sink_clipped"):
        select(torch.ones(4), [4], 2, 1, "fair")


# -- the split ------------------------------------------------------------------------------------


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], int, int, list[float]]:
    counts = draw(st.lists(st.integers(1, 300), min_size=1, max_size=8))
    floor = draw(st.integers(0, 6))
    keep = draw(st.integers(sum(min(floor, n) for n in counts), sum(counts)))
    content = draw(
        st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=len(counts), max_size=len(counts))
    )
    return counts, keep, floor, content


@given(splits())
@settings(max_examples=400, deadline=None)
def test_a_split_spends_the_budget_within_floors_and_sizes(
    case: tuple[list[int], int, int, list[float]],
) -> None:
    counts, keep, floor, content = case
    got = split_budget(counts, keep, floor, content)
    assert sum(got) == keep
    assert all(min(floor, n) <= g <= n for g, n in zip(got, counts, strict=True))
    # Of two images of a size the one with more in it gets no less.
    for i, j in itertools.permutations(range(len(counts)), 2):
        if counts[i] == counts[j] and content[i] > content[j]:
            assert got[i] >= got[j]


def test_a_split_is_in_proportion_where_nothing_binds() -> None:
    assert split_budget([100, 100], 60, 0, [1.0, 2.0]) == [20, 40]
    assert split_budget([100, 200], 60, 0, [1.0, 1.0]) == [20, 40]
    assert split_budget([100, 100], 150, 0, [1.0, 9.0]) == [50, 100]
    assert split_budget([100, 100], 60, 10, [0.0, 1.0]) == [10, 50]
    assert split_budget([100, 100, 50], 125, 0, [0.0, 0.0, 0.0]) == [50, 50, 25]
    assert split_budget([10, 10, 10], 29, 0, [1.0, 1.0, 1.0]) == [10, 10, 9]


@pytest.mark.parametrize(
    ("keep", "content", "match"),
    [
        (3, [1.0, 1.0], "cannot split 3"),
        (21, [1.0, 1.0], "cannot split 21"),
        (9, [1.0], "content"),
        (9, [1.0, -1.0], "content"),
        (9, [1.0, math.nan], "content"),
        (9, [1.0, math.inf], "content"),
    ],
)
def test_impossible_splits_are_refused(keep: int, content: list[float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        split_budget([10, 10], keep, 2, content)


# -- the grid -------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.data())
@settings(max_examples=300, deadline=None)
def test_a_grid_has_as_many_different_tokens_as_asked(
    height: int, width: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, height * width))
    got = grid_tokens(height, width, count)
    assert got == sorted(set(got)) and len(got) == count
    assert all(0 <= t < height * width for t in got)


def test_a_grid_is_even() -> None:
    assert grid_tokens(4, 4, 4) == [5, 7, 13, 15]
    assert grid_tokens(1, 8, 4) == [1, 3, 5, 7]
    rows, columns = zip(*(divmod(t, 16) for t in grid_tokens(16, 16, 64)), strict=True)
    assert sorted(set(rows)) == sorted(set(columns)) == [1, 3, 5, 7, 9, 11, 13, 15]
    with pytest.raises(ValueError, match="cannot take 5"):
        grid_tokens(2, 2, 5)


# -- contextual tokens ----------------------------------------------------------------------------


def test_contextual_rows_are_targets_plus_the_mean_of_what_is_like_them() -> None:
    """As one would do it by hand, token by token."""
    g = torch.Generator().manual_seed(4)
    counts = [12, 9]
    features, keys = torch.randn(21, 6, generator=g), torch.randn(21, 5, generator=g)
    dominant = torch.tensor([0, 3, 4, 13, 20])
    targets = contextual_targets(dominant, 21, 4)
    rest = [t for t in range(21) if t not in dominant.tolist()]
    assert targets.tolist() == rest[::4][:4]
    got = merge_contextual(features, keys, counts, dominant, targets)
    want = features[targets].clone()
    joined: dict[int, list[int]] = {t: [] for t in targets.tolist()}
    for t in rest:
        mates = [c for c in joined if (c < 12) == (t < 12)]
        if t not in joined and mates:
            like = torch.nn.functional.cosine_similarity(keys[t][None], keys[mates], dim=1)
            joined[mates[int(like.argmax())]].append(t)
    for i, own in enumerate(joined.values()):
        if own:
            want[i] += features[own].mean(0)
    torch.testing.assert_close(got, want)


def test_tokens_of_an_image_without_a_target_go_nowhere() -> None:
    features = torch.eye(6)
    dominant, targets = torch.tensor([0, 3]), torch.tensor([1])
    got = merge_contextual(features, torch.ones(6, 2), [3, 3], dominant, targets)
    assert got.tolist() == [[0, 1, 1, 0, 0, 0]]
    none = merge_contextual(features, torch.ones(6, 2), [3, 3], dominant, targets[:0])
    assert none.shape == (0, 6)


def test_how_many_rows_are_contextual() -> None:
    assert contextual_count(100, 0.1, 3, 200) == 10
    assert contextual_count(200, 0.1, 3, 200) == 0
    assert contextual_count(100, 0.0, 3, 200) == 0
    assert contextual_count(4, 0.1, 3, 200) == contextual_count(4, 0.9, 3, 200) == 1
    assert contextual_count(1, 0.9, 0, 200) == 0
