"""The routing lever's state and what it does to one layer's routes, without an engine around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine.plugin.routing import POLICIES, RoutedLayer, RoutingLever
from kernels.sere import reference
from kernels.sere.reference import DECODE, PADDING, PREFILL

EXPERTS, SLOTS, LAYERS = 16, 4, (2, 5)
CPU = torch.device("cpu")


def lever(rows: int = 64) -> RoutingLever:
    """A lever that holds two layers and has seen its first step."""
    made = RoutingLever()
    made.layers = {index: RoutedLayer(index, EXPERTS, SLOTS) for index in LAYERS}
    made.max_rows = rows
    made.prepare(CPU)
    return made


def routes(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights and ids as a router gives them: distinct experts, not sorted by weight."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, EXPERTS, generator=g).softmax(1)
    ids = torch.rand(rows, EXPERTS, generator=g).argsort(1)[:, :SLOTS].int()
    return scores.gather(1, ids.long()), ids


def similarities(seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    half = torch.rand(len(LAYERS), EXPERTS, EXPERTS, generator=g)
    return (half + half.mT) / 2


def step(made: RoutingLever, kinds: list[int]) -> None:
    """What happens before a step: row kinds are written, and its counters opened."""
    made.row_kind[: len(kinds)] = torch.tensor(kinds, dtype=torch.uint8)
    made.row_kind[len(kinds) :] = PADDING
    assert made.log is not None
    made.log.begin(("r",), kinds.count(DECODE), kinds.count(PREFILL))


def counters(made: RoutingLever) -> list[list[int]]:
    """Counters of the one step since the last look: for each layer."""
    assert made.log is not None
    _, counts, lost = made.log.drain()
    assert lost == 0
    assert len(counts) == 1
    return counts[0].tolist()  # type: ignore[no-any-return]


def distinct(ids: Tensor, kinds: list[int]) -> int:
    return len({e for row, k in zip(ids.tolist(), kinds, strict=True) if k == DECODE for e in row})


KINDS = [DECODE, PREFILL, DECODE, PADDING, DECODE]


@pytest.mark.parametrize("primary", [1, 2])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8])
def test_sere_moves_slots_by_each_layers_own_matrices(primary: int, threshold: float) -> None:
    made, similarity = lever(), similarities(0)
    protected = (torch.arange(EXPERTS) % torch.tensor([[3], [5]]) == 0).to(torch.uint8)
    made.set_matrices(similarity, protected)
    made.set("sere", primary, threshold, True)
    weights, ids = routes(len(KINDS), seed=7)
    step(made, KINDS)
    outs = []
    for rank, layer in enumerate(LAYERS):
        got_weights, got_ids = made.reroute(layer, weights, ids)
        kinds, guard = torch.tensor(KINDS), protected[rank].bool()
        want = reference.sere(ids, weights, kinds, similarity[rank], guard, primary, threshold)
        assert got_ids.tolist() == want.tolist()
        assert got_weights is weights
        outs.append(got_ids)
    for out, counted in zip(outs, counters(made), strict=True):
        moved = int((out != ids).sum())
        assert counted == [distinct(ids, KINDS), distinct(out, KINDS), moved]
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("renormalize", [True, False])
def test_topk_drops_slots(renormalize: bool) -> None:
    made = lever()
    made.set("topk", 1, 0.5, renormalize)
    weights, ids = routes(len(KINDS), seed=3)
    step(made, KINDS)
    for layer in LAYERS:
        got_weights, got_ids = made.reroute(layer, weights, ids)
        want = reference.topk(ids, weights, torch.tensor(KINDS), 1, renormalize)
        assert torch.equal(got_ids, want[0])
        assert torch.equal(got_weights, want[1])
    assert counters(made)[0] == [distinct(ids, KINDS), distinct(want[0], KINDS), 9]


@pytest.mark.parametrize(
    "setting",
    [
        ("off", None, 0.0, True),
        ("off", 1, 0.0, True),
        ("sere", None, 0.0, True),
        ("sere", SLOTS, 0.0, True),
        ("sere", SLOTS + 9, 0.0, True),
        ("topk", None, 0.0, True),
        ("topk", SLOTS, 0.0, False),
    ],
    ids=str,
)
def test_settings_that_change_nothing_are_off(setting: tuple[Any, ...]) -> None:
    made = lever()
    made.set("sere", 1, 0.0, True)
    made.set_matrices(torch.ones(len(LAYERS), EXPERTS, EXPERTS), None)
    made.set(*setting)
    assert int(made.policy) == POLICIES.index("off")
    weights, ids = routes(4, seed=1)
    step(made, [DECODE] * 4)
    for layer in LAYERS:
        got_weights, got_ids = made.reroute(layer, weights, ids)
        assert got_weights is weights
        assert got_ids is ids
    assert counters(made) == [[distinct(ids, [DECODE] * 4)] * 2 + [0]] * len(LAYERS)


@pytest.mark.parametrize(
    "setting",
    [
        ("off", 1, 0.0, True),
        ("sere", 1, 0.0, True),
        ("sere", 2, 0.6, False),
        ("sere", SLOTS, 0.0, True),
        ("topk", 1, 0.5, True),
        ("topk", 2, 0.5, False),
    ],
    ids=str,
)
def test_reading_the_policy_on_the_device_gives_the_same_routes(setting: tuple[Any, ...]) -> None:
    """A captured graph cannot ask Python for the policy; it must do what Python would choose."""
    made = lever()
    made.set_matrices(similarities(4), (torch.arange(2 * EXPERTS) % 5 == 0).view(2, EXPERTS))
    made.set(*setting)
    weights, ids = routes(len(KINDS), seed=5)
    kinds = torch.tensor(KINDS, dtype=torch.uint8)
    for rank in range(len(LAYERS)):
        want_weights, want_ids = made._apply_chosen(rank, weights, ids, kinds)
        got_weights, got_ids = made._apply_all(rank, weights, ids, kinds)
        assert torch.equal(got_ids, want_ids)
        assert torch.equal(got_weights, want_weights)
        assert (got_ids.dtype, got_weights.dtype) == (ids.dtype, weights.dtype)


def state(made: RoutingLever) -> list[Any]:
    tensors = (made.policy, made.primary, made.threshold, made.renormalize)
    return [t.tolist() for t in (*tensors, made.similarity, made.protected)]


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        (("fast", 2, 0.5, True), "policy 'fast': one of off, topk, sere"),
        (("sere", 0, 0.5, True), "primary_experts 0"),
        (("sere", -1, 0.5, True), "primary_experts -1"),
        (("sere", 1.5, 0.5, True), "primary_experts 1.5: a whole number"),
        (("sere", "2", 0.5, True), "primary_experts '2'"),
        (("sere", True, 0.5, True), "primary_experts True"),
        (("sere", 2, 1.1, True), "similarity_threshold 1.1"),
        (("sere", 2, -0.1, True), "similarity_threshold -0.1"),
        (("sere", 2, float("nan"), True), "similarity_threshold nan"),
        (("sere", 2, None, True), "similarity_threshold None"),
        (("topk", 2, 0.5, None), "renormalize None"),
        (("off", 0, 0.5, True), "primary_experts 0"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_and_changes_nothing(
    setting: tuple[Any, ...], match: str
) -> None:
    made = lever()
    made.set_matrices(similarities(1), torch.ones(len(LAYERS), EXPERTS))
    made.set("sere", 2, 0.25, False)
    before = state(made)
    with pytest.raises(ValueError, match=match):
        made.set(*setting)
    assert state(made) == before


@pytest.mark.parametrize(
    ("similarity", "protected", "match"),
    [
        (torch.ones(1, EXPERTS, EXPERTS), None, r"similarity \(1, 16, 16\)"),
        (torch.ones(2, EXPERTS, EXPERTS + 1), None, r"needs \(2, 16, 16\)"),
        (torch.ones(2, EXPERTS), None, "similarity"),
        (None, torch.ones(2, EXPERTS + 1), r"protection \(2, 17\): this model needs \(2, 16\)"),
        (similarities(2), torch.ones(EXPERTS), "protection"),
    ],
)
def test_matrices_of_another_shape_are_refused_and_change_nothing(
    similarity: Tensor | None, protected: Tensor | None, match: str
) -> None:
    made = lever()
    made.set_matrices(similarities(1), torch.ones(len(LAYERS), EXPERTS))
    before = state(made)
    with pytest.raises(ValueError, match=match):
        made.set_matrices(similarity, protected)
    assert state(made) == before


def test_settings_and_matrices_are_rewritten_where_they_are() -> None:
    """A captured graph reads the tensors that it was captured with."""
    made = lever()
    names = ("policy", "primary", "threshold", "renormalize", "similarity", "protected")
    before = {name: getattr(made, name).data_ptr() for name in names}
    made.set_matrices(similarities(1), torch.ones(len(LAYERS), EXPERTS))
    made.set("topk", 2, 0.75, False)
    assert {name: getattr(made, name).data_ptr() for name in names} == before
    assert [int(made.policy), int(made.primary), float(made.threshold)] == [1, 2, 0.75]
    made.set_matrices(None, None)
    assert torch.equal(made.similarity, torch.eye(EXPERTS).repeat(len(LAYERS), 1, 1))
    assert not bool(made.protected.any())


def test_tensors_made_inside_a_step_can_be_set_between_steps() -> None:
    """A step runs in inference mode, whose tensors nobody else may write."""
    made = RoutingLever()
    made.layers, made.max_rows = {0: RoutedLayer(0, EXPERTS, SLOTS)}, 16
    weights, ids = routes(4, seed=1)
    with torch.inference_mode():
        made.reroute(0, weights, ids)
        step(made, [DECODE] * 4)
        made.reroute(0, weights, ids)
    made.set_matrices(torch.ones(1, EXPERTS, EXPERTS), None)
    made.set("sere", 1, 0.0, True)
    step(made, [DECODE] * 4)
    with torch.inference_mode():
        _, moved = made.reroute(0, weights, ids)
    assert not torch.equal(moved, ids)
    assert int(made.calls[0]) == 3


def test_rows_are_padding_until_a_step_says_otherwise() -> None:
    """Profiling and graph capture run on made-up tokens."""
    made = RoutingLever()
    made.layers, made.max_rows = {0: RoutedLayer(0, EXPERTS, SLOTS)}, 20
    weights, ids = routes(20, seed=1)
    made.reroute(0, weights, ids)
    made.set_matrices(torch.ones(1, EXPERTS, EXPERTS), None)
    made.set("sere", 1, 0.0, True)
    _, after = made.reroute(0, weights, ids)
    assert torch.equal(after, ids)
    assert made.log is not None
    assert int(made.log.counters.sum()) == 0


def test_a_step_of_more_rows_than_planned_is_refused() -> None:
    made = lever(rows=8)
    with pytest.raises(RuntimeError, match="9 rows; 8 were planned"):
        made.reroute(2, *routes(9, seed=1))


def test_nothing_can_be_set_without_layers_or_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="no mixture-of-experts layer"):
        RoutingLever().set("off", None, 0.5, True)
    early = RoutingLever()
    early.layers = {0: RoutedLayer(0, EXPERTS, SLOTS)}
    with pytest.raises(ValueError, match="not run a step"):
        early.set("off", None, 0.5, True)
    refused = lever()
    refused.refusal = "routes inside its kernel"
    with pytest.raises(ValueError, match="inside its kernel"):
        refused.set_matrices(None, None)
