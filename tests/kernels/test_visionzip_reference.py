"""VisionZip's scores against dense versions of their definition, and the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.visionzip.budget import kept_count
from kernels.visionzip.reference import attention_received, merge_unit_scores

LENGTHS = [(1,), (7,), (64,), (5, 1, 130), (33, 32, 31), (256, 4, 4, 90)]


def bounds_of(lengths: Sequence[int]) -> list[int]:
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    return bounds


def inputs(kind: str, tokens: int, heads: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Queries and keys: spread out, sharply peaked, or with two keys that draw everyone."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, dim, generator=g)
    k = torch.randn(tokens, heads, dim, generator=g)
    if kind == "peaked":
        q, k = 4 * q, 4 * k
    elif kind == "sink":
        q = q + 1
        k[:: max(1, tokens // 2)] = 3
    elif kind == "flat":
        q = torch.zeros_like(q)
    return q, k


def dense(query: Tensor, key: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """The definition, in double precision, with the whole matrix of every image."""
    out = []
    for a, b in pairwise(bounds_of(lengths)):
        logits = torch.einsum("qhd,khd->hqk", query[a:b].double(), key[a:b].double()) * scale
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        out.append((weights / weights.sum(-1, keepdim=True)).sum(1).mean(0))
    return torch.cat(out)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", ["random", "peaked", "sink", "flat"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 32), (4, 72)])
def test_scores_are_the_dense_column_sums(
    kind: str, lengths: tuple[int, ...], heads: int, dim: int
) -> None:
    q, k = inputs(kind, sum(lengths), heads, dim, seed=len(lengths))
    want = dense(q, k, lengths, dim**-0.5)
    got = attention_received(q, k, bounds_of(lengths), dim**-0.5, block=50)
    assert got.dtype == torch.float32
    # A dot product's rounding error grows with its terms, and the exponential hands it on.
    logits = float(torch.einsum("qhd,khd->", q.abs(), k.abs()) / (heads * sum(lengths)) * dim**-0.5)
    tolerance = 2e-6 + 3e-7 * logits / sum(lengths) * dim
    torch.testing.assert_close(got.double(), want, rtol=tolerance * 10, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    q, k = (t.to(dtype) for t in inputs("random", 90, 2, 16, seed=3))
    got = attention_received(q, k, [0, 40, 90], 0.25)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), dense(q, k, [40, 50], 0.25), rtol=1e-5, atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    block=st.integers(1, 80),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_block_size_does_not_matter_and_images_average_one(
    lengths: list[int], block: int, seed: int
) -> None:
    q, k = inputs("random", sum(lengths), 2, 8, seed)
    whole = attention_received(q, k, bounds_of(lengths), 0.4)
    blocks = attention_received(q, k, torch.tensor(bounds_of(lengths)), 0.4, block=block)
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)
    for n, scores in zip(lengths, whole.split(lengths), strict=True):
        assert float(scores.sum()) == pytest.approx(n, rel=1e-5)


def test_images_never_mix() -> None:
    q, k = inputs("random", 100, 2, 16, seed=1)
    together = attention_received(q, k, [0, 30, 100], 0.25)
    alone = attention_received(q[30:], k[30:], [0, 70], 0.25)
    torch.testing.assert_close(together[30:], alone, rtol=0, atol=0)
    q2, k2 = q.clone(), k.clone()
    q2[:30], k2[:30] = 50.0, -50.0
    changed = attention_received(q2, k2, [0, 30, 100], 0.25)
    assert torch.equal(changed[30:], together[30:])
    assert not torch.equal(changed[:30], together[:30])
    # The scores of one big image differ, so the comparison above can tell mixing from not mixing.
    mixed = attention_received(q, k, [0, 100], 0.25)
    assert not torch.allclose(mixed[30:], together[30:], rtol=1e-2)


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_the_full_matrix_is_never_formed() -> None:
    q, k = inputs("random", 700, 2, 4, seed=1)
    with _Largest() as seen:
        attention_received(q, k, [0, 600, 700], 0.5, block=20)
    assert 2 * 20 * 600 <= seen.elements < 2 * 21 * 600


@pytest.mark.parametrize(
    "bounds", [[0], [0, 5, 5, 10], [0, 7, 3, 10], [1, 10], [0, 9], [0, 11], []], ids=str
)
def test_wrong_bounds_are_refused(bounds: list[int]) -> None:
    q = torch.randn(10, 2, 4)
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention_received(q, q, bounds, 0.5)
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention_received(q, q, torch.tensor(bounds, dtype=torch.int32), 0.5)


@pytest.mark.parametrize("shape", [(10, 8), (10, 2, 5), (9, 2, 4), (10, 1, 4)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="tokens, heads, head_dim"):
        attention_received(torch.zeros(10, 2, 4), torch.zeros(shape), [0, 10], 0.5)


def test_merge_units_average_adjacent_patches() -> None:
    scores = torch.tensor([1.0, 2, 3, 4, 10, 10, 10, 14])
    assert merge_unit_scores(scores, 4).tolist() == [2.5, 11.0]
    assert merge_unit_scores(scores, 1).tolist() == scores.tolist()
    with pytest.raises(ValueError, match="units of 3"):
        merge_unit_scores(scores, 3)


# -- the budget ----------------------------------------------------------------------------------

COUNTS = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


@given(counts=COUNTS, digits=st.integers(1, 4), data=st.data())
def test_the_ratio_counts_as_the_decimal_that_was_written(
    counts: list[int], digits: int, data: st.DataObject
) -> None:
    numerator = data.draw(st.integers(1, 10**digits))
    exact = Fraction(numerator, 10**digits)
    text = f"{numerator / 10**digits:.{digits}f}"
    assert kept_count(counts, float(text), 0) == max(1, math.floor(exact * sum(counts)))


def test_binary_rounding_costs_no_token() -> None:
    assert int(0.7 * 360) == 251  # what a plain product would keep
    assert kept_count([360], 0.7, 1) == 252
    assert kept_count([200, 160], 0.7, 1) == 252
    assert kept_count([10] * 29, 0.1, 0) == 29


@given(counts=COUNTS, ratio=st.floats(1e-6, 1), floor=st.integers(0, 40))
def test_budget_lies_between_floors_and_all(counts: list[int], ratio: float, floor: int) -> None:
    keep = kept_count(counts, ratio, floor)
    floors = sum(min(n, floor) for n in counts)
    assert max(1, floors) <= keep <= sum(counts)
    assert keep == max(1, floors) or keep <= ratio * sum(counts) + 1e-6
    assert kept_count(counts, 1.0, floor) == kept_count(counts, 1, floor) == sum(counts)


def test_an_image_smaller_than_its_floor_asks_for_what_it_has() -> None:
    assert kept_count([2, 100], 0.01, 5) == 7
    assert kept_count([2], 0.5, 5) == 2
    assert kept_count([100, 100], 0.05, 5) == 10
    assert kept_count([100, 100], 0.01, 0) == 2


@pytest.mark.parametrize(
    ("counts", "ratio", "floor", "match"),
    [
        ([], 0.5, 1, "image_tokens"),
        ([4, 0], 0.5, 1, "image_tokens"),
        ([4], 0.0, 1, "retain_ratio"),
        ([4], 1.01, 1, "retain_ratio"),
        ([4], -0.5, 1, "retain_ratio"),
        ([4], math.nan, 1, "retain_ratio"),
        ([4], 0.5, -1, "floor"),
    ],
)
def test_impossible_budgets_are_refused(
    counts: list[int], ratio: float, floor: int, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        kept_count(counts, ratio, floor)
