"""The scoring kernels on a GPU, against float64, at the sizes that they are for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.visionzip.attention import log_sum_exp, runs_triton, scores
from kernels.visionzip.bench import bounds_of, exact, inputs, relative_error
from kernels.visionzip.tuning import TUNINGS, WIDTHS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LENGTHS = [(4,), (4, 1, 130, 1000, 7), (64, 128, 256), (2047, 1, 2049), (16384, 4)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", ["random", "peaked", "sink"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", WIDTHS)
def test_scores_are_the_exact_ones(
    dim: int, dtype: torch.dtype, kind: str, lengths: tuple[int, ...]
) -> None:
    bounds, scale = bounds_of(lengths), dim**-0.5
    q, k = inputs(kind, bounds[-1], 2, dim, dtype, "cuda")
    sums, lse = exact(q, k, bounds, scale)
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    assert float((log_sum_exp(q, k, cu, scale) - lse).abs().max()) <= 1e-4
    for given in (lse.float(), None):
        got = scores(q, k, cu, scale, given)
        assert relative_error(got, sums.mean(0)) <= 1e-4
        for n, part in zip(lengths, got.split(list(lengths)), strict=True):
            assert float(part.double().sum()) == pytest.approx(n, rel=1e-4)


@pytest.mark.parametrize("name", TUNINGS)
def test_every_tuning_is_exact_repeatable_and_keeps_images_apart(name: str) -> None:
    tuning, bounds, scale = TUNINGS[name], bounds_of((300, 4, 1025, 64)), 72**-0.5
    q, k = inputs("random", bounds[-1], 16, 72, torch.bfloat16, "cuda")
    sums, exact_lse = exact(q, k, bounds, scale)
    lse = exact_lse.float()
    cu = torch.tensor(bounds, device="cuda")
    first = scores(q, k, cu, scale, lse, tuning=tuning)
    assert relative_error(first, sums.mean(0)) <= 1e-4
    for _ in range(10):
        assert torch.equal(scores(q, k, cu, scale, lse, tuning=tuning), first)
    for a, b in pairwise(bounds):
        alone = scores(q[a:b], k[a:b], [0, b - a], scale, lse[:, a:b], tuning=tuning)
        assert torch.equal(alone, first[a:b])
    q[300:304], k[300:304], lse[:, 300:304] = torch.nan, torch.inf, torch.nan
    after = scores(q, k, cu, scale, lse, tuning=tuning)
    assert torch.equal(after[:300], first[:300])
    assert torch.equal(after[304:], first[304:])


def test_views_of_a_fused_projection_give_the_same_bits() -> None:
    bounds, scale = bounds_of((300, 4, 1025)), 80**-0.5
    q, k = inputs("random", bounds[-1], 16, 80, torch.bfloat16, "cuda")
    fused = torch.stack([q, k, q], dim=1)
    assert torch.equal(scores(fused[:, 0], fused[:, 1], bounds, scale), scores(q, k, bounds, scale))


def test_device_bounds_make_no_synchronisation() -> None:
    bounds, scale = bounds_of((300, 4, 1025)), 72**-0.5
    q, k = inputs("random", bounds[-1], 16, 72, torch.bfloat16, "cuda")
    cu = torch.tensor(bounds, device="cuda")
    want = scores(q, k, cu, scale)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = scores(q, k, cu, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


def test_a_captured_graph_replays_the_scores() -> None:
    bounds, scale = bounds_of((300, 4, 1025)), 72**-0.5
    q, k = inputs("random", bounds[-1], 16, 72, torch.bfloat16, "cuda")
    cu = torch.tensor(bounds, device="cuda")
    scores(q, k, cu, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scores(q, k, cu, scale)
    q.mul_(0.5)
    graph.replay()
    assert torch.equal(out, scores(q, k, cu, scale))


def test_memory_grows_with_tokens_and_not_with_their_square() -> None:
    n, heads = 16384, 16
    q, k = inputs("random", n, heads, 72, torch.bfloat16, "cuda")
    cu = torch.tensor([0, n], device="cuda")
    scores(q, k, cu, 72**-0.5)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores(q, k, cu, 72**-0.5)
    assert torch.cuda.max_memory_allocated() - before <= 4 * heads * n * 4


def test_other_types_and_widths_are_computed_without_triton() -> None:
    q, k = inputs("random", 10, 2, 64, torch.bfloat16, "cuda")
    for query, key in ((q.float(), k.float()), (q[..., :40], k[..., :40])):
        assert not runs_triton(query)
        got = scores(query, key, [0, 4, 10], 0.1)
        assert relative_error(got, exact(query, key, [0, 4, 10], 0.1)[0].mean(0)) < 1e-4


def test_a_cu_seqlens_elsewhere_is_refused() -> None:
    q, k = inputs("random", 10, 2, 64, torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match="holds an empty image"):
        scores(q, k, torch.tensor([0, 10, 10]), 0.1)
    device = torch.tensor([0, 10, 10], device="cuda")
    with pytest.raises(ValueError, match=r"host_bounds .* holds an empty image"):
        scores(q, k, device, 0.1, host_bounds=[0, 10, 10])
    with pytest.raises(ValueError, match="2 host_bounds for 3 values"):
        scores(q, k, device, 0.1, host_bounds=[0, 10])
