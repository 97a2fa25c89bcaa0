"""Times the re-routing kernel beside PyTorch and plain CUDA in captured graphs on one GPU, and checks it.

    python -m kernels.sere.bench --out DIR      # a check, then times
    python -m kernels.sere.bench --check        # the check alone

A graph holds the layers of a model, each with its own matrices, one after another as in a decode step;
contestants take turns, so that a change of clock meets all of them. Given is a layer's share of the graph.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from kernels.sere import fused, nvrtc, reference

LAYERS = 48
ROWS = (1, 4, 16, 64, 128, 256)
MODELS = ((128, 8), (64, 8), (256, 8), (512, 10))
"""Experts, and those of a token, that are timed."""
PRIMARY = 2
THRESHOLD = 0.3


@dataclass(frozen=True)
class Result:
    """One contestant in one case; microseconds a layer, empty where it did not run."""

    experts: int
    slots: int
    rows: int
    contestant: str
    us: float | None
    p10_us: float | None
    p90_us: float | None
    remark: str = ""


@dataclass(frozen=True)
class Model:
    """What the operator takes for a model of `LAYERS` layers, on the GPU; see `fused.reroute`."""

    neighbours: Tensor
    reach: Tensor
    settings: Tensor
    counters: Tensor
    step: Tensor
    calls: Tensor
    bias: Tensor

    @classmethod
    def random(cls, experts: int, policy: str, threshold: float) -> Model:
        """Random similarities; a sixteenth of the experts protected."""
        g = torch.Generator("cuda").manual_seed(0)
        numbers = [fused.POLICIES.index(policy), PRIMARY, 1, experts // 4, 7]
        similarity = random_similarity(experts)
        protection = torch.rand(LAYERS, experts, generator=g, device="cuda") < 1 / 16
        limits = torch.full((LAYERS,), threshold, device="cuda")
        return cls(
            fused.neighbours(similarity),
            fused.reach(similarity, limits, protection),
            torch.tensor(numbers, dtype=torch.int32, device="cuda"),
            torch.zeros(8, LAYERS, 3, dtype=torch.int32, device="cuda"),
            torch.zeros(1, dtype=torch.int64, device="cuda"),
            torch.zeros(LAYERS, dtype=torch.int64, device="cuda"),
            torch.zeros(experts, device="cuda"),
        )

    def reroute(
        self, ids: Tensor, weights: Tensor, logits: Tensor, kinds: Tensor, layer: int
    ) -> tuple[Tensor, Tensor]:
        """`fused.reroute` of one layer, of a softmax router."""
        return fused.reroute(
            ids, weights, kinds, self.neighbours, self.reach, self.settings, self.counters, self.step,
            self.calls, logits, self.bias, layer, False,
        )  # fmt: skip


def random_similarity(experts: int) -> Tensor:
    """[layers, E, E] float32 on the GPU, uniform in [0, 1)."""
    g = torch.Generator("cuda").manual_seed(1)
    return torch.rand(LAYERS, experts, experts, generator=g, device="cuda")


def routes(rows: int, experts: int, slots: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [rows, slots] int32, some experts favoured; weights, heaviest first; logits [rows, E]."""
    g = torch.Generator("cuda").manual_seed(seed)
    favour = torch.randn(experts, generator=g, device="cuda")
    logits = torch.randn(rows, experts, generator=g, device="cuda") + favour
    weights, ids = logits.softmax(1).topk(slots, dim=1)
    return ids.to(torch.int32), weights / weights.sum(1, keepdim=True), logits.bfloat16()


def by_steps(
    model: Model, similarity: Tensor, ids: Tensor, weights: Tensor, kinds: Tensor, layer: int
) -> Tensor:
    """SERE and its counters by separate PyTorch operations, nothing protected."""
    nothing = torch.zeros(similarity.shape[-1], dtype=torch.bool, device=ids.device)
    new = reference.sere(
        ids, weights, kinds, similarity[layer], nothing, model.settings[1], THRESHOLD
    )
    decode = (kinds == reference.DECODE).unsqueeze(1)
    experts = similarity.shape[-1]
    counts = [reference.expert_set(i, decode, experts).sum() for i in (ids, new)]
    values = torch.stack([*counts, (new != ids).sum()]).to(torch.int32)
    model.counters[:, layer].index_copy_(0, model.step, values.unsqueeze(0))
    return new


