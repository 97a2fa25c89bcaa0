"""OEA, XShare, Lynx and the random control against plain loops over the published rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, nan
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sere.reference import DECODE, PADDING, PREFILL, sere
from kernels.sere.rivals import lynx, oea, random_remap, xshare

Routes = tuple[list[list[int]], list[list[float]]]
FEW = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class Case:
    """One layer's routes in one step, and the settings of every rule."""

    ids: list[list[int]]
    weights: list[list[float]]
    kinds: list[int]
    scores: list[list[float]]
    choice: list[list[float]]
    base: int = 1
    budget: int = 1
    seed: int = 0

    @property
    def experts(self) -> int:
        return len(self.scores[0])

    @property
    def slots(self) -> int:
        return len(self.ids[0])

    def tensors(
        self, dtype: torch.dtype = torch.float32, id_dtype: torch.dtype = torch.int32
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            torch.tensor(self.ids, dtype=id_dtype),
            torch.tensor(self.weights, dtype=dtype),
            torch.tensor(self.kinds, dtype=torch.uint8),
            torch.tensor(self.scores),
            torch.tensor(self.choice),
        )

    def decodes(self) -> list[int]:
        return [r for r, kind in enumerate(self.kinds) if kind == DECODE]


# -- the rules in loops ----------------------------------------------------------------------------


def filled(case: Case, row: int) -> list[int]:
    """The slots of a row that hold an expert, heaviest first."""
    return [s for s in heaviest_first(case, row) if case.ids[row][s] < case.experts]


def heaviest_first(case: Case, row: int) -> list[int]:
    """The order in which `sere` ranks slots: what is beyond E - 1 takes a place there."""
    ids, weights = case.ids[row], case.weights[row]
    return sorted((s for s, e in enumerate(ids) if e >= 0), key=lambda s: (-weights[s], ids[s], s))


def prefill_set(case: Case) -> set[int]:
    return {
        case.ids[r][s] for r, k in enumerate(case.kinds) if k == PREFILL for s in filled(case, r)
    }


def primaries(case: Case, count: int) -> set[int]:
    return {case.ids[r][s] for r in case.decodes() for s in filled(case, r)[:count]}


def oea_set(case: Case) -> set[int]:
    return prefill_set(case) | primaries(case, case.base)


def xshare_set(case: Case) -> set[int]:
    free = prefill_set(case)
    counted = primaries(case, case.base) - free
    while len(counted) < case.budget and len(counted | free) < case.experts:
        rest = [e for e in range(case.experts) if e not in counted | free]
        counted.add(max(rest, key=lambda e: (sum(case.scores[r][e] for r in case.decodes()), -e)))
    return free | counted


def lynx_set(case: Case) -> set[int]:
    free = prefill_set(case)
    users: Counter[int] = Counter()
    mass: Counter[int] = Counter()
    for row in case.decodes():
        for s in filled(case, row):
            users[case.ids[row][s]] += 1
            mass[case.ids[row][s]] += case.weights[row][s]  # type: ignore[assignment]
    popular = sorted(set(users) - free, key=lambda e: (-users[e], -mass[e], e))
    return free | set(popular[: case.budget]) | primaries(case, case.base)


def within(case: Case, allowed: set[int]) -> Routes:
    """What decode rows make of a set of experts."""
    ids = [list(row) for row in case.ids]
    weights = [list(row) for row in case.weights]
    for row in case.decodes():
        slots = filled(case, row)
        lost = [s for s in sorted(slots) if ids[row][s] not in allowed]
        if not lost:
            continue
        total = sum(weights[row][s] for s in slots)
        heaviest = ids[row][slots[0]]
        have = {ids[row][s] for s in slots} & allowed
        ranked = sorted(
            (e for e in allowed - have if case.choice[row][e] > -inf),
            key=lambda e: (-case.choice[row][e], e),
        )
        unserved = []
        for s in lost:
            if ranked:
                ids[row][s] = ranked.pop(0)
            else:
                ids[row][s] = heaviest
                unserved.append(s)
        gate = {s: 0.0 if s in unserved else case.scores[row][ids[row][s]] for s in slots}
        if sum(gate.values()) == 0:
            gate = {s: float(s not in unserved) for s in slots}
        for s in slots:
            weights[row][s] = gate[s] * total / sum(gate.values())
    return ids, weights


