"""The re-routing kernel on a GPU: equal to the reference, in captured graphs and compiled code too."""

from __future__ import annotations

import pytest
import torch

from kernels.sere import bench, fused, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_it_gives_what_the_reference_gives() -> None:
    assert bench.check() == []


def test_a_graph_follows_settings_and_rows() -> None:
    """Captured once, replayed over random batches and all policies: as if run for each."""
    rows, experts, slots = 32, 128, 8
    ids, weights, logits = bench.routes(rows, experts, slots, 0)
    kinds = torch.full((rows,), reference.DECODE, dtype=torch.uint8, device="cuda")
    model = bench.Model.random(experts, "off", 0.0)
    model.reroute(ids, weights, logits, kinds, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.reroute(ids, weights, logits, kinds, 3)
    g = torch.Generator("cuda").manual_seed(1)
    similarity, moved = bench.random_similarity(experts), 0
    for seed in range(60):
        fresh = bench.routes(rows, experts, slots, 100 + seed)
        ids.copy_(fresh[0])
        weights.copy_(fresh[1])
        logits.copy_(fresh[2])
        kinds.copy_(torch.randint(0, 3, (rows,), generator=g, device="cuda"))
        policy = seed % len(fused.POLICIES)
        numbers = [policy, 1 + seed % slots, seed % 2, seed % 50, seed]
        model.settings.copy_(torch.tensor(numbers, dtype=torch.int32))
        limits = torch.full((bench.LAYERS,), (0.0, 0.9, 0.97)[seed % 3], device="cuda")
        model.reach.copy_(fused.reach(similarity, limits, torch.zeros_like(model.reach)))
        torch.cuda.synchronize()
        graph.replay()
        replayed = [t.clone() for t in (*out, model.counters)]
        eager = (*model.reroute(ids, weights, logits, kinds, 3), model.counters)
        for a, b in zip(replayed, eager, strict=True):
            assert torch.equal(a, b)
        moved += int((out[0] != ids).sum())
    assert moved > 0


def test_compiled_code_holds_the_operator_whole() -> None:
    ids, weights, logits = bench.routes(16, 64, 8, 0)
    kinds = torch.full((16,), reference.DECODE, dtype=torch.uint8, device="cuda")
    model = bench.Model.random(64, "sere", 0.0)

    def step(i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        new_ids, new_weights = model.reroute(i, w * 2, logits, kinds, 0)
        return new_ids.sum() + new_weights.sum()

    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(ids, weights), step(ids, weights))


def test_nothing_waits_for_the_gpu() -> None:
    ids, weights, logits = bench.routes(16, 64, 8, 0)
    kinds = torch.full((16,), reference.DECODE, dtype=torch.uint8, device="cuda")
    model = bench.Model.random(64, "sere", 0.0)
    model.reroute(ids, weights, logits, kinds, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.reroute(ids, weights, logits, kinds, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
