"""SERE re-routing and plain top-K against slot-by-slot loops over the published rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sere.reference import (
    DECODE,
    PADDING,
    PREFILL,
    by_batch,
    expert_set,
    sere,
    slot_ranks,
    topk,
)


@dataclass(frozen=True)
class Case:
    """One layer's routes in one step."""

    ids: list[list[int]]
    weights: list[list[float]]
    kinds: list[int]
    similarity: list[list[float]]
    protected: list[bool]
    primary: int
    threshold: float

    @property
    def experts(self) -> int:
        return len(self.protected)

    @property
    def slots(self) -> int:
        return len(self.ids[0]) if self.ids else 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = len(self.ids)
        return (
            torch.tensor(self.ids, dtype=torch.int32).view(rows, -1),
            torch.tensor(self.weights, dtype=torch.float32).view(rows, -1),
            torch.tensor(self.kinds, dtype=torch.uint8),
        )

    def sere(self) -> list[list[int]]:
        ids, weights, kinds = self.tensors()
        moved = sere(
            ids,
            weights,
            kinds,
            torch.tensor(self.similarity),
            torch.tensor(self.protected),
            self.primary,
            self.threshold,
        )
        assert moved.dtype == ids.dtype
        assert moved.shape == ids.shape
        return moved.tolist()  # type: ignore[no-any-return]


# Few distinct values, so that ties are common; exact in float32.
WEIGHTS = (0.0, 0.125, 0.25, 0.5)
SIMILARITIES = (0.0, 0.25, 0.5, 0.75, 1.0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Shapes and settings are Hypothesis's; it is slow at filling tables, so that a seed does that.
    experts = draw(st.integers(2, 9))
    slots = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 6))
    r = Random(draw(st.integers(0, 2**32)))

    def table(values: Sequence[Any], height: int, width: int) -> list[list[Any]]:
        return [r.choices(values, k=width) for _ in range(height)]

    similarity = table(SIMILARITIES, experts, experts)
    for i in range(experts):
        similarity[i][i] = 1.0
    kinds = r.choices([DECODE, DECODE, PREFILL, PADDING], k=rows)
    # A padding row's inputs are leftovers, and so are its routes.
    known = {PADDING: range(-3, experts + 3)}
    return Case(
        ids=[r.choices(known.get(kind, range(-1, experts)), k=slots) for kind in kinds],
        weights=table(WEIGHTS, rows, slots),
        kinds=kinds,
        similarity=similarity,
        protected=[r.random() < 0.4 for _ in range(experts)]
        if draw(st.booleans())
        else [False] * experts,
        primary=draw(st.integers(1, slots + 1)),
        threshold=draw(st.sampled_from([0.0, 0.25, 0.5, 0.6, 1.0])),
    )


# -- the rule, slot by slot ------------------------------------------------------------------------


def order(ids: list[int], weights: list[float]) -> list[int]:
    """Slots of a row from the heaviest down; empty ones last."""
    return sorted(range(len(ids)), key=lambda s: (ids[s] < 0, -weights[s], ids[s], s))


def primaries(case: Case, row: int) -> list[int]:
    """Slots of a row that it keeps."""
    return order(case.ids[row], case.weights[row])[: case.primary]


def read_anyway(case: Case) -> set[int]:
    """P: primaries of decode rows, and whatever prefill rows use."""
    experts: set[int] = set()
    for row, kind in enumerate(case.kinds):
        if kind == DECODE:
            experts |= {case.ids[row][s] for s in primaries(case, row)}
        elif kind == PREFILL:
            experts |= set(case.ids[row])
    return experts - {-1}


def target(case: Case, source: int) -> int:
    """Where an expert's secondary slots go; itself if it stays."""
    candidates = read_anyway(case)
    if source in candidates or case.protected[source] or not candidates:
        return source
    best = max(case.similarity[source][v] for v in candidates)
    if best < case.threshold:
        return source
    return min(v for v in candidates if case.similarity[source][v] == best)


