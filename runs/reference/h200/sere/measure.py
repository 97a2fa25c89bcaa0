r"""What re-routing does to TPOT on a model of a real size, with random weights.

    python runs/reference/h200/sere/measure.py --out DIR
    python runs/reference/h200/sere/measure.py --out DIR --tiny     # on a CPU, to try this

Two engines share a GPU, one with the plugin and one without, each in a process of its own; this one tells
them whose turn it is. In every round a batch of requests is prefilled and then decodes: for some steps
under each arm, in an order drawn anew; the engine without the plugin prefills as many tokens as the other
one has when its turn comes. Steps are scheduled ahead, as vLLM does by itself; the time of one is from the
return of the step before to its own, and nothing waits for the GPU in between: the TPOT of a saturated
server at that batch size, without HTTP.

Weights are vLLM's dummy ones. A router of such weights uses all experts alike, which no trained one does;
its rows are scaled by exp(s z), z normal and the same for all layers, with s chosen so that a batch of
128 picks about as many experts as published for Qwen3-30B-A3B (93 of 128). Tokens are sampled at
temperature 1 from nearly flat logits, so that the rows of a batch differ.

Writes ``steps.csv`` (a row a timed step), ``tpot.md``, ``moe.json`` (a layer's experts alone, against how
many are active) and ``versions.json``; after every batch size, so that an interrupted run leaves what it
has.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.pocket.recipe import Recipe, generation_config, model_config
from harness.pocket.tokenizer import tokenizer_config, tokenizer_json

QWEN3_30B = {  # Qwen3-30B-A3B's published configuration
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNK = 4096
"""Tokens of a step."""
SPARE = 12
"""Tokens beyond those that are asked for: steps that prefill in chunks, or are scheduled ahead."""
SETTLE = 4
"""Steps after a change of arm that are not timed: nothing is scheduled ahead at first."""
PUBLISHED_AT_128 = 93
BARE = "no plugin"
ARMS: dict[str, dict[str, Any]] = {
    "off": {"policy": "off"},
    "top-2": {"policy": "topk", "primary_experts": 2},
    "SERE K=2 rho=0": {"policy": "sere", "primary_experts": 2, "rho": 0.0},
    "SERE K=2 rho=0.5": {"policy": "sere", "primary_experts": 2, "rho": 0.5},
    "SERE K=1 rho=0": {"policy": "sere", "primary_experts": 1, "rho": 0.0},
    "SERE K=1 rho=0.5": {"policy": "sere", "primary_experts": 1, "rho": 0.5},
    "SERE K=2 rho=0, 16 protected": {
        "policy": "sere",
        "primary_experts": 2,
        "rho": 0.0,
        "guard": 1,
    },
    "OEA K=2": {"policy": "oea", "primary_experts": 2},
    "XShare K=1, budget 40": {"policy": "xshare", "primary_experts": 1, "budget": 40},
    "Lynx, budget 40": {"policy": "lynx", "primary_experts": 1, "budget": 40},
}


def write_model(folder: Path, layers: int, tiny: bool) -> None:
    """A checkpoint folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(QWEN3_30B) | {"num_hidden_layers": layers}
    if tiny:
        text = model_config(Recipe())["text_config"]
        config |= {k: text[k] for k in QWEN3_30B if k in text and k != "model_type"}
        config["num_hidden_layers"] = text["num_hidden_layers"]
    documents = {
        "config.json": config,
        "generation_config.json": generation_config(),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(4096),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


# -- an engine in a process of its own --------------------------------------------------------------


class Child:
    """One engine; takes a line of JSON for each command and answers with one."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import torch
        from vllm import LLM

        self.torch, self.tiny = torch, args.tiny
        more: dict[str, Any] = {"gpu_memory_utilization": 0.2 if args.tiny else args.memory}
        if args.child == "plugin":
            more["worker_extension_cls"] = "harness.engine.plugin.worker.LeverWorker"
        self.llm = LLM(
            str(args.out / "model"),
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=CHUNK,
            enable_prefix_caching=False,
            enforce_eager=args.tiny,
            seed=0,
            **more,
        )
        self.engine = self.llm.llm_engine
        self.model = self.llm.apply_model(lambda m: m)[0]
        self.gates = [m for n, m in self.model.named_modules() if n.endswith("mlp.gate")]
        self.plain = [g.weight.detach().clone() for g in self.gates]
        self.lever = None
        if args.child == "plugin":
            from harness.engine.plugin.routing import LEVER

            self.lever = LEVER

    def skew(self, amount: float) -> None:
        """Scale the routers' rows, from what they were."""
        torch = self.torch
        z = torch.randn(len(self.plain[0]), generator=torch.Generator().manual_seed(0))
        for gate, plain in zip(self.gates, self.plain, strict=True):
            if not plain.numel():  # packed away, as on a CPU
                continue
            factor = (amount * z).exp().to(plain.device)[:, None]
            gate.weight.data.copy_(plain * factor)

    def matrices(self) -> None:
        """Similarities of which the best of some thirty is about a half; a random 16 guarded apart."""
        torch, lever = self.torch, self.lever
        g = torch.Generator().manual_seed(1)
        n, e = len(lever.layers), lever.experts
        similarity = 0.52 * torch.rand(n, e, e, generator=g)
        similarity.diagonal(dim1=1, dim2=2).fill_(1)
        guarded = torch.rand(n, e, generator=g).argsort(1) < 16
        self.similarity, self.guarded = similarity, guarded
        lever.set_matrices(similarity, None)

    def begin(self, batch: int, tokens: int, prompt: int = 16) -> None:
        """Prefill a batch of requests that decode for `tokens` steps or so."""
        from vllm import SamplingParams

        rng = random.Random(batch)
        words = self.llm.get_tokenizer().vocab_size
        for i in range(batch):
            ids = [rng.randrange(10, words) for _ in range(prompt)]
            params = SamplingParams(
                temperature=1.0, max_tokens=tokens + SPARE, ignore_eos=True, seed=i, detokenize=False
            )
            self.engine.add_request(f"{batch}-{i}", {"prompt_token_ids": ids}, params)
        for _ in range(2 + batch * prompt // CHUNK):
            self.engine.step()
        self._wait()

    def arm(self, name: str) -> None:
        """Set the lever."""
        if self.lever is None:
            return
        from harness.engine.plugin.setting import RoutingSetting

        setting = dict(ARMS[name])
        guarded = self.guarded if setting.pop("guard", 0) else None
        self.lever.set_matrices(self.similarity, guarded)
        rho = setting.pop("rho", 0.0)
        self.lever.set(RoutingSetting(similarity_threshold=rho, **setting))

    def steps(self, count: int) -> list[float]:
        """Times of so many decode steps [ms]; none is on its way when they are told."""
        found = []
        start = time.perf_counter()
        for _ in range(count):
            self.engine.step()
            end = time.perf_counter()
            found.append(1000 * (end - start))
            start = end
        self._wait()
        return found

    def _wait(self) -> None:
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def drain(self) -> tuple[float, float]:
        """Mean distinct experts of a layer before and after, since the last call."""
        if self.lever is None:
            return 0.0, 0.0
        _, counts, _ = self.lever.log.drain()
        return float(counts[..., 0].mean()), float(counts[..., 1].mean())

    def finish(self) -> None:
        """Abort what is left of a batch."""
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def moe(self) -> list[dict[str, Any]]:
        """A layer's experts alone, against how many of them are active."""
        torch = self.torch
        from vllm.model_executor.layers.fused_moe import fused_experts

        g = torch.Generator("cuda").manual_seed(0)
        e, k, hidden, inner = 128, 8, 2048, 768
        w1 = torch.randn(e, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) / 50
        w2 = torch.randn(e, hidden, inner, device="cuda", dtype=torch.bfloat16) / 50
        rows = []
        for tokens in (16, 128, 4096):
            x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
            weights = torch.full((tokens, k), 1 / k, device="cuda")
            for active in (8, 16, 24, 32, 48, 64, 96, 128):
                if active > tokens * k:
                    continue
                # Every active expert at least once.
                scores = torch.rand(tokens, active, generator=g, device="cuda")
                ids = scores.topk(k, dim=1).indices.int()
                times = []
                for _ in range(25):
                    clear = torch.zeros(1 << 27, dtype=torch.uint8, device="cuda")
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda._sleep(4_000_000)  # for the host to queue all that follows
                    start.record()
                    fused_experts(x, w1, w2, weights, ids)
                    end.record()
                    end.synchronize()
                    times.append(1000 * start.elapsed_time(end))
                    del clear
                used = len(ids.unique())
                rows.append({"tokens": tokens, "active": used, "us": statistics.median(times[5:])})
        return rows

    def serve(self) -> None:
        """Commands until there are none."""
        print(json.dumps({"ready": True}), file=self.answers, flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            answer = getattr(self, name)(*arguments)
            print(json.dumps(answer), file=self.answers, flush=True)

    # vLLM prints to standard output; answers go out by the descriptor that it had at the start.
    answers = os.fdopen(os.dup(1), "w")


class Engine:
    """The other end of a `Child`."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--child", kind, "--out", str(args.out), "--memory",
                   str(args.memory), *(["--tiny"] if args.tiny else [])]  # fmt: skip
        environment = dict(os.environ)
        if args.tiny:
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["VLLM_PLUGINS"] = "pruneroute" if kind == "plugin" else "lora_hf_hub_resolver"
        log = (args.out / f"{kind}.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )  # fmt: skip
        self._answer()

    def __call__(self, name: str, *arguments: Any) -> Any:
        """What the child's method of that name gives."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue  # something else that vLLM prints
        raise RuntimeError(f"an engine ended; see the log in the folder ({self._process.wait()})")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


# -- measuring ---------------------------------------------------------------------------------------


def find_skew(engines: Sequence[Engine], wanted: float, batch: int) -> float:
    """By how much routers' rows have to differ for a batch to pick so many experts."""
    low, high = 0.0, 3.0
    for _ in range(6):
        middle = (low + high) / 2
        for engine in engines:
            engine("skew", middle)
        engines[0]("begin", batch, 12)
        engines[0]("arm", "off")
        engines[0]("drain")
        engines[0]("steps", 4)
        before, _ = engines[0]("drain")
        engines[0]("finish")
        print(f"skew {middle:.2f}: {before:.1f} experts", file=sys.stderr, flush=True)
        low, high = (middle, high) if before > wanted else (low, middle)
    return middle


def measure(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Rows of timed steps, so far, after every batch size."""
    plugin = Engine("plugin", args)
    bare = Engine("bare", args)
    plugin("begin", 1, 4)
    plugin("finish")
    plugin("matrices")
    rows: list[dict[str, Any]] = []
    try:
        skew = args.skew or find_skew([plugin, bare], PUBLISHED_AT_128, max(BATCHES))
        plugin("skew", skew)
        bare("skew", skew)
        if not args.tiny:
            (args.out / "moe.json").write_text(json.dumps(bare("moe")) + "\n")
        order = random.Random(0)
        names = [*ARMS, BARE]
        turn_steps = SETTLE + args.steps
        for batch in args.batches:
            for turn in range(args.rounds):
                order.shuffle(names)
                plugin("begin", batch, turn_steps * len(ARMS))
                bare("begin", batch, turn_steps, 16 + turn_steps * names.index(BARE))
                for name in names:
                    engine = bare if name == BARE else plugin
                    if name != BARE:
                        engine("arm", name)
                    engine("drain")
                    times = engine("steps", turn_steps)[SETTLE:]
                    before, after = engine("drain")
                    rows += [
                        {
                            "batch": batch, "round": turn, "arm": name, "step": i, "ms": t,
                            "experts_before": before, "experts_after": after, "skew": skew,
                        }
                        for i, t in enumerate(times)
                    ]  # fmt: skip
                plugin("finish")
                bare("finish")
            yield rows
            print(f"batch {batch}", file=sys.stderr, flush=True)
    finally:
        plugin.close()
        bare.close()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line an arm and batch size, compared round by round with "off"."""
    lines = [
        "| batch | arm | experts before | after | TPOT p50 [ms] | p90 | ratio to off |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch in dict.fromkeys(r["batch"] for r in rows):
        own = [r for r in rows if r["batch"] == batch]
        by = {
            name: {
                t: statistics.median(r["ms"] for r in own if (r["arm"], r["round"]) == (name, t))
                for t in {r["round"] for r in own if r["arm"] == name}
            }
            for name in [*ARMS, BARE]
        }
        for name, medians in by.items():
            mine = [r for r in own if r["arm"] == name]
            times = sorted(r["ms"] for r in mine)
            ratio = statistics.median(m / by["off"][t] for t, m in medians.items())
            before, after = (
                statistics.mean(r[c] for r in mine) for c in ("experts_before", "experts_after")
            )
            seen = f"{before:.1f} | {after:.1f}" if name != BARE else "– | –"
            p90 = times[int(0.9 * len(times))]
            lines.append(
                f"| {batch} | {name} | {seen} | {statistics.median(times):.3f} | {p90:.3f} | "
                f"{ratio:.4f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure and write; gives the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8, help="timed, of an arm in a round")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--skew", type=float, help="s, where it is known; found first otherwise")
    parser.add_argument("--memory", type=float, default=0.47, help="share of the GPU for each")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", choices=("plugin", "bare"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        os.dup2(2, 1)
        Child(args).serve()
        return 0
    if args.tiny:
        args.skew = 1.0
    args.out.mkdir(parents=True, exist_ok=True)
    write_model(args.out / "model", args.layers, args.tiny)
    for rows in measure(args):
        with (args.out / "steps.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        (args.out / "tpot.md").write_text(table(rows))
    print((args.out / "tpot.md").read_text())
    import importlib.metadata as metadata

    names = {d.metadata["Name"] for d in metadata.distributions()}
    wanted = names & {"vllm", "vllm-cpu", "torch", "triton", "transformers", "cuda-bindings"}
    versions = {n: metadata.version(n) for n in sorted(wanted)} | {"command": sys.argv}
    (args.out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
