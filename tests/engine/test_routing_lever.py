"""The routing lever's state and what it does to one layer's routes, without an engine around it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.calibration.quantiles import quantile_thresholds
from harness.engine.plugin.routing import RoutedLayer, RoutingLever, why_opaque
from harness.engine.plugin.setting import RoutingSetting
from kernels.sere import fused, reference
from kernels.sere.fused import POLICIES
from kernels.sere.reference import DECODE, PADDING, PREFILL

EXPERTS, SLOTS, LAYERS = 16, 4, (2, 5)
CPU = torch.device("cpu")
LOGITS = torch.randn(64, EXPERTS, generator=torch.Generator().manual_seed(0))


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
    made.begin(("r",), np.array(kinds, dtype=np.uint8))


def numbers(made: RoutingLever, rows: int = 4) -> tuple[int, ...]:
    """What a step of so many decode rows would be told."""
    return made.setting.numbers(rows, SLOTS, EXPERTS)


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
    made.set(RoutingSetting("sere", primary, threshold, True))
    weights, ids = routes(len(KINDS), seed=7)
    step(made, KINDS)
    outs = []
    for rank, layer in enumerate(LAYERS):
        got_weights, got_ids = made.reroute(layer, weights, ids, LOGITS[: len(ids)])
        kinds, guard = torch.tensor(KINDS), protected[rank].bool()
        want = reference.sere(ids, weights, kinds, similarity[rank], guard, primary, threshold)
        assert got_ids.tolist() == want.tolist()
        assert torch.equal(got_weights, weights)
        outs.append(got_ids)
    for out, counted in zip(outs, counters(made), strict=True):
        moved = int((out != ids).sum())
        assert counted == [distinct(ids, KINDS), distinct(out, KINDS), moved]
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("renormalize", [True, False])
def test_topk_drops_slots(renormalize: bool) -> None:
    made = lever()
    made.set(RoutingSetting("topk", 1, 0.5, renormalize))
    weights, ids = routes(len(KINDS), seed=3)
    step(made, KINDS)
    for layer in LAYERS:
        got_weights, got_ids = made.reroute(layer, weights, ids, LOGITS[: len(ids)])
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
    made.set(RoutingSetting("sere", 1, 0.0, True))
    made.set_matrices(torch.ones(len(LAYERS), EXPERTS, EXPERTS), None)
    made.set(RoutingSetting(*setting))
    assert numbers(made)[0] == POLICIES.index("off")
    weights, ids = routes(4, seed=1)
    step(made, [DECODE] * 4)
    for layer in LAYERS:
        got_weights, got_ids = made.reroute(layer, weights, ids, LOGITS[: len(ids)])
        assert torch.equal(got_weights, weights)
        assert torch.equal(got_ids, ids)
    assert counters(made) == [[distinct(ids, [DECODE] * 4)] * 2 + [0]] * len(LAYERS)


@pytest.mark.parametrize("policy", fused.RESELECTING)
def test_rivals_choose_by_the_routers_logits(policy: str) -> None:
    made = lever()
    made.set(RoutingSetting(policy, 1, 0.5, True, 4))
    weights, ids = routes(len(KINDS), seed=3)
    step(made, KINDS)
    out = {}
    for layer, logits in zip(LAYERS, (LOGITS[:5], -LOGITS[:5]), strict=True):
        got_weights, got_ids = made.reroute(layer, weights, ids, logits)
        assert distinct(got_ids, KINDS) < distinct(ids, KINDS)
        torch.testing.assert_close(got_weights.sum(1), weights.sum(1))
        out[layer] = got_ids
    assert not torch.equal(*out.values())


def test_a_quantile_is_a_threshold_of_each_layers_own() -> None:
    made = lever()
    similarity = similarities(6)
    similarity[1] /= 10
    made.set_matrices(similarity, None)
    made.set(RoutingSetting("sere", 1, 0.0, True, similarity_quantile=0.5))
    assert torch.equal(made.threshold, quantile_thresholds(similarity, 0.5))
    assert float(made.threshold[0]) > 5 * float(made.threshold[1])
    made.set(RoutingSetting("sere", 1, 0.25, True))
    assert made.threshold.tolist() == [0.25] * 2


def test_below_the_floor_nothing_moves() -> None:
    made = lever()
    made.set_matrices(torch.ones(len(LAYERS), EXPERTS, EXPERTS), None)
    made.set(RoutingSetting("sere", 1, 0.0, floor_batch=3))
    weights, ids = routes(6, seed=1)
    for kinds, moves in (
        ([DECODE] * 2 + [PREFILL] * 4, False),
        ([DECODE] * 3 + [PADDING] * 3, True),
        ([DECODE] * 2, False),
    ):
        step(made, kinds)
        for layer in LAYERS:
            rows = len(kinds)
            _, got = made.reroute(layer, weights[:rows], ids[:rows], LOGITS[:rows])
            assert torch.equal(got, ids[:rows]) is not moves


def test_an_automatic_k_follows_the_batch() -> None:
    made = lever()
    made.set(RoutingSetting("sere", "auto", 0.0, auto_experts=3.0))
    off, sere = POLICIES.index("off"), POLICIES.index("sere")
    assert [numbers(made, n)[:2] for n in (1, 2, 9)] == [(sere, 3), (sere, 2), (sere, 1)]
    made.set(RoutingSetting("sere", "auto", 0.0, auto_experts=50.0, floor_batch=600))
    # No more than a token has; nothing below the floor.
    assert [numbers(made, n)[:2] for n in (1, 599, 600)] == [(off, SLOTS), (off, SLOTS), (sere, 2)]


def test_more_than_there_are_is_as_many_as_there_are() -> None:
    made = lever()
    made.set(RoutingSetting("lynx", 1, 0.5, True, 10**12))
    assert numbers(made) == (POLICIES.index("lynx"), 1, 1, EXPERTS, 0)
    made.set(RoutingSetting("sere", 10**12, 0.5, True))
    assert numbers(made)[:2] == (POLICIES.index("off"), SLOTS)


def test_a_router_whose_scores_are_its_own_keeps_rivals_away() -> None:
    made = lever()
    made.layers[5] = dataclasses.replace(made.layers[5], opaque="chooses within groups of experts")
    with pytest.raises(ValueError, match="policy oea: layer 5 chooses within groups"):
        made.set(RoutingSetting("oea", 1, 0.5, True))
    made.set(RoutingSetting("sere", 1, 0.5, True))


def test_a_layer_without_logits_of_its_experts_keeps_rivals_away() -> None:
    made = lever()
    weights, ids = routes(4, seed=1)
    made.reroute(2, weights, ids, torch.zeros(4, EXPERTS + 1))
    with pytest.raises(ValueError, match=r"policy lynx: layer 2 .*no logits"):
        made.set(RoutingSetting("lynx", 1, 0.5, True, 4))
    made.set(RoutingSetting("sere", 1, 0.5, True))
    step(made, [DECODE] * 4)
    made.reroute(2, weights, ids, torch.zeros(4, EXPERTS + 1))


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"scoring_func": "softmax"}, None),
        ({"scoring_func": "sigmoid", "e_score_correction_bias": torch.zeros(4)}, None),
        ({"scoring_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1}, None),
        ({"scoring_func": "softmax", "use_grouped_topk": True, "num_expert_group": 4}, "groups"),
        ({"scoring_func": "softmax", "custom_routing_function": print}, "function of its own"),
        ({"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus"),
        ({"scoring_func": "softmax", "e_score_correction_bias": torch.zeros(4)}, "bias"),
        ({}, "None"),
    ],
    ids=str,
)
def test_which_routers_can_be_chosen_by(attributes: dict[str, Any], reason: str | None) -> None:
    found = why_opaque(SimpleNamespace(**attributes))
    assert found is None if reason is None else reason in (found or "")


def state(made: RoutingLever) -> list[Any]:
    tensors = (made.reach, made.threshold, made.similarity, made.protection)
    return [made.setting, *(t.tolist() for t in tensors)]


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        (("fast", 2, 0.5, True), "policy 'fast': one of off, topk, sere, random_remap"),
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
        (("xshare", 1, 0.5, True), "budget None"),
        (("lynx", 1, 0.5, True, 0), "budget 0"),
        (("lynx", 1, 0.5, True, 2.5), "budget 2.5: a whole number"),
        (("random_remap", 1, 0.5, True, None, -1), "seed -1"),
        (("sere", 1, 0.5, True, None, 0, 1.5), "similarity_quantile 1.5"),
        (
            ("sere", "all", 0.5, True),
            "primary_experts 'all': a whole number of at least 1, or auto",
        ),
        (("sere", "auto", 0.5, True, None, 0, None, 0, 0.5), "auto_experts 0.5"),
        (("sere", "auto", 0.5, True, None, 0, None, 0, float("inf")), "auto_experts inf"),
        (("sere", 1, 0.5, True, None, 0, None, -1), "floor_batch -1"),
        (("sere", 1, 0.5, True, None, 0, None, 2.5), "floor_batch 2.5: a whole number"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_and_changes_nothing(
    setting: tuple[Any, ...], match: str
) -> None:
    made = lever()
    made.set_matrices(similarities(1), torch.ones(len(LAYERS), EXPERTS))
    made.set(RoutingSetting("sere", 2, 0.25, False))
    before = state(made)
    with pytest.raises(ValueError, match=match):
        made.set(RoutingSetting(*setting))
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
    assert made.log is not None
    names = ("neighbours", "reach", "threshold", "similarity", "protection")
    before = {name: getattr(made, name).data_ptr() for name in names}
    told = (made.log.slot, made.log.settings, made.log.row_kind)
    places = [t.data_ptr() for t in told]
    made.set_matrices(similarities(1), torch.ones(len(LAYERS), EXPERTS))
    made.set(RoutingSetting("topk", 2, 0.75, False))
    assert {name: getattr(made, name).data_ptr() for name in names} == before
    step(made, [DECODE] * 3)
    assert [t.data_ptr() for t in told] == places
    assert made.log.settings.tolist() == [1, 2, 0, 0, 0]
    assert made.threshold.tolist() == [0.75] * len(LAYERS)
    made.set_matrices(None, None)
    assert torch.equal(made.similarity, torch.eye(EXPERTS).repeat(len(LAYERS), 1, 1))
    assert not bool(made.protection.any())


def test_tensors_made_inside_a_step_can_be_set_between_steps() -> None:
    """A step runs in inference mode, whose tensors nobody else may write."""
    made = RoutingLever()
    made.layers, made.max_rows = {0: RoutedLayer(0, EXPERTS, SLOTS)}, 16
    weights, ids = routes(4, seed=1)
    with torch.inference_mode():
        made.reroute(0, weights, ids, LOGITS[: len(ids)])
        step(made, [DECODE] * 4)
        made.reroute(0, weights, ids, LOGITS[: len(ids)])
    made.set_matrices(torch.ones(1, EXPERTS, EXPERTS), None)
    made.set(RoutingSetting("sere", 1, 0.0, True))
    step(made, [DECODE] * 4)
    with torch.inference_mode():
        _, moved = made.reroute(0, weights, ids, LOGITS[: len(ids)])
    assert not torch.equal(moved, ids)
    assert int(made.calls[0]) == 3


def test_rows_are_padding_until_a_step_says_otherwise() -> None:
    """Profiling and graph capture run on made-up tokens."""
    made = RoutingLever()
    made.layers, made.max_rows = {0: RoutedLayer(0, EXPERTS, SLOTS)}, 20
    weights, ids = routes(20, seed=1)
    made.reroute(0, weights, ids, LOGITS[: len(ids)])
    made.set_matrices(torch.ones(1, EXPERTS, EXPERTS), None)
    made.set(RoutingSetting("sere", 1, 0.0, True))
    _, after = made.reroute(0, weights, ids, LOGITS[: len(ids)])
    assert torch.equal(after, ids)
    assert made.log is not None
    assert int(made.log.counters.sum()) == 0


def test_a_step_of_more_rows_than_planned_is_refused() -> None:
    made = lever(rows=8)
    with pytest.raises(RuntimeError, match="9 rows; 8 were planned"):
        made.reroute(2, *routes(9, seed=1), LOGITS[:9])


def test_nothing_can_be_set_without_layers_or_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="no mixture-of-experts layer"):
        RoutingLever().set(RoutingSetting("off", None, 0.5, True))
    early = RoutingLever()
    early.layers = {0: RoutedLayer(0, EXPERTS, SLOTS)}
    with pytest.raises(ValueError, match="not run a step"):
        early.set(RoutingSetting("off", None, 0.5, True))
    refused = lever()
    refused.refusal = "routes inside its kernel"
    with pytest.raises(ValueError, match="inside its kernel"):
        refused.set_matrices(None, None)