def sere_by_hand(case: Case) -> list[list[int]]:
    out = [list(row) for row in case.ids]
    for row, kind in enumerate(case.kinds):
        if kind != DECODE:
            continue
        keeps = primaries(case, row)
        for slot, expert in enumerate(case.ids[row]):
            if slot not in keeps and expert >= 0:
                out[row][slot] = target(case, expert)
    return out


def topk_by_hand(case: Case, renormalize: bool) -> tuple[list[list[int]], list[list[float]]]:
    ids = [list(row) for row in case.ids]
    weights = [list(row) for row in case.weights]
    for row, kind in enumerate(case.kinds):
        ranked = order(case.ids[row], case.weights[row])
        dropped = [s for s in ranked[case.primary :] if case.ids[row][s] >= 0]
        if kind != DECODE or not dropped:
            continue
        before = sum(weights[row])
        for slot in dropped:
            ids[row][slot] = case.ids[row][ranked[0]]
            weights[row][slot] = 0.0
        after = sum(weights[row])
        if renormalize and after > 0:
            weights[row] = [w * before / after for w in weights[row]]
    return ids, weights


# -- SERE ------------------------------------------------------------------------------------------


@given(cases())
@settings(max_examples=500, deadline=None)
def test_sere_follows_the_rule(case: Case) -> None:
    assert case.sere() == sere_by_hand(case)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_settings_may_be_tensors(case: Case) -> None:
    ids, weights, kinds = case.tensors()
    moved = sere(
        ids.long(),
        weights.half(),
        kinds.long(),
        torch.tensor(case.similarity),
        torch.tensor(case.protected),
        torch.tensor([case.primary]),
        torch.tensor([case.threshold]),
    )
    assert moved.dtype == torch.int64
    assert moved.tolist() == sere_by_hand(case)


@given(cases())
@settings(max_examples=300, deadline=None)
def test_only_secondary_slots_of_decode_rows_move_and_only_to_experts_read_anyway(
    case: Case,
) -> None:
    ids, weights, _ = case.tensors()
    moved = case.sere()
    candidates = read_anyway(case)
    for row, (before, after) in enumerate(zip(case.ids, moved, strict=True)):
        for slot, (u, v) in enumerate(zip(before, after, strict=True)):
            if u == v:
                continue
            assert case.kinds[row] == DECODE
            assert slot not in primaries(case, row)
            assert u >= 0
            assert u not in candidates
            assert v in candidates
            assert not case.protected[u]
            assert case.similarity[u][v] >= case.threshold
    # The inputs are the router's own tensors.
    assert ids.tolist() == case.ids
    assert weights.tolist() == case.weights


@given(cases())
@settings(max_examples=200, deadline=None)
def test_distinct_experts_never_grow(case: Case) -> None:
    ids, _, kinds = case.tensors()
    real = (kinds != PADDING).unsqueeze(1)
    before = expert_set(ids, real, case.experts)
    after = expert_set(torch.tensor(case.sere()).view_as(ids), real, case.experts)
    assert not bool((after & ~before).any())


@given(cases(), st.data())
@settings(max_examples=300, deadline=None)
def test_protecting_an_expert_changes_its_own_slots_alone(case: Case, data: st.DataObject) -> None:
    expert = data.draw(st.integers(0, case.experts - 1))
    protected = [p or e == expert for e, p in enumerate(case.protected)]
    free, kept = case.sere(), replace(case, protected=protected).sere()
    for before, without, with_ in zip(case.ids, free, kept, strict=True):
        for u, a, b in zip(before, without, with_, strict=True):
            assert b == (u if u == expert else a)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_nothing_moves_when_all_are_protected_or_primary(case: Case) -> None:
    assert replace(case, protected=[True] * case.experts).sere() == case.ids
    assert replace(case, primary=case.slots).sere() == case.ids
    assert replace(case, primary=case.slots + 7).sere() == case.ids
    assert replace(case, kinds=[PREFILL] * len(case.kinds)).sere() == case.ids
    assert replace(case, kinds=[PADDING] * len(case.kinds)).sere() == case.ids


