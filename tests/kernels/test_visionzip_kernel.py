"""The scoring kernels as far as they go without a GPU, and the dispatch between them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.visionzip import bench
from kernels.visionzip.attention import check_triton, log_sum_exp, scores
from kernels.visionzip.bench import exact, relative_error
from kernels.visionzip.reference import attention_received
from kernels.visionzip.tuning import DEFAULT, TUNINGS, WIDTHS, Tuning
from tests.kernels.test_visionzip_reference import bounds_of, dense, inputs

ROOT = Path(__file__).parents[2]
INTERPRETED = Path(__file__).with_name("interpreted_visionzip_kernel.py")
LENGTHS = (4, 37, 1, 64)


@pytest.mark.slow
def test_under_tritons_interpreter() -> None:
    """One process for all of them: it has to start with the variable that makes Triton interpret."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout


# -- what the compiler makes of the kernels --------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "descriptor", "polynomial_4", "persistent"])
def test_the_kernel_compiles_for_hopper_without_atomics(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dims = WIDTHS if name == "default" else (72,)
    for dim in dims:
        ptx = compiled(TUNINGS[name], dim, monkeypatch, tmp_path)
        assert "wgmma" in ptx
        assert "ex2.approx.ftz.f32" in ptx
        # Memory is written by the column sums' stores alone.
        assert not re.search(r"\s(atom|red)\.", ptx)
        # Rows travel 16 bytes at a time, though 72 · 2 bytes are no power of two.
        assert name == "descriptor" or "cp.async.cg.shared.global" in ptx


def compiled(tuning: Tuning, dim: int, monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    """PTX of the kernel for a GPU of compute capability 9.0, which need not be there."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.visionzip.column_sums import _head_scores_kernel as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    first, rest = WIDTHS[dim]
    constants: dict[str, Any] = {
        "DIM": dim,
        "FIRST": first,
        "REST": rest,
        "BLOCK_Q": tuning.block_q,
        "BLOCK_K": tuning.block_k,
        "ROWS": 16 * tuning.warps,
        "STAGES": tuning.stages,
        "FOLD": tuning.fold,
        "PEEL": tuning.peel,
        "POLYNOMIAL": tuning.polynomial,
        "DESCRIPTOR": tuning.descriptor,
        "HEADS_FIRST": tuning.heads_first,
        "PERSISTENT": tuning.persistent > 0,
    }
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {"query": "*bf16", "key": "*bf16", "lse": "*fp32", "out": "*fp32", "table": "*i32"}
    types["factor"] = "fp32"
    for i, width in ((1, first), (2, rest)):
        if tuning.descriptor and width:
            types[f"descriptor_{i}"] = f"tensordesc<bf16[{tuning.block_q},1,{width}]>"
        else:
            constants[f"descriptor_{i}"] = None
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in ("query", "key", "table")
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={
            "num_warps": tuning.warps,
            "maxnreg": tuning.registers or None,
            "enable_fp_fusion": True,
        },
    )
    return str(made.asm["ptx"])


# -- the dispatch --------------------------------------------------------------------------------


def case(dtype: torch.dtype = torch.float32, heads: int = 4) -> tuple[Tensor, Tensor]:
    q, k = inputs("random", sum(LENGTHS), heads, 72, seed=1)
    return q.to(dtype), k.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_gpu_scores_are_the_references(dtype: torch.dtype) -> None:
    q, k = case(dtype)
    bounds = bounds_of(LENGTHS)
    want = attention_received(q, k, bounds, 0.1)
    lse = log_sum_exp(q, k, bounds, 0.1)
    for given in (bounds, torch.tensor(bounds), torch.tensor(bounds, dtype=torch.int32)):
        assert torch.equal(scores(q, k, given, 0.1), want)
        assert torch.equal(scores(q, k, given, 0.1, lse, host_bounds=bounds), want)


def test_shards_of_heads_add_up() -> None:
    q, k = case()
    bounds = bounds_of(LENGTHS)
    parts = [scores(q[:, h], k[:, h], bounds, 0.1, total_heads=4) for h in ([0], [1, 2, 3])]
    torch.testing.assert_close(parts[0] + parts[1], scores(q, k, bounds, 0.1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["random", "peaked", "sink"])
@pytest.mark.parametrize("block", [10, 1024])
def test_log_sum_exp_is_the_exact_one(kind: str, block: int) -> None:
    q, k = (t.bfloat16() for t in inputs(kind, sum(LENGTHS), 3, 80, seed=2))
    bounds = bounds_of(LENGTHS)
    got = log_sum_exp(q, k, torch.tensor(bounds), 80**-0.5, block=block)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact(q, k, bounds, 80**-0.5)[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1, 30, 100, 1000])
def test_float32_holds_a_log_sum_exp_well_enough(size: int) -> None:
    """Rounding it moves a score by as much, relatively, as it moves the log-sum-exp."""
    values = torch.linspace(-size, size, 10001, dtype=torch.float64)
    off = torch.expm1(values.float().double() - values).abs().max()
    assert off <= 3.1e-5
    assert size > 127 or off <= 4e-6


def test_the_exact_scores_are_the_dense_ones() -> None:
    q, k = case()
    got, lse = exact(q, k, bounds_of(LENGTHS), 0.1, block=10)
    torch.testing.assert_close(got.mean(0), dense(q, k, LENGTHS, 0.1), rtol=1e-12, atol=0)
    last = torch.einsum("qhd,khd->hqk", q[-64:].double(), k[-64:].double()) * 0.1
    torch.testing.assert_close(lse[:, -64:], last.logsumexp(-1), rtol=1e-12, atol=0)


def test_an_error_that_is_no_number_stays_one() -> None:
    want = torch.ones(3, dtype=torch.float64)
    assert relative_error(torch.tensor([1.0, 1.5, 1.0]), want) == 0.5
    assert not relative_error(torch.tensor([1.0, torch.nan, 1.0]), want) <= 1e9


# -- what is refused -------------------------------------------------------------------------------

GOOD = torch.zeros(10, 2, 64)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"key": torch.zeros(10, 2, 32)}, r"\[tokens, heads, head_dim\]"),
        ({"query": torch.zeros(10, 128), "key": torch.zeros(10, 128)}, "tokens, heads, head_dim"),
        ({"key": GOOD.bfloat16()}, "one floating-point type"),
        ({"query": GOOD.long(), "key": GOOD.long()}, "one floating-point type"),
        ({"key": GOOD.to("meta")}, "query is on cpu and key on meta"),
        ({"scale": 0.0}, "scale 0.0 is not a positive number"),
        ({"scale": -1.0}, "scale -1.0"),
        ({"scale": float("nan")}, "scale nan"),
        ({"cu_seqlens": torch.tensor([[0, 10]])}, "cu_seqlens torch.int64 .* must be"),
        ({"cu_seqlens": torch.tensor([0.0, 10.0])}, "cu_seqlens torch.float32 .* must be"),
        ({"cu_seqlens": []}, "holds no image"),
        ({"cu_seqlens": [0]}, "holds no image"),
        ({"cu_seqlens": torch.tensor([0])}, "holds no image"),
        ({"cu_seqlens": [1, 10]}, "must run from 0 to 10 tokens"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "must run from 0 to 10 tokens"),
        ({"cu_seqlens": [0, 5, 5, 10]}, "holds an empty image"),
        ({"cu_seqlens": torch.tensor([0, 7, 3, 10])}, "holds an empty image"),
        ({"host_bounds": [0, 4, 10]}, "are not cu_seqlens"),
    ],
    ids=str,
)
def test_both_passes_refuse(changed: dict[str, Any], match: str) -> None:
    given = {"query": GOOD, "key": GOOD, "cu_seqlens": [0, 10], "scale": 0.1, **changed}
    with pytest.raises(ValueError, match=match):
        scores(**given)
    with pytest.raises(ValueError, match=match):
        log_sum_exp(**given)


@pytest.mark.parametrize(
    "lse",
    [torch.zeros(10, 2), torch.zeros(2, 10).double(), torch.zeros(2, 10, device="meta")],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)} {t.device}",
)
def test_a_wrong_lse_is_refused(lse: Tensor) -> None:
    with pytest.raises(ValueError, match=r"lse .* must be float32 \[heads, tokens\] = \(2, 10\)"):
        scores(GOOD, GOOD, [0, 10], 0.1, lse)


def test_fewer_heads_in_all_than_given_are_refused() -> None:
    with pytest.raises(ValueError, match="total_heads 1 is less than the 2 heads"):
        scores(GOOD, GOOD, [0, 10], 0.1, total_heads=1)


def test_the_gpu_kernels_refuse_other_types_and_widths() -> None:
    with pytest.raises(ValueError, match=r"torch.float32 must be bfloat16 or float16"):
        check_triton(GOOD)
    with pytest.raises(ValueError, match=r"head_dim 48 is none of \[64, 72, 80, 96, 128\]"):
        check_triton(torch.zeros(10, 2, 48, dtype=torch.bfloat16))
    check_triton(GOOD.bfloat16())


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"warps": 3}, "warps 3"),
        ({"block_q": 48}, "block_q 48"),
        ({"block_q": 32, "warps": 4}, "block_q 32"),
        ({"block_k": 8}, "block_k 8"),
        ({"block_k": 96}, "block_k 96"),
        ({"stages": 0}, "stages 0"),
        ({"polynomial": 3}, "polynomial 3"),
        ({"persistent": -1}, "persistent -1"),
        ({"registers": 16}, "registers 16"),
        ({"registers": 256}, "registers 256"),
    ],
    ids=str,
)
def test_impossible_tunings_are_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Tuning(**changed)


def test_tunings_are_distinct_and_include_the_default() -> None:
    assert TUNINGS["default"] == DEFAULT
    assert len(set(TUNINGS.values())) == len(TUNINGS)


# -- the benchmark ---------------------------------------------------------------------------------


def test_the_benchmark_says_that_it_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in ([], ["--check"]):
        assert bench.main(arguments) == 2
        assert "needs an NVIDIA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--repeats", "3"])


def test_dense_is_the_reference() -> None:
    q, k = case()
    torch.testing.assert_close(
        bench.dense(q[:74], k[:74], 37, 0.1), attention_received(q[:74], k[:74], [0, 37, 74], 0.1)
    )


def test_results_are_written_with_what_failed(tmp_path: Path) -> None:
    done = bench.Result(
        30, 1024, 72, "ours: default", 0.2, 0.19, 0.21, 0.05, 30, 0.4, 362.0, 0.46, 0.68, "fine"
    )
    none = (None,) * 4
    failed = bench.Result(1, 16384, 72, "dense", *none, 0, *none, "skipped: 32 GiB > 16 GiB")
    table = bench.markdown([done, failed], "FlashAttention 3")
    bench.write([done, failed], table, tmp_path / "new")
    assert "| 30 × 1024, 72 | ours: default | 0.200 | 0.190–0.210 | 0.050 | 0.40 " in table
    assert "| 1 × 16384, 72 | dense | skipped: 32 GiB > 16 GiB |" in table
    assert (tmp_path / "new" / "times.md").read_text(encoding="utf-8") == table + "\n"
    rows = (tmp_path / "new" / "times.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0].startswith("images,patches,head_dim,contestant,median")
    assert rows[2] == "1,16384,72,dense,,,,,0,,,,,skipped: 32 GiB > 16 GiB"