def mix(x: int) -> int:
    x &= 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ (x >> 15)


def sere_set(case: Case) -> set[int]:
    """P, `base` being K."""
    first = {case.ids[r][s] for r in case.decodes() for s in heaviest_first(case, r)[: case.base]}
    return prefill_set(case) | {e for e in first if e < case.experts}


def remap_by_hand(case: Case) -> Routes:
    reads = sere_set(case)
    ids = [list(row) for row in case.ids]
    for row in case.decodes():
        for s in heaviest_first(case, row)[case.base :]:
            u = ids[row][s]
            if u < case.experts and u not in reads:
                ids[row][s] = min(reads, key=lambda v: mix(mix(mix(case.seed) + u) + v), default=u)
    return ids, case.weights


# -- the rules as they are called ------------------------------------------------------------------

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Setting = Callable[[int], "Tensor | int"]


def call(rule: str, case: Case, given: Tensors, wrap: Setting = int) -> tuple[Tensor, Tensor]:
    if rule == "oea":
        return oea(*given, wrap(case.base))
    if rule == "xshare":
        return xshare(*given, wrap(case.base), wrap(case.budget))
    if rule == "lynx":
        return lynx(*given, wrap(case.base), wrap(case.budget))
    return random_remap(*given[:3], wrap(case.base), wrap(case.seed), case.experts)


def by_hand(rule: str, case: Case) -> Routes:
    if rule == "random_remap":
        return remap_by_hand(case)
    sets = {"oea": oea_set, "xshare": xshare_set, "lynx": lynx_set}
    return within(case, sets[rule](case))


RULES = ["oea", "xshare", "lynx", "random_remap"]
every_rule = pytest.mark.parametrize("rule", RULES)
SETS = {"oea": oea_set, "xshare": xshare_set, "lynx": lynx_set}
every_set = pytest.mark.parametrize("rule", list(SETS))


def one_element(number: int) -> Tensor:
    return torch.tensor([number])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(width), b.view(width))