@given(cases())
@settings(max_examples=100, deadline=None)
def test_threshold_one_moves_only_to_perfect_twins_and_zero_moves_all(case: Case) -> None:
    strict = replace(
        case,
        threshold=1.0,
        similarity=[
            [min(s, 0.75) if i != j else 1.0 for j, s in enumerate(row)]
            for i, row in enumerate(case.similarity)
        ],
    )
    assert strict.sere() == case.ids
    loose = replace(case, threshold=0.0, protected=[False] * case.experts)
    candidates = read_anyway(loose)
    used = {
        e
        for row, kind in zip(loose.sere(), case.kinds, strict=True)
        if kind == DECODE
        for e in row
        if e >= 0
    }
    assert used <= candidates


@given(cases(), st.data())
@settings(max_examples=200, deadline=None)
def test_padding_rows_neither_change_nor_count(case: Case, data: st.DataObject) -> None:
    element = st.integers(-2, case.experts + 1)
    extra = data.draw(st.lists(element, min_size=case.slots, max_size=case.slots))
    at = data.draw(st.integers(0, len(case.ids)))
    padded = replace(
        case,
        ids=[*case.ids[:at], extra, *case.ids[at:]],
        weights=[*case.weights[:at], [0.5] * case.slots, *case.weights[at:]],
        kinds=[*case.kinds[:at], PADDING, *case.kinds[at:]],
    ).sere()
    assert padded[at] == extra
    assert padded[:at] + padded[at + 1 :] == case.sere()


@given(cases(), st.data())
@settings(max_examples=200, deadline=None)
def test_slot_order_does_not_matter(case: Case, data: st.DataObject) -> None:
    """An expert's fate depends on its weight, not on the slot that it arrived in."""
    # With an expert twice in a row, which of its slots is heavier may matter.
    assume(all(len(set(row)) == len(row) for row in case.ids))
    order_ = data.draw(st.permutations(range(case.slots)))
    shuffled = replace(
        case,
        ids=[[row[s] for s in order_] for row in case.ids],
        weights=[[row[s] for s in order_] for row in case.weights],
    )
    assert shuffled.sere() == [[row[s] for s in order_] for row in case.sere()]


