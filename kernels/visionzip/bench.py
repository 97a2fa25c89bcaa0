"""Times the scoring kernels beside FlashAttention and dense PyTorch on one GPU, and checks them.

    python -m kernels.visionzip.bench --out DIR      # accuracy on a subset, then all times
    python -m kernels.visionzip.bench --check        # accuracy, determinism and borders alone

Contestants take turns, so that a change of clock meets all of them. Before each, a large buffer is
cleared: that empties the L2 cache and gives the host time to queue the launches, so that events time
the GPU alone. The host's share is timed apart. A contestant that fails is named with its error.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from kernels.visionzip.attention import log_sum_exp, scores
from kernels.visionzip.tuning import TUNINGS, WIDTHS, Tuning

# (images, patches of each), heads and head widths that are timed.
CASES = ((30, 1024), (30, 4096), (8, 4096), (1, 16384))
HEADS = 16
HEAD_DIMS = (72, 80)

# Ceilings of one H200: matrix products as a large bfloat16 product reaches them, and exponentials
# as multiprocessors · 16 a clock.
MATRIX_TFLOPS = 790.0
EXPONENTIALS_A_CLOCK = 16
CLOCK_GHZ = 1.75

# Relative error allowed against float64, for scores of at least FLOOR. Lower ones are so far under
# the mean of 1 that float32 exponentials lose them.
TOLERANCE = 1e-4
FLOOR = 1e-30

CHECK_LENGTHS: tuple[tuple[int, ...], ...] = (
    (1,),
    (4,),
    (4, 1, 130, 1000, 7),
    (64, 128, 256),
    (2047, 1, 2049),
    (16384, 4),
)
KINDS = ("random", "peaked", "sink")

Run = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """One contestant in one case; times are in milliseconds, and empty where it did not run."""

    images: int
    patches: int
    head_dim: int
    contestant: str
    median: float | None
    p10: float | None
    p90: float | None
    host: float | None
    repeats: int
    of_forward: float | None
    tflops: float | None
    matrix_share: float | None
    exp_share: float | None
    note: str


@dataclass(frozen=True)
class Forward:
    """An attention forward to compare with, and what it is."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor, int, float, bool], tuple[Tensor, Tensor | None]]


# -- data and truth ------------------------------------------------------------------------------


def bounds_of(lengths: Sequence[int]) -> list[int]:
    """First token of every image, and the total."""
    return [0, *itertools.accumulate(lengths)]