class Plain:
    """SERE by three launches, see `plain.cu`; without counters, protection or ranking of slots."""

    def __init__(self, experts: int, slots: int) -> None:
        source = fused.SOURCE.with_name("plain.cu").read_text(encoding="utf-8")
        major, minor = torch.cuda.get_device_capability()
        defines = fused.defines(experts, slots, 256)
        code = nvrtc.compile_source(source, "plain.cu", f"sm_{major}{minor}", defines)
        self.clear, self.mark, self.move, self.nothing = (
            nvrtc.load(code, name, 512 if name == "clear" else 256)
            for name in ("clear", "mark", "move", "nothing")
        )
        self.reads = torch.zeros(experts, dtype=torch.int32, device="cuda")
        self.slots = slots

    def __call__(self, ids: Tensor, similarity: Tensor, threshold: float) -> None:
        """In place."""
        rows, most = len(ids), 256
        self.clear((self.reads,))
        self.mark((ids, self.reads, rows, PRIMARY), -(-rows * PRIMARY // most))
        blocks = -(-rows * (self.slots - PRIMARY) // most)
        self.move((ids, self.reads, similarity, rows, PRIMARY, threshold), blocks)


def captured(run: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run(layer)` for all layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(LAYERS):
            run(layer)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            run(layer)
    return graph


def time_all(
    graphs: dict[str, torch.cuda.CUDAGraph], repeats: int
) -> dict[str, tuple[float, float, float]]:
    """Median, tenth and ninetieth percentile [µs a layer] of each graph; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        for _ in range(3):
            graph.replay()
    for _ in range(repeats):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # time for the host to queue all that follows
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(1000 * start.elapsed_time(end) / LAYERS)
    out = {}
    for name, times in found.items():
        deciles = statistics.quantiles(times, n=10)
        out[name] = (statistics.median(times), deciles[0], deciles[-1])
    return out


def bench_case(experts: int, slots: int, rows: int, repeats: int) -> list[Result]:
    """All contestants on one model at one batch size."""
    given = [routes(rows, experts, slots, seed) for seed in range(LAYERS)]
    kinds = torch.full((rows,), reference.DECODE, dtype=torch.uint8, device="cuda")
    plain = Plain(experts, slots)
    in_place = [ids.clone() for ids, *_ in given]
    models = {p: Model.random(experts, p, THRESHOLD) for p in fused.POLICIES}
    sere = models["sere"]
    similarity = random_similarity(experts)
    runs: dict[str, Callable[[int], object]] = {
        "an empty kernel": lambda _: plain.nothing(()),
        "PyTorch, step by step": lambda i: by_steps(sere, similarity, *given[i][:2], kinds, i),
        "plain CUDA, three launches": lambda i: plain(in_place[i], similarity[i], THRESHOLD),
        **{
            f"ours: {p}": lambda i, m=m: m.reroute(*given[i], kinds, i)  # type: ignore[misc]
            for p, m in models.items()
        },
    }
    graphs, remarks = {}, {}
    for name, run in runs.items():
        try:
            graphs[name] = captured(run)
        except (RuntimeError, nvrtc.CompileError) as error:
            remarks[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    times = time_all(graphs, repeats)
    results = []
    for name in runs:
        median, low, high = times.get(name, (None, None, None))
        remark = remarks.get(name, "")
        results.append(Result(experts, slots, rows, name, median, low, high, remark))
    return results


def varied(rows: int, experts: int, slots: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Routes in no order, some slots empty, and rows of all kinds: ids, weights, logits, kinds."""
    ids, weights, logits = routes(rows, experts, slots, seed)
    g = torch.Generator("cuda").manual_seed(seed)
    shuffle = torch.rand(ids.shape, generator=g, device="cuda").argsort(1)
    ids = ids.gather(1, shuffle)
    # Sums of such weights are exact, in any order.
    weights = (weights.gather(1, shuffle) * 4096).ceil() / 4096
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g, device="cuda") < 0.02, -1)
    kinds = torch.randint(0, 3, (rows,), generator=g, device="cuda").to(torch.uint8)
    return ids, weights, logits, kinds


def differences(
    model: Model, ids: Tensor, weights: Tensor, logits: Tensor, kinds: Tensor, layer: int = 5
) -> list[str]:
    """How the kernel's answer differs from that of the operator on a CPU, which is the reference."""
    got = [*model.reroute(ids, weights, logits, kinds, layer), model.counters[0, layer]]
    there = Model(*(getattr(model, f.name).cpu() for f in fields(Model)))
    here = there.reroute(ids.cpu(), weights.cpu(), logits.cpu(), kinds.cpu(), layer)
    want = [*here, there.counters[0, layer]]
    found = []
    if not torch.equal(got[0].cpu(), want[0]):
        found.append(f"{int((got[0].cpu() != want[0]).sum())} ids")
    if not torch.allclose(got[1].cpu(), want[1], rtol=1e-4, atol=1e-7):
        found.append(f"weights by {float((got[1].cpu() - want[1]).abs().max()):.1e}")
    if got[2].tolist() != want[2].tolist():
        found.append(f"counters {got[2].tolist()}, not {want[2].tolist()}")
    return found


def check() -> list[str]:
    """What differs from the reference, eager and replayed from a graph; nothing if all is well."""
    wrong = []
    for experts, slots in (*MODELS, (60, 4), (16, 1), (96, 6)):
        for seed, rows in enumerate((1, 3, 16, 128, 129, 1000, 8192)):
            given = varied(rows, experts, slots, seed)
            for policy in fused.POLICIES:
                model = Model.random(experts, policy, 0.9 if seed % 2 else 0.0)
                case = f"{experts} experts, {slots} slots, {rows} rows, {policy}"
                wrong += [f"{case}: {w}" for w in differences(model, *given)]
    return wrong


def table(results: Sequence[Result]) -> str:
    """Markdown: a line a contestant and model, a column a batch size, microseconds a layer."""
    lines = []
    for experts, slots in dict.fromkeys((r.experts, r.slots) for r in results):
        own = [r for r in results if (r.experts, r.slots) == (experts, slots)]
        rows = list(dict.fromkeys(r.rows for r in own))
        lines += [
            f"| {experts} experts, {slots} of them a row; µs a layer | "
            + " | ".join(f"T={r}" for r in rows)
            + " |",
            "|---" * (len(rows) + 1) + "|",
        ]
        for name in dict.fromkeys(r.contestant for r in own):
            cells = [r for r in own if r.contestant == name]
            shown = [f"{r.us:.2f}" if r.us is not None else r.remark for r in cells]
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
        lines.append("")
    return "\n".join(lines)


def write(results: Sequence[Result], out: Path) -> None:
    """`times.csv` and `times.md` in a folder that is made if need be."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "times.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Result)])
        writer.writerows(astuple(result) for result in results)
    (out / "times.md").write_text(table(results), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, and time unless told otherwise; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.sere.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for times.csv and times.md")
    parser.add_argument("--check", action="store_true", help="only compare with the reference")
    parser.add_argument("--repeats", type=int, default=50, help="of each graph (50)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: needs an NVIDIA GPU; none is here", file=sys.stderr)
        return 2
    if options.repeats < 10:
        parser.error(f"--repeats {options.repeats}: takes a whole number of at least 10")
    wrong = check()
    print("\n".join(wrong) or "the kernel gives what the reference gives")
    if wrong or options.check:
        return int(bool(wrong))
    results: list[Result] = []
    for experts, slots in MODELS:
        for rows in ROWS:
            results += bench_case(experts, slots, rows, options.repeats)
            if options.out is not None:
                write(results, options.out)
            print(f"{experts} experts, {rows} rows", file=sys.stderr, flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