def test_a_worked_example() -> None:
    """Two decoding tokens, K = 1: P = {0, 5}."""
    case = Case(
        ids=[[3, 0, 2], [5, 1, 4]],
        weights=[[0.3, 0.5, 0.2], [0.6, 0.3, 0.1]],
        kinds=[DECODE, DECODE],
        similarity=[[1.0 if i == j else 0.0 for j in range(6)] for i in range(6)],
        protected=[False] * 6,
        primary=1,
        threshold=0.5,
    )
    s = case.similarity
    s[3][0], s[3][5] = 0.6, 0.7  # to 5, though its own row's primary is 0
    s[2][0], s[2][3] = 0.49, 1.0  # 3 is not read anyway, and 0 is too unlike: critical
    s[1][0], s[1][5] = 0.5, 0.5  # exactly at the threshold, a tie: lowest id
    s[4][5] = 0.9
    assert case.sere() == [[5, 0, 2], [5, 0, 5]]
    assert replace(case, protected=[False, False, False, True, False, False]).sere() == [
        [3, 0, 2],
        [5, 0, 5],
    ]
    # Protecting what others move to attracts and repels nobody.
    assert replace(case, protected=[True, False, False, False, False, True]).sere() == case.sere()
    # A prefill row's experts are read in any case: 3 stays put, and 2 has somewhere to go.
    with_prefill = replace(
        case,
        ids=[*case.ids, [3, 0, 0]],
        weights=[*case.weights, [0.1, 0.1, 0.1]],
        kinds=[DECODE, DECODE, PREFILL],
    )
    assert with_prefill.sere() == [[3, 0, 3], [5, 0, 5], [3, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_threshold_is_compared_in_the_dtype_of_the_matrix(
    dtype: torch.dtype, as_tensor: bool
) -> None:
    """0.7 in bfloat16 is less than 0.7 in float32, and still passes a threshold of 0.7."""
    low = {torch.bfloat16: 0.7, torch.float16: 0.1}[dtype]  # both round down
    similarity = torch.tensor([[1, low], [low, 1]], dtype=dtype)
    assert float(similarity[0, 1]) < low
    moved = sere(
        torch.tensor([[0, 1]]),
        torch.tensor([[0.9, 0.1]]),
        torch.tensor([DECODE]),
        similarity,
        torch.zeros(2, dtype=torch.bool),
        1,
        torch.tensor([low]) if as_tensor else low,
    )
    assert moved.tolist() == [[0, 0]]


def test_an_empty_step_is_fine() -> None:
    moved = sere(
        torch.zeros(0, 3, dtype=torch.int32),
        torch.zeros(0, 3),
        torch.zeros(0, dtype=torch.uint8),
        torch.eye(4),
        torch.zeros(4, dtype=torch.bool),
        1,
        0.0,
    )
    assert moved.shape == (0, 3)


# -- ranks, sets, top-K ---------------------------------------------------------------------------


@given(cases())
@settings(max_examples=300, deadline=None)
def test_ranks_order_slots_by_weight(case: Case) -> None:
    ids, weights, _ = case.tensors()
    ranks = slot_ranks(ids, weights).tolist()
    for row, (i, w) in enumerate(zip(case.ids, case.weights, strict=True)):
        ranked = order(i, w)
        # Empty slots come last; which of them is first is nobody's business.
        filled = [s for s in ranked if i[s] >= 0]
        assert [ranks[row][s] for s in filled] == list(range(len(filled)))
        assert sorted(ranks[row]) == list(range(len(i)))


@given(cases(), st.data())
@settings(max_examples=200, deadline=None)
def test_expert_set_is_the_set_of_counted_experts(case: Case, data: st.DataObject) -> None:
    ids, _, _ = case.tensors()
    flags = st.lists(st.booleans(), min_size=ids.numel(), max_size=ids.numel())
    counted = torch.tensor(data.draw(flags)).view_as(ids)
    want = {
        e
        for row, flags_ in zip(case.ids, counted.tolist(), strict=True)
        for e, flag in zip(row, flags_, strict=True)
        if flag and 0 <= e < case.experts
    }
    got = expert_set(ids, counted, case.experts)
    assert got.shape == (case.experts,)
    assert set(got.nonzero().flatten().tolist()) == want


@given(cases(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_topk_drops_all_but_the_heaviest(case: Case, renormalize: bool, as_tensor: bool) -> None:
    ids, weights, kinds = case.tensors()
    new_ids, new_weights = topk(
        ids,
        weights,
        kinds,
        torch.tensor([case.primary]) if as_tensor else case.primary,
        torch.tensor([renormalize]) if as_tensor else renormalize,
    )
    want_ids, want_weights = topk_by_hand(case, renormalize)
    assert new_ids.dtype == ids.dtype
    assert new_weights.dtype == weights.dtype
    assert new_ids.tolist() == want_ids
    torch.testing.assert_close(new_weights, torch.tensor(want_weights), rtol=1e-6, atol=1e-6)
    assert ids.tolist() == case.ids
    assert weights.tolist() == case.weights


@given(cases())
@settings(max_examples=100, deadline=None)
def test_topk_keeps_a_rows_total_weight_only_if_asked(case: Case) -> None:
    ids, weights, kinds = case.tensors()
    _, scaled = topk(ids, weights, kinds, case.primary, True)
    _, cut = topk(ids, weights, kinds, case.primary, False)
    kept = cut.sum(1) > 0
    torch.testing.assert_close(scaled.sum(1)[kept], weights.sum(1)[kept], rtol=1e-6, atol=1e-6)
    assert bool((cut <= weights).all())


def test_k_falls_with_the_root_of_the_batch() -> None:
    found = {n: by_batch(5, n) for n in (0, 1, 2, 4, 8, 16, 32, 128)}
    assert found == {0: 5, 1: 5, 2: 4, 4: 2, 8: 2, 16: 1, 32: 1, 128: 1}
    assert by_batch(1, 1) == 1