def inputs(
    kind: str, tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Queries and keys: spread out, sharply peaked, or with a few keys that draw everyone."""
    g = torch.Generator(device).manual_seed(seed)
    q = torch.randn(tokens, heads, dim, generator=g, device=device)
    k = torch.randn(tokens, heads, dim, generator=g, device=device)
    if kind == "peaked":
        q, k = 4 * q, 4 * k
    elif kind == "sink":
        q = q + 1
        k[:: max(1, tokens // 2)] = 3
    return q.to(dtype), k.to(dtype)


def exact(
    query: Tensor, key: Tensor, bounds: Sequence[int], scale: float, block: int = 2048
) -> tuple[Tensor, Tensor]:
    """Head-wise column sums and log-sum-exp in float64, a block of queries of a head at a time.

    Returns:
        Two [heads, tokens] float64.
    """
    shape = (query.shape[1], query.shape[0])
    sums = torch.zeros(shape, dtype=torch.float64, device=query.device)
    lse = torch.zeros(shape, dtype=torch.float64, device=query.device)
    for start, end in itertools.pairwise(bounds):
        for head in range(shape[0]):
            keys = key[start:end, head].double().T
            for first in range(start, end, block):
                last = min(first + block, end)
                logits = query[first:last, head].double() @ keys * scale
                lse[head, first:last] = logits.logsumexp(-1)
                sums[head, start:end] += (logits - lse[head, first:last, None]).exp().sum(0)
    return sums, lse


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest relative error; NaN if any value is."""
    return float(((got.double() - want).abs() / want.clamp_min(FLOOR)).max())


# -- contestants ---------------------------------------------------------------------------------


def forwards() -> list[Forward]:
    """The attention forwards that can be had here, the best first."""
    found = []
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func as vllm_forward

        def fa3(
            q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            out = vllm_forward(
                q,
                k,
                v,
                max_seqlen_q=longest,
                cu_seqlens_q=cu,
                max_seqlen_k=longest,
                cu_seqlens_k=cu,
                softmax_scale=scale,
                causal=False,
                return_softmax_lse=lse,
                fa_version=3,
            )
            return (out[0], out[1]) if lse else (out, None)

        found.append(Forward("FlashAttention 3 (vllm.vllm_flash_attn)", fa3))
    except Exception as error:  # a half-installed vLLM may raise anything
        print(f"no vllm.vllm_flash_attn: {_short(error)}")
    try:
        from flash_attn_interface import (  # type: ignore[import-not-found]
            flash_attn_varlen_func as hopper_forward,
        )

        def hopper(
            q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            out = hopper_forward(
                q, k, v, cu, cu, longest, longest, softmax_scale=scale, return_attn_probs=lse
            )
            return (out[0], out[1]) if isinstance(out, tuple) else (out, None)

        found.append(Forward("FlashAttention 3 (flash_attn_interface)", hopper))
    except Exception as error:
        print(f"no flash_attn_interface: {_short(error)}")

    def sdpa(
        q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        # All images have one length here, so that a batch dimension holds them.
        a, b, c = (t.unflatten(0, (-1, longest)).transpose(1, 2) for t in (q, k, v))
        out = torch.ops.aten._scaled_dot_product_flash_attention(a, b, c, scale=scale)
        return out[0], out[1].transpose(0, 1).reshape(q.shape[1], -1) if lse else None

    found.append(Forward("PyTorch's FlashAttention 2 (a fallback, not FlashAttention 3)", sdpa))
    return found


def working_forward() -> Forward:
    """The first forward that runs and whose log-sum-exp is right.

    Raises:
        RuntimeError: none does.
    """
    q, k = inputs("random", 512, 2, 72, torch.bfloat16, "cuda")
    cu = torch.tensor([0, 256, 512], dtype=torch.int32, device="cuda")
    _, want = exact(q, k, [0, 256, 512], 72**-0.5)
    for forward in forwards():
        try:
            _, lse = forward.run(q, k, k, cu, 256, 72**-0.5, True)
            if lse is None or lse.shape != want.shape:
                raise RuntimeError("it gives no log-sum-exp of [heads, tokens]")
            error = float((lse.double() - want).abs().max())
            if error > 1e-4:
                raise RuntimeError(f"its log-sum-exp is wrong by {error:.1e}")
            print(f"forward: {forward.name}; its log-sum-exp is right to {error:.1e}")
            return forward
        except Exception as error:
            print(f"{forward.name} does not serve: {_short(error)}")
    raise RuntimeError("no attention forward runs here")


def dense(query: Tensor, key: Tensor, longest: int, scale: float) -> Tensor:
    """Softmax matrix and column sum in PyTorch, an image at a time."""
    out = []
    for q, k in zip(query.split(longest), key.split(longest), strict=True):
        logits = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * scale
        out.append(torch.softmax(logits, dim=-1, dtype=torch.float32).sum(1).mean(0))
    return torch.cat(out)


def dense_bytes(heads: int, longest: int) -> int:
    """What `dense` holds of one image at its peak: logits twice in 2 bytes, softmax in 4."""
    return heads * longest * longest * 8


# -- times ---------------------------------------------------------------------------------------


def time_all(
    runs: dict[str, Run], repeats: int, flush: Tensor
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """GPU milliseconds of each run, taking turns, and host milliseconds of queueing it."""
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    host: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            before = time.perf_counter()
            run()
            host[name].append((time.perf_counter() - before) * 1e3)
            end.record()
            pairs[name].append((start, end))
        torch.cuda.synchronize()
    times = {name: [a.elapsed_time(b) for a, b in pairs[name]] for name in runs}
    return times, {name: statistics.median(values) for name, values in host.items()}


def bench_case(
    images: int,
    patches: int,
    dim: int,
    forward: Forward,
    tunings: dict[str, Tuning],
    options: argparse.Namespace,
    flush: Tensor,
) -> list[Result]:
    """All contestants in one case; the first image is checked against float64 before."""
    tokens, scale = images * patches, dim**-0.5
    q, k = inputs("random", tokens, HEADS, dim, torch.bfloat16, "cuda")
    v = torch.randn_like(q)
    cu = torch.arange(0, tokens + 1, patches, dtype=torch.int32, device="cuda")
    _, lse = forward.run(q, k, v, cu, patches, scale, True)
    assert lse is not None

    # Two heads of the first image are enough of a check, and float64 is slow.
    few = (q[:patches, :2], k[:patches, :2], [0, patches], scale)
    want = exact(*few)[0].mean(0)
    runs: dict[str, Run] = {
        "forward + lse": lambda: forward.run(q, k, v, cu, patches, scale, True),
        "forward": lambda: forward.run(q, k, v, cu, patches, scale, False),
        "lse pass": lambda: log_sum_exp(q, k, cu, scale),
    }
    notes = {"forward + lse": forward.name, "forward": forward.name}
    refused: dict[str, str] = {}
    need = dense_bytes(HEADS, patches)
    if need <= options.memory_gib * 2**30:
        runs["dense"] = lambda: dense(q, k, patches, scale)
    else:
        refused["dense"] = f"skipped: {need / 2**30:.0f} GiB > {options.memory_gib} GiB"
    for name, tuning in tunings.items():
        label = f"ours: {name}"
        try:
            got = scores(*few, lse[:2, :patches], tuning=tuning)
            error = relative_error(got, want)
            if not error <= TOLERANCE:
                raise RuntimeError(f"relative error {error:.1e}")
            runs[label] = lambda tuning=tuning: scores(q, k, cu, scale, lse, tuning=tuning)  # type: ignore[misc]
            notes[label] = f"relative error {error:.1e}"
        except Exception as error:
            refused[label] = f"failed: {_short(error)}"
    for name in list(runs):
        try:
            for _ in range(options.warmup):
                runs[name]()
            torch.cuda.synchronize()
        except Exception as error:
            refused[name] = f"failed: {_short(error)}"
            del runs[name]
    times, host = time_all(runs, options.repeats, flush)

    base = statistics.median(times["forward + lse"]) if "forward + lse" in times else None
    exponentials = images * HEADS * patches**2
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    exp_ceiling = processors * EXPONENTIALS_A_CLOCK * options.clock_ghz * 1e9
    results = []
    for name in [*runs, *refused]:
        taken = sorted(times.get(name, []))
        if not taken:
            empty = (None,) * 4
            results.append(
                Result(images, patches, dim, name, *empty, 0, *empty, refused.get(name, ""))
            )
            continue
        median = statistics.median(taken)
        # Useful operations: a forward multiplies twice, the others once.
        flops = exponentials * dim * (4 if name.startswith("forward") else 2)
        rate = flops / median / 1e9
        results.append(
            Result(
                images,
                patches,
                dim,
                name,
                median,
                taken[len(taken) // 10],
                taken[-1 - len(taken) // 10],
                host[name],
                len(taken),
                median / base if base else None,
                rate,
                rate / options.matrix_tflops,
                exponentials / (median * 1e-3) / exp_ceiling,
                notes.get(name, ""),
            )
        )
    return results


# -- checks --------------------------------------------------------------------------------------


def check(tunings: dict[str, Tuning], forward: Forward | None) -> bool:
    """Accuracy on all widths, types, kinds and lengths; bits; borders. True if all is well."""
    well = True

    def report(what: str, value: float, limit: float) -> None:
        nonlocal well
        fine = value <= limit
        well = well and fine
        print(f"{'ok  ' if fine else 'FAIL'} {what}: {value:.1e} (at most {limit:.0e})", flush=True)

    for dim, dtype in itertools.product(WIDTHS, (torch.bfloat16, torch.float16)):
        worst = dict.fromkeys(("given", "own", "lse", "sum"), 0.0)
        for lengths, kind in itertools.product(CHECK_LENGTHS, KINDS):
            q, k = inputs(kind, sum(lengths), 2, dim, dtype, "cuda")
            bounds, scale = bounds_of(lengths), dim**-0.5
            sums, lse = exact(q, k, bounds, scale)
            want = sums.mean(0)
            given = scores(q, k, bounds, scale, lse.float())
            own = scores(q, k, bounds, scale)
            # Python's max() would drop a NaN that comes second.
            errors = {
                "given": relative_error(given, want),
                "own": relative_error(own, want),
                "lse": float((log_sum_exp(q, k, bounds, scale).double() - lse).abs().max()),
                "sum": max(
                    abs(float(part.double().sum()) / n - 1)
                    for n, part in zip(lengths, given.split(list(lengths)), strict=True)
                ),
            }
            for name, error in errors.items():
                worst[name] = error if error != error else max(worst[name], error)
        label = f"{dim} {str(dtype).removeprefix('torch.')}"
        report(f"{label}, lse in float32 from float64: relative error", worst["given"], TOLERANCE)
        report(f"{label}, lse pass: relative error", worst["own"], TOLERANCE)
        report(f"{label}, lse pass: log-sum-exp", worst["lse"], TOLERANCE)
        report(f"{label}, an image's sum over its length, less 1", worst["sum"], TOLERANCE)

    lengths = (300, 4, 1025, 64)
    bounds = bounds_of(lengths)
    cu = torch.tensor(bounds, dtype=torch.int64, device="cuda")
    for name, tuning in tunings.items():
        try:
            q, k = inputs("random", bounds[-1], 16, 72, torch.bfloat16, "cuda")
            sums, exact_lse = exact(q, k, bounds, 72**-0.5)
            lse = exact_lse.float()
            first = scores(q, k, cu, 72**-0.5, lse, tuning=tuning)
            report(f"{name}: relative error", relative_error(first, sums.mean(0)), TOLERANCE)
            again = [scores(q, k, cu, 72**-0.5, lse, tuning=tuning) for _ in range(5)]
            report(f"{name}: runs that differ", sum(not torch.equal(first, a) for a in again), 0)
            parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
            alone = [
                scores(q[p], k[p], [0, p.stop - p.start], 72**-0.5, lse[:, p], tuning=tuning)
                for p in parts
            ]
            report(f"{name}: images whose company matters", _differing(first, alone), 0)
            q[parts[1]], k[parts[1]], lse[:, parts[1]] = torch.nan, torch.inf, torch.nan
            changed = scores(q, k, cu, 72**-0.5, lse, tuning=tuning)
            others = [changed[p] for i, p in enumerate(parts) if i != 1]
            kept = torch.cat([first[p] for i, p in enumerate(parts) if i != 1])
            report(f"{name}: images that another's NaN reaches", _differing(kept, others), 0)
        except Exception as error:
            well = False
            print(f"FAIL {name}: {_short(error)}", flush=True)

    if forward is not None:
        for kind in KINDS:
            q, k = inputs(kind, 8192, 4, 72, torch.bfloat16, "cuda")
            cu = torch.tensor([0, 4096, 8192], dtype=torch.int32, device="cuda")
            sums, exact_lse = exact(q, k, [0, 4096, 8192], 72**-0.5)
            _, theirs = forward.run(q, k, k, cu, 4096, 72**-0.5, True)
            assert theirs is not None
            got = scores(q, k, cu, 72**-0.5, theirs)
            report(f"{forward.name}, {kind}", relative_error(got, sums.mean(0)), TOLERANCE)
    return well


def _differing(whole: Tensor, parts: Sequence[Tensor]) -> int:
    """How many parts are not, bit for bit, what the whole has in their place."""
    pieces = whole.split([len(part) for part in parts])
    return sum(not torch.equal(a, b) for a, b in zip(pieces, parts, strict=True))


# -- output --------------------------------------------------------------------------------------


def markdown(results: Sequence[Result], forward: str) -> str:
    """A table of the forward, the dense version, the passes and ours, the fastest of ours first."""
    lines = [
        f"Forward: {forward}. PyTorch {torch.__version__}. Medians in ms; the ratio is to the forward"
        " with log-sum-exp; shares are of the matrix and the exponential ceiling.",
        "",
        "| images × patches, head | what | ms | p10–p90 | host ms | ratio | TFLOP/s | matrix | exp |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def text(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    for r in results:
        case = f"{r.images} × {r.patches}, {r.head_dim}"
        if r.median is None:
            lines.append(f"| {case} | {r.contestant} | {r.note} | | | | | | |")
            continue
        lines.append(
            f"| {case} | {r.contestant} | {r.median:.3f} | {text(r.p10, '.3f')}–{text(r.p90, '.3f')} "
            f"| {text(r.host, '.3f')} | {text(r.of_forward, '.2f')} | {text(r.tflops, '.0f')} "
            f"| {text(r.matrix_share, '.0%')} | {text(r.exp_share, '.0%')} |"
        )
    return "\n".join(lines)


def write(results: Sequence[Result], table: str, out: Path) -> None:
    """`times.csv` and `times.md` in a folder that is made if need be."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "times.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Result)])
        writer.writerows(astuple(result) for result in results)
    (out / "times.md").write_text(table + "\n", encoding="utf-8")


def _order(result: Result) -> tuple[bool, float]:
    """Ours after the others, the fastest first, and what did not run last."""
    ours = result.contestant.startswith("ours")
    if result.median is None:
        return ours, float("inf")
    return ours, result.median if ours else 0.0


def _short(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".replace("|", "/").splitlines()
    return text[0][:200]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all went well, 1 if a check failed, 2 without a GPU or with wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m kernels.visionzip.bench", description=__doc__)
    parser.add_argument("--check", action="store_true", help="check, and time nothing")
    parser.add_argument("--out", type=Path, help="folder for times.csv and times.md")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs each (20 or more)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed runs each")
    parser.add_argument("--tunings", nargs="+", choices=list(TUNINGS), default=list(TUNINGS))
    parser.add_argument("--head-dims", nargs="+", type=int, choices=list(WIDTHS), default=HEAD_DIMS)
    parser.add_argument("--memory-gib", type=float, default=16.0, help="most that dense may take")
    parser.add_argument("--matrix-tflops", type=float, default=MATRIX_TFLOPS)
    parser.add_argument("--clock-ghz", type=float, default=CLOCK_GHZ)
    options = parser.parse_args(arguments)
    if options.repeats < 20:
        parser.error("--repeats must be at least 20")
    if not torch.cuda.is_available():
        print("kernels.visionzip.bench needs an NVIDIA GPU: CUDA is not available", file=sys.stderr)
        return 2

    import triton

    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Triton {triton.__version__}"
    )
    tunings = {name: TUNINGS[name] for name in options.tunings}
    if options.check:
        try:
            forward: Forward | None = working_forward()
        except RuntimeError as error:
            forward = None
            print(error)
        well = check(tunings, forward)
        print("all checks passed" if well else "CHECKS FAILED")
        return 0 if well else 1

    forward = working_forward()
    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    results: list[Result] = []
    table = ""
    for dim, (images, patches) in itertools.product(options.head_dims, CASES):
        case = bench_case(images, patches, dim, forward, tunings, options, flush)
        results += sorted(case, key=_order)
        table = markdown(results, forward.name)
        # Written after every case, so that an interrupted run leaves what it has.
        if options.out is not None:
            write(results, table, options.out)
        best = min(
            (r.median for r in case if r.median and r.contestant.startswith("ours")), default=0
        )
        print(f"{images} × {patches}, {dim}: best of ours {best:.3f} ms", flush=True)
    print(table)
    default = [r for r in results if r.contestant == "ours: default"]
    return 1 if any(r.median is None for r in default) else 0


if __name__ == "__main__":
    sys.exit(main())