def close(got: Tensor, want: list[list[float]], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        got.double(),
        torch.tensor(want, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
    )


# -- cases -----------------------------------------------------------------------------------------

# Few distinct values, so that ties are common; sums of them are exact in float32.
VALUES = (0.0, 0.125, 0.125, 0.25, 0.5)
BIASES = (-0.25, 0.0, 0.0, 0.25)


@st.composite
def cases(draw: st.DrawFn, like_a_router: bool = False) -> Case:
    """Routes of any kind, or as a router makes them: the top-k of `choice`, in any order of slots."""
    experts = draw(st.integers(2, 16))
    slots = draw(st.integers(1, min(5, experts) if like_a_router else 5))
    rows = draw(st.integers(1, 8))
    r = Random(draw(st.integers(0, 2**32)))
    kinds = r.choices([DECODE, DECODE, DECODE, PREFILL, PADDING], k=rows)
    if draw(st.booleans()):
        kinds = [DECODE] * rows
    scores = [r.choices(VALUES, k=experts) for _ in range(rows)]
    bias = r.choices(BIASES, k=experts) if draw(st.booleans()) else [0.0] * experts
    choice = [[s + b for s, b in zip(row, bias, strict=True)] for row in scores]
    ids, weights = [], []
    for row, kind in enumerate(kinds):
        if like_a_router:
            ranked = sorted(range(experts), key=lambda e, c=choice[row]: (-c[e], e))
            mine = r.sample(ranked[:slots], k=slots)
            mine = [e if r.random() < 0.9 else -1 for e in mine]
            weights.append([2 * scores[row][e] if e >= 0 else 0.0 for e in mine])
        else:
            mine = r.choices(range(-2, experts + 2), k=slots)
            if r.random() < 0.7:
                mine = r.sample(range(experts), k=min(slots, experts)) + mine[experts:]
            weights.append(r.choices(VALUES, k=slots))
            for e in range(experts):
                if r.random() < 0.05:
                    choice[row][e] = r.choice([-inf, nan])
        if kind == PADDING:  # leftovers
            mine = r.choices(range(-3, experts + 3), k=slots)
            weights[-1] = [r.choice([nan, 0.5, inf]) for _ in mine]
            scores[row], choice[row] = [nan] * experts, [nan] * experts
        ids.append(mine)
    return Case(
        ids,
        weights,
        kinds,
        scores,
        choice,
        base=draw(st.integers(1, slots + 1)),
        budget=draw(st.integers(0, experts + 1)),
        seed=draw(st.integers(0, 2**40)),
    )


def drawn(seed: int, rows: int, experts: int, slots: int, biased: bool) -> Case:
    """A step of a softmax router, at the sizes of real models."""
    g = torch.Generator().manual_seed(seed)
    taste = torch.randn(experts, generator=g)
    scores = (torch.randn(rows, experts, generator=g) * 1.5 + taste).softmax(1)
    choice = scores + torch.randn(experts, generator=g) * 0.02 * biased
    top = choice.topk(slots, sorted=False)
    weights = scores.gather(1, top.indices)
    kinds = torch.full((rows,), DECODE)
    kinds[rows // 2 :: 7] = PREFILL
    kinds[rows // 3 :: 11] = PADDING
    return Case(
        top.indices.tolist(),
        (weights / weights.sum(1, keepdim=True)).tolist(),
        kinds.tolist(),
        scores.tolist(),
        choice.tolist(),
        base=max(1, slots // 3),
        budget=experts // 4,
        seed=seed,
    )


LARGE = [
    drawn(0, 16, 128, 8, False),
    drawn(1, 64, 128, 8, True),
    drawn(2, 33, 60, 4, False),
    replace(drawn(3, 40, 256, 8, True), base=1, budget=48),
]


# -- every rule ------------------------------------------------------------------------------------


@every_rule
@given(case=cases())
@FEW
def test_the_rule_is_followed(rule: str, case: Case) -> None:
    given = case.tensors()
    before = [t.clone() for t in given]
    ids, weights = call(rule, case, given)
    want_ids, want_weights = by_hand(rule, case)
    assert ids.dtype == given[0].dtype
    assert weights.dtype == given[1].dtype
    assert ids.tolist() == want_ids
    close(weights, want_weights)
    # The inputs are the router's own tensors.
    assert all(same_bits(a, b) for a, b in zip(given, before, strict=True))


@every_rule
@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"E{c.experts}k{c.slots}x{len(c.ids)}")
def test_the_rule_is_followed_at_real_sizes(rule: str, case: Case) -> None:
    ids, weights = call(rule, case, case.tensors())
    want_ids, want_weights = by_hand(rule, case)
    assert ids.tolist() == want_ids
    close(weights, want_weights)
    assert ids.tolist() != case.ids  # it does something


@every_rule
@given(case=cases(), id_dtype=st.sampled_from([torch.int32, torch.int64]))
@FEW
def test_settings_may_be_tensors(rule: str, case: Case, id_dtype: torch.dtype) -> None:
    given = case.tensors(id_dtype=id_dtype)
    plain, steered = call(rule, case, given), call(rule, case, given, one_element)
    assert steered[0].dtype == id_dtype
    assert same_bits(plain[0], steered[0])
    assert same_bits(plain[1], steered[1])


@every_rule
@given(case=cases(), dtype=st.sampled_from([torch.float16, torch.bfloat16]))
@FEW
def test_weights_may_have_16_bits(rule: str, case: Case, dtype: torch.dtype) -> None:
    given = case.tensors(dtype)
    ids, weights = call(rule, case, given)
    want_ids, want_weights = by_hand(rule, case)
    assert weights.dtype == dtype
    assert ids.tolist() == want_ids
    close(weights, want_weights, torch.finfo(dtype).eps)


@every_rule
@given(case=cases())
@FEW
def test_other_rows_and_rows_with_the_same_experts_stay_bit_for_bit(rule: str, case: Case) -> None:
    given = case.tensors()
    ids, weights = call(rule, case, given)
    for row, kind in enumerate(case.kinds):
        if kind != DECODE or set(ids[row].tolist()) == set(case.ids[row]):
            assert same_bits(ids[row], given[0][row])
            assert same_bits(weights[row], given[1][row])


@every_rule
@given(case=cases())
@FEW
def test_ids_stay_valid_and_empty_slots_empty(rule: str, case: Case) -> None:
    given = case.tensors()
    ids, weights = call(rule, case, given)
    valid = (given[0] >= 0) & (given[0] < case.experts)
    assert bool(((ids >= 0) & (ids < case.experts))[valid].all())
    assert same_bits(ids[~valid], given[0][~valid])
    assert same_bits(weights[~valid], given[1][~valid])


@every_rule
@given(case=cases())
@FEW
def test_a_rows_weights_keep_their_sum(rule: str, case: Case) -> None:
    given = case.tensors()
    _, weights = call(rule, case, given)
    rows = given[2] == DECODE
    torch.testing.assert_close(weights[rows].sum(1), given[1][rows].sum(1), rtol=1e-6, atol=1e-6)


@every_rule
@given(case=cases())
@FEW
def test_a_step_reads_no_more_experts_than_the_rule_allows(rule: str, case: Case) -> None:
    ids, _ = call(rule, case, case.tensors())
    reads = {e for r in case.decodes() for e in ids[r].tolist() if 0 <= e < case.experts}
    used = {case.ids[r][s] for r in case.decodes() for s in filled(case, r)}
    free, first = prefill_set(case), primaries(case, 1)
    base = primaries(case, case.base)
    if rule == "oea":
        assert reads <= base | free
    elif rule == "random_remap":
        assert reads <= (sere_set(case) or used)
    elif rule == "xshare":
        assert len(reads - free) <= max(case.budget, len(base - free))
    else:
        assert len(reads - free) <= case.budget + len(base - free)
        assert reads <= used | free
    if rule != "random_remap":
        assert first <= reads


@every_rule
@given(case=cases())
@FEW
def test_settings_that_allow_everything_change_nothing(rule: str, case: Case) -> None:
    used = {case.ids[r][s] for r in case.decodes() for s in filled(case, r)}
    open_ = {
        "oea": [replace(case, base=case.slots), replace(case, base=case.slots + 3)],
        "xshare": [
            replace(case, budget=case.experts),
            replace(case, budget=case.experts + 5),
            replace(case, base=case.slots, budget=0),
        ],
        "lynx": [
            replace(case, budget=case.experts),
            replace(case, budget=case.experts + 5),
            replace(case, budget=len(used)),
            replace(case, base=case.slots, budget=0),
        ],
        "random_remap": [replace(case, base=case.slots), replace(case, base=case.slots + 3)],
    }[rule]
    quiet = [PREFILL if kind == DECODE else kind for kind in case.kinds]
    shut = [replace(case, kinds=quiet), replace(case, kinds=[PADDING] * len(case.kinds))]
    for setting in open_ + shut:
        given = setting.tensors()
        ids, weights = call(rule, setting, given)
        assert same_bits(ids, given[0])
        assert same_bits(weights, given[1])


@every_rule
@given(case=cases(), at=st.integers(0, 8), seed=st.integers(0, 2**32))
@FEW
def test_padding_neither_changes_nor_counts(rule: str, case: Case, at: int, seed: int) -> None:
    r, at = Random(seed), min(at, len(case.ids))

    def insert(rows: list[list[float]], row: list[float]) -> list[list[float]]:
        return [*rows[:at], row, *rows[at:]]

    extra = r.choices(range(-2, case.experts + 2), k=case.slots)
    noise = [r.choice([nan, inf, 1.0]) for _ in range(case.experts)]
    padded = replace(
        case,
        ids=[*case.ids[:at], extra, *case.ids[at:]],
        weights=insert(case.weights, r.choices([nan, 8.0], k=case.slots)),
        kinds=[*case.kinds[:at], PADDING, *case.kinds[at:]],
        scores=insert(case.scores, noise),
        choice=insert(case.choice, noise),
    )
    without, with_ = call(rule, case, case.tensors()), call(rule, padded, padded.tensors())
    others = [i for i in range(len(padded.ids)) if i != at]
    assert with_[0][at].tolist() == extra
    for a, b in zip(without, with_, strict=True):
        assert same_bits(a, b[others])


@every_rule
@given(case=cases(like_a_router=True), seed=st.integers(0, 2**32))
@FEW
def test_slot_order_does_not_matter(rule: str, case: Case, seed: int) -> None:
    """Which experts a row ends up with, and with which weights, not the slots that they are in."""
    order = Random(seed).sample(range(case.slots), k=case.slots)
    shuffled = replace(
        case,
        ids=[[row[s] for s in order] for row in case.ids],
        weights=[[row[s] for s in order] for row in case.weights],
    )
    plain, other = call(rule, case, case.tensors()), call(rule, shuffled, shuffled.tensors())
    for row in case.decodes():
        pairs = [
            sorted(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
            for ids, weights in (plain, other)
        ]
        for (a, x), (b, y) in zip(*pairs, strict=True):
            assert a == b
            assert x == pytest.approx(y, rel=1e-6, abs=1e-6)


@every_rule
def test_nothing_is_read_back_to_the_host(rule: str) -> None:
    """On `meta` a value that Python, or a shape, depends on is an error."""
    case = LARGE[0]
    given = case.tensors()
    meta = tuple(t.to("meta") for t in given)

    def setting(number: int) -> Tensor:
        return torch.tensor([number], device="meta")

    ids, weights = call(rule, case, meta, setting)  # type: ignore[arg-type]
    assert (ids.shape, ids.dtype) == (given[0].shape, given[0].dtype)
    assert (weights.shape, weights.dtype) == (given[1].shape, given[1].dtype)


@every_rule
def test_an_empty_step_is_fine(rule: str) -> None:
    case = LARGE[0]
    ids, weights = call(rule, case, tuple(t[:0] for t in case.tensors()))  # type: ignore[arg-type]
    assert ids.shape == weights.shape == (0, case.slots)


@every_rule
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_captured_graph_can_be_steered(rule: str) -> None:
    case = LARGE[1]
    given = tuple(t.cuda() for t in case.tensors())
    knobs: list[Tensor] = []

    def knob(number: int) -> Tensor:
        knobs.append(torch.tensor([number], device="cuda"))
        return knobs[-1]

    held = {"base": knob(case.base), "budget": knob(case.budget), "seed": knob(case.seed)}
    steered = {
        "oea": lambda: oea(*given, held["base"]),
        "xshare": lambda: xshare(*given, held["base"], held["budget"]),
        "lynx": lambda: lynx(*given, held["base"], held["budget"]),
        "random_remap": lambda: random_remap(*given[:3], held["base"], held["seed"], case.experts),
    }[rule]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        steered()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = steered()
    for base, budget, seed in ((1, 8, 5), (3, 60, 6), (case.slots, case.experts, 7)):
        held["base"].fill_(base)
        held["budget"].fill_(budget)
        held["seed"].fill_(seed)
        graph.replay()
        want = by_hand(rule, replace(case, base=base, budget=budget, seed=seed))
        assert ids.tolist() == want[0]
        close(weights.cpu(), want[1])


# -- what the papers say of a router that takes the top-k of `choice` ------------------------------


def published_row(case: Case, row: int, kept: set[int], allowed: set[int]) -> set[int]:
    """The walk of OEA's second phase: down the ranking, whatever is in the set, until there are k."""
    chosen = set(kept)
    for e in sorted(range(case.experts), key=lambda e: (-case.choice[row][e], e)):
        if len(chosen) < len(filled(case, row)) and e in allowed:
            chosen.add(e)
    return chosen


@every_set
@given(case=cases(like_a_router=True))
@FEW
def test_a_row_takes_its_top_k_of_the_set(rule: str, case: Case) -> None:
    # An emptied slot would have the router's next expert outrank what the row may take.
    case = replace(
        case,
        kinds=[
            PADDING if kind == DECODE and -1 in ids else kind
            for kind, ids in zip(case.kinds, case.ids, strict=True)
        ],
    )
    allowed = SETS[rule](case)
    ids, weights = call(rule, case, case.tensors())
    for row in case.decodes():
        # Nobody loses its k0 heaviest.
        kept = {case.ids[row][s] for s in filled(case, row)[: case.base]}
        chosen = published_row(case, row, kept, allowed)
        got = set(ids[row].tolist())
        assert got == chosen
        if got == set(case.ids[row]):
            continue
        gate = sum(case.scores[row][e] for e in chosen)
        each = dict.fromkeys(chosen, 0.0)  # an expert repeated for want of others weighs nothing
        for e, w in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            each[e] += w
        for e, w in each.items():
            share = case.scores[row][e] / gate if gate else 1 / len(chosen)
            assert w == pytest.approx(share * sum(case.weights[row]), rel=1e-6, abs=1e-6)


@every_set
@given(case=cases(like_a_router=True))
@FEW
def test_a_slot_without_an_expert_weighs_nothing(rule: str, case: Case) -> None:
    ids, weights = call(rule, case, case.tensors())
    for row in case.decodes():
        slots = filled(case, row)
        seen: set[int] = set()
        heaviest = case.ids[row][slots[0]] if slots else -1
        pairs = list(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        for e, _ in pairs:
            if e >= 0 and e in seen:
                assert e == heaviest
            seen.add(e)
        weighty = [e for e, w in pairs if w > 0]
        assert len(weighty) == len(set(weighty))


# -- by example ------------------------------------------------------------------------------------


def example(**changes: object) -> Case:
    """Three decoding rows, two slots of six experts; the router normalises to 1."""
    scores = [
        [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125],
        [0.0625, 0.375, 0.3125, 0.125, 0.0625, 0.0625],
        [0.125, 0.03125, 0.0625, 0.03125, 0.25, 0.5],
    ]
    case = Case(
        ids=[[0, 1], [2, 1], [4, 5]],
        weights=[[2 / 3, 1 / 3], [0.3125 / 0.6875, 0.375 / 0.6875], [1 / 3, 2 / 3]],
        kinds=[DECODE] * 3,
        scores=scores,
        choice=scores,
    )
    return replace(case, **changes)  # type: ignore[arg-type]


def check(rule: str, case: Case, ids: list[list[int]], weights: list[list[float]]) -> None:
    got = call(rule, case, case.tensors())
    assert got[0].tolist() == ids
    close(got[1], weights)


def test_oea_by_example() -> None:
    """k0 = 1: the set is {0, 1, 5}."""
    case = example(base=1)
    check(
        "oea",
        case,
        [[0, 1], [0, 1], [0, 5]],  # 0 and 5 tie in the second row
        [[2 / 3, 1 / 3], [1 / 7, 6 / 7], [0.2, 0.8]],
    )
    # 3, read by a prefill row in any case, is the second row's next choice.
    prefill = [0.1, 0.1, 0.1, 0.5, 0.1, 0.1]
    mixed = replace(
        case,
        ids=[*case.ids, [3, -1]],
        weights=[*case.weights, [1.0, 0.0]],
        kinds=[DECODE, DECODE, DECODE, PREFILL],
        scores=[*case.scores, prefill],
        choice=[*case.choice, prefill],
    )
    check(
        "oea",
        mixed,
        [[0, 1], [3, 1], [0, 5], [3, -1]],
        [[2 / 3, 1 / 3], [0.25, 0.75], [0.2, 0.8], [1.0, 0.0]],
    )


def test_one_decoding_row_is_cut_to_its_k0() -> None:
    """Nothing to piggyback on: the rest repeats the heaviest, with weight 0."""
    case = Case([[3, 0, 2, -1]], [[0.25, 0.5, 0.25, 0.0]], [DECODE], [[0.25] * 4], [[0.25] * 4])
    check("oea", case, [[0, 0, 0, -1]], [[0.0, 1.0, 0.0, 0.0]])
    check("oea", replace(case, base=2), [[0, 0, 2, -1]], [[0.0, 0.5, 0.5, 0.0]])
    check("xshare", case, [[0, 0, 0, -1]], [[0.0, 1.0, 0.0, 0.0]])
    # 1 has the same gate value as 2 and 3, and the lower id.
    check("xshare", replace(case, budget=2), [[1, 0, 0, -1]], [[0.5, 0.5, 0.0, 0.0]])
    check("lynx", replace(case, budget=0), [[0, 0, 0, -1]], [[0.0, 1.0, 0.0, 0.0]])
    # 0 is the most popular as well (its weight is larger), 2 goes before 3.
    check("lynx", replace(case, budget=2), [[0, 0, 2, -1]], [[0.0, 0.5, 0.5, 0.0]])
    check("lynx", replace(case, base=2, budget=0), [[0, 0, 2, -1]], [[0.0, 0.5, 0.5, 0.0]])


def test_xshare_by_example() -> None:
    """Summed gates: 0.6875, 0.65625, 0.5, 0.21875, 0.34375, 0.59375; the k0 = 1 are {0, 1, 5}."""
    case = example(base=1)
    cut = [[2 / 3, 1 / 3], [1 / 7, 6 / 7], [0.2, 0.8]]
    for budget in (0, 3):  # the k0 alone are more, or as many
        check("xshare", replace(case, budget=budget), [[0, 1], [0, 1], [0, 5]], cut)
    with_2 = [case.weights[0], case.weights[1], [0.2, 0.8]]
    check("xshare", replace(case, budget=4), [[0, 1], [2, 1], [0, 5]], with_2)
    check("xshare", replace(case, budget=5), case.ids, case.weights)
    # An expert of a prefill row is free, also when it is among the k0: 2 is bought in its place.
    prefill = [0.1, 0.5, 0.1, 0.1, 0.1, 0.1]
    mixed = replace(
        case,
        ids=[*case.ids, [1, -1]],
        weights=[*case.weights, [1.0, 0.0]],
        kinds=[DECODE, DECODE, DECODE, PREFILL],
        scores=[*case.scores, prefill],
        choice=[*case.choice, prefill],
        budget=3,
    )
    check("xshare", mixed, [[0, 1], [2, 1], [0, 5], [1, -1]], [*with_2, [1.0, 0.0]])


def test_lynx_by_example() -> None:
    """Users: 1 has two, all others one, of which 0 and 5 are the heaviest of a row."""
    case = example()
    cut = [[2 / 3, 1 / 3], [1 / 7, 6 / 7], [0.2, 0.8]]
    for budget in (0, 1, 3):  # 0 and 5 weigh most among those with one user
        check("lynx", replace(case, budget=budget), [[0, 1], [0, 1], [0, 5]], cut)
    # Then 2, with 0.4545 to the 0.3333 of 4.
    with_2 = [case.weights[0], case.weights[1], [0.2, 0.8]]
    check("lynx", replace(case, budget=4), [[0, 1], [2, 1], [0, 5]], with_2)
    check("lynx", replace(case, budget=5), case.ids, case.weights)


def test_experts_that_a_row_may_not_use_are_not_given_to_it() -> None:
    """A router with groups leaves -inf outside them; own experts stay whatever `choice` says."""
    case = example(base=1)
    choice = [list(row) for row in case.choice]
    choice[1][0] = -inf  # 5 instead
    choice[2][0] = choice[2][1] = -inf  # nothing left
    choice[0][1] = nan
    check(
        "oea",
        replace(case, choice=choice),
        [[0, 1], [5, 1], [5, 5]],
        [[2 / 3, 1 / 3], [1 / 7, 6 / 7], [0.0, 1.0]],
    )


def test_the_bias_chooses_and_the_score_weighs() -> None:
    case = example(base=1)
    bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0625]
    choice = [[s + b for s, b in zip(row, bias, strict=True)] for row in case.scores]
    check(
        "oea",
        replace(case, choice=choice),
        [[0, 1], [5, 1], [0, 5]],
        [[2 / 3, 1 / 3], [1 / 7, 6 / 7], [0.2, 0.8]],
    )


def test_scores_that_all_underflow_share_the_row() -> None:
    case = Case(
        ids=[[0, 1], [2, 3]],
        weights=[[1.0, 0.0], [0.75, 0.25]],
        kinds=[DECODE, DECODE],
        scores=[[0.0] * 4, [0.0, 0.0, 0.5, 0.0]],
        choice=[[0.0] * 4, [0.0, 0.0, 0.5, 0.0]],
    )
    check("oea", case, [[0, 2], [2, 0]], [[0.5, 0.5], [1.0, 0.0]])


# -- the random control ----------------------------------------------------------------------------


@given(case=cases())
@FEW
def test_the_control_moves_what_sere_moves(case: Case) -> None:
    given = case.tensors()
    ids, weights = call("random_remap", case, given)
    e = case.experts
    moved = sere(
        *given[:3], torch.rand(e, e), torch.zeros(e, dtype=torch.bool), case.base, threshold=0.0
    )
    assert torch.equal(ids != given[0], moved != given[0])
    assert same_bits(weights, given[1])


@given(case=cases())
@FEW
def test_an_expert_has_one_target_for_all_rows(case: Case) -> None:
    ids, _ = call("random_remap", case, case.tensors())
    targets: dict[int, set[int]] = {}
    for row in case.decodes():
        for u, v in zip(case.ids[row], ids[row].tolist(), strict=True):
            if u != v:
                targets.setdefault(u, set()).add(v)
    assert all(len(found) == 1 for found in targets.values())


def draw_targets(seed: int, width: int = 8) -> list[int]:
    """Where the experts 8 … 15 go when 0 … width - 1 are read."""
    ids = torch.tensor([[i, 8 + i] for i in range(8)])
    ids[:, 0] %= width
    weights = torch.tensor([[0.75, 0.25]]).expand(8, 2)
    kinds = torch.full((8,), DECODE)
    return random_remap(ids, weights, kinds, 1, seed, 16)[0][:, 1].tolist()  # type: ignore[no-any-return]


def test_targets_are_drawn_evenly_and_anew_for_every_seed() -> None:
    draws = [draw_targets(seed) for seed in range(1000)]
    assert draws[:50] == [draw_targets(seed) for seed in range(50)]
    # An eighth of the draws, with a standard deviation of 10.5.
    even = pytest.approx(125, abs=5 * 10.5)
    for position in range(8):
        counts = Counter(draw[position] for draw in draws)
        assert all(counts[target] == even for target in range(8))
    assert sum(a[0] == b[0] for a, b in pairwise(draws)) == even
    assert sum(draw[0] == draw[1] for draw in draws) == even


def test_a_larger_p_moves_only_what_goes_to_the_new_experts() -> None:
    for seed in range(50):
        for small, large in zip(draw_targets(seed, 5), draw_targets(seed, 8), strict=True):
            assert large == small or large >= 5


def test_the_low_32_bits_of_a_seed_count() -> None:
    assert draw_targets(7) == draw_targets(7 + 2**32) == draw_targets(7 - 2**32)
    assert draw_targets(7) != draw_targets(8)


def test_the_oracle_sees_nan() -> None:
    """`close` must not pass NaN for a number."""
    with pytest.raises(AssertionError):
        close(torch.tensor([[nan]]), [[0.5]])
