"""The Triton kernels under Triton's interpreter; `test_visionzip_kernel.py` runs this file.

Not collected on its own: Triton decides when a kernel is defined whether it is interpreted, by
TRITON_INTERPRET in the environment, so that these tests need a process that was started with it. No
other test, and no engine, may inherit it.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.visionzip import column_sums
from kernels.visionzip.attention import log_sum_exp as blockwise_log_sum_exp
from kernels.visionzip.bench import exact, relative_error
from kernels.visionzip.column_sums import head_scores, log_sum_exp, mean_heads
from kernels.visionzip.tuning import WIDTHS, Tuning
from tests.kernels.test_visionzip_reference import bounds_of, inputs

torch.set_num_threads(1)

# Small blocks, so that small images have several; 4 and 1 are less than any block.
SMALL = Tuning(block_q=32, block_k=16, warps=2)
LENGTHS = (4, 37, 1, 64)
HEADS = 2


class Case:
    """Inputs, their exact scores by head and their exact log-sum-exp."""

    def __init__(
        self,
        kind: str = "random",
        dim: int = 72,
        dtype: torch.dtype = torch.bfloat16,
        lengths: tuple[int, ...] = LENGTHS,
        heads: int = HEADS,
        seed: int = 0,
    ) -> None:
        self.lengths = lengths
        self.scale = dim**-0.5
        self.bounds = bounds_of(lengths)
        q, k = inputs(kind, sum(lengths), heads, dim, seed)
        self.query, self.key = q.to(dtype), k.to(dtype)
        self.heads, lse = exact(self.query, self.key, self.bounds, self.scale)
        self.lse = lse.float()

    @property
    def cu(self) -> Tensor:
        return torch.tensor(self.bounds, dtype=torch.int32)

    def scored(self, tuning: Tuning = SMALL, **changed: Any) -> Tensor:
        given = {"query": self.query, "key": self.key, "lse": self.lse, "cu_seqlens": self.cu}
        return head_scores(**{**given, **changed}, scale=self.scale, tuning=tuning)


def test_this_process_interprets() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert type(column_sums._head_scores_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", WIDTHS)
def test_scores_are_the_dense_column_sums(dim: int, dtype: torch.dtype) -> None:
    case = Case(dim=dim, dtype=dtype)
    got = case.scored()
    assert got.dtype == torch.float32
    assert relative_error(got, case.heads) <= 1e-4
    assert relative_error(mean_heads(got, HEADS), case.heads.mean(0)) <= 1e-4
    for n, part in zip(case.lengths, mean_heads(got, HEADS).split(case.lengths), strict=True):
        assert float(part.sum()) == pytest.approx(n, rel=1e-5)


@pytest.mark.parametrize("kind", ["peaked", "sink", "flat"])
@pytest.mark.parametrize("dim", [72, 80])
def test_peaks_and_sinks_are_as_exact(kind: str, dim: int) -> None:
    case = Case(kind, dim)
    assert relative_error(case.scored(), case.heads) <= 1e-4


@pytest.mark.parametrize("lengths", [(1,), (4,), (16,), (32, 32), (33, 15), (100,)], ids=str)
def test_blocks_may_end_anywhere(lengths: tuple[int, ...]) -> None:
    case = Case(lengths=lengths)
    assert relative_error(case.scored(), case.heads) <= 1e-4


@pytest.mark.parametrize(
    "changed",
    [
        {"fold": False},
        {"peel": False},
        {"polynomial": 2},
        {"polynomial": 4},
        {"descriptor": True},
        {"descriptor": True, "peel": False},
        {"persistent": 5},
        {"heads_first": True},
        {"block_q": 64},
        {"warps": 1, "block_q": 64},
        {"block_q": 64, "block_k": 128, "warps": 4},
    ],
    ids=str,
)
def test_every_way_to_cut_the_work_gives_the_scores(changed: dict[str, Any]) -> None:
    tuning = Tuning(**{"block_q": 32, "block_k": 16, "warps": 2, **changed})
    for kind in ("random", "peaked"):
        case = Case(kind)
        assert relative_error(case.scored(tuning), case.heads) <= 1e-4


def test_many_images_find_their_blocks() -> None:
    """More images than the kernel that numbers them reads at once."""
    lengths = (*(1 + i % 3 for i in range(130)), 20)
    case = Case(lengths=lengths, heads=1, dim=64)
    for heads_first in (False, True):
        tuning = Tuning(block_q=32, block_k=16, warps=2, heads_first=heads_first)
        assert relative_error(case.scored(tuning), case.heads) <= 1e-4


@pytest.mark.parametrize("descriptor", [False, True])
def test_no_score_crosses_an_image_border(descriptor: bool) -> None:
    tuning = Tuning(block_q=32, block_k=16, warps=2, descriptor=descriptor)
    case = Case()
    before = case.scored(tuning)
    for i, (a, b) in enumerate(pairwise(case.bounds)):
        q, k, lse = case.query.clone(), case.key.clone(), case.lse.clone()
        q[a:b], k[a:b], lse[:, a:b] = torch.nan, torch.inf, torch.nan
        after = case.scored(tuning, query=q, key=k, lse=lse)
        for j, (c, d) in enumerate(pairwise(case.bounds)):
            assert torch.equal(after[:, c:d], before[:, c:d]) == (i != j)


def test_the_same_input_gives_the_same_bits_in_any_company() -> None:
    case = Case()
    whole = case.scored()
    assert torch.equal(case.scored(), whole)
    for a, b in pairwise(case.bounds):
        alone = case.scored(
            query=case.query[a:b],
            key=case.key[a:b],
            lse=case.lse[:, a:b],
            cu_seqlens=torch.tensor([0, b - a]),
        )
        assert torch.equal(alone, whole[:, a:b])


def test_shards_of_heads_gathered_give_the_same_bits_and_summed_the_same_scores() -> None:
    case = Case(heads=4)
    whole = case.scored()
    shards = [
        case.scored(query=case.query[:, h], key=case.key[:, h], lse=case.lse[h])
        for h in (slice(0, 2), slice(2, 4))
    ]
    assert torch.equal(torch.cat(shards), whole)
    mean = mean_heads(whole, 4)
    assert torch.equal(mean_heads(torch.cat(shards), 4), mean)
    added = mean_heads(shards[0], 4) + mean_heads(shards[1], 4)
    torch.testing.assert_close(added, mean, rtol=1e-6, atol=0)


def test_views_of_a_fused_projection_need_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    want = case.scored()
    tokens = case.query.shape[0]
    fused = torch.full((tokens, 3, HEADS, 72), torch.nan, dtype=torch.bfloat16)
    fused[:, 0], fused[:, 1] = case.query, case.key
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("copied"))
    assert torch.equal(case.scored(query=fused[:, 0], key=fused[:, 1]), want)
    by_head = torch.stack([case.query.transpose(0, 1), case.key.transpose(0, 1)])
    assert torch.equal(
        case.scored(query=by_head[0].transpose(0, 1), key=by_head[1].transpose(0, 1)), want
    )


def test_rows_off_the_16_byte_grid_are_copied() -> None:
    case = Case()
    want = case.scored()
    wide = torch.full((case.query.shape[0], HEADS, 75), torch.nan, dtype=torch.bfloat16)
    wide[:, :, 1:73] = case.query
    assert torch.equal(case.scored(query=wide[:, :, 1:73]), want)
    backwards = case.key.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(case.scored(key=backwards), want)
    assert torch.equal(case.scored(lse=case.lse.T.contiguous().T), want)


def test_bounds_on_the_device_never_lead_out_of_the_tensors() -> None:
    """They are not read on the host; whatever they say, only the scores may suffer."""
    case = Case(lengths=(4, 37, 1), heads=1)
    tokens = case.query.shape[0]
    for bounds in ([0, 9, 9, tokens], [0, 30, 20, tokens], [-7, 40, 3 * tokens], [0, 2**33]):
        case.scored(cu_seqlens=torch.tensor(bounds))
    # An empty image among others takes nothing from them.
    got = case.scored(cu_seqlens=torch.tensor([*case.bounds[:2], *case.bounds[1:]]))
    assert torch.equal(got, case.scored())


@pytest.mark.parametrize("dim", WIDTHS)
def test_the_lse_pass_is_exact(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_sums, "LSE_BLOCK_Q", 16)
    monkeypatch.setattr(column_sums, "LSE_BLOCK_K", 32)
    for kind, dtype in (("random", torch.bfloat16), ("peaked", torch.float16)):
        case = Case(kind, dim, dtype, lengths=(4, 37, 1), heads=1)
        got = log_sum_exp(case.query, case.key, case.cu, case.scale)
        torch.testing.assert_close(got, case.lse, rtol=1e-6, atol=1e-5)
        in_torch = blockwise_log_sum_exp(case.query, case.key, case.bounds, case.scale, block=10)
        torch.testing.assert_close(got, in_torch, rtol=1e-6, atol=1e-5)
        assert relative_error(case.scored(lse=got), case.heads) <= 1e-4


def test_the_lse_pass_keeps_images_apart() -> None:
    case = Case()
    before = log_sum_exp(case.query, case.key, case.cu, case.scale)
    q, k = case.query.clone(), case.key.clone()
    q[4:41], k[4:41] = torch.nan, torch.inf
    after = log_sum_exp(q, k, case.cu, case.scale)
    assert torch.equal(after[:, :4], before[:, :4])
    assert torch.equal(after[:, 41:], before[:, 41:])
    assert bool(after[:, 4:41].isnan().all())
