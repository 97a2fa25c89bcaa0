"""CUDA kernels from source, at run time: compiled by NVRTC, kept on disk, loaded, launched.

Users need no CUDA toolkit: NVRTC and the bindings come with PyTorch's CUDA wheels, and in other
environments with the wheels ``nvidia-cuda-nvrtc`` and ``cuda-bindings``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class CompileError(RuntimeError):
    """A kernel could not be compiled or loaded; the message names the cause and, if known, the cure."""


def compile_source(source: str, name: str, arch: str, defines: Sequence[str]) -> bytes:
    """The machine code (a cubin) of CUDA source for one architecture.

    Args:
        source: CUDA C++.
        name: of the source, in messages.
        arch: such as ``sm_90``.
        defines: such as ``EXPERTS=128``.

    Raises:
        CompileError: NVRTC is missing, or does not take the source; its log is in the message.
    """
    nvrtc = _bindings("nvrtc")
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{d}" for d in defines)]
    program = _value(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    encoded = [o.encode() for o in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_value(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        said = bytes(log).decode(errors="replace").strip("\0\n ")
        raise CompileError(f"NVRTC could not compile {name} for {arch} ({status.name}):\n{said}")
    code = bytearray(_value(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/pruneroute/kernels``, or ``~/.cache/pruneroute/kernels``."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "pruneroute" / "kernels"


def cached_code(source: str, name: str, arch: str, defines: Sequence[str]) -> bytes:
    """As `compile_source`, from the disk if it was compiled before by the same NVRTC.

    A cache that cannot be written costs the second of compiling anew, nothing else.
    """
    nvrtc = _bindings("nvrtc")
    _, *version = nvrtc.nvrtcVersion()
    key = hashlib.sha256(repr((source, arch, tuple(defines), version)).encode()).hexdigest()[:24]
    file = cache_folder() / f"{Path(name).stem}-{arch}-{key}.cubin"
    with contextlib.suppress(OSError):
        return file.read_bytes()
    code = compile_source(source, name, arch, defines)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as draft:
            draft.write(code)
        Path(draft.name).replace(file)
    return code


Argument = torch.Tensor | int | float


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        function: the driver's handle.
        threads: of a block.
        overlaps: whether it may be launched while the kernel before it runs; it waits for its
            results itself (``griddepcontrol.wait``). From sm_90 on.
    """

    function: Any
    threads: int
    overlaps: bool = False

    def __call__(self, arguments: Sequence[Argument], blocks: int = 1) -> None:
        """Launch on PyTorch's current stream; capturable, never synchronises.

        Args:
            arguments: tensors, passed by address, and numbers, passed as 32 bits.
            blocks: how many.
        """
        driver = _bindings("driver")
        values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.hStream = torch.cuda.current_stream().cuda_stream
        if self.overlaps:
            config.attrs, config.numAttrs = [_overlap()], 1
        (status,) = driver.cuLaunchKernelEx(
            config, self.function, (values, tuple(map(_c_type, arguments))), 0
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuLaunchKernelEx: {status.name}")


@functools.cache
def _overlap() -> Any:
    """The attribute of a launch that need not wait for the end of the one before."""
    driver = _bindings("driver")
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute


def _c_type(argument: Argument) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_int


def load(code: bytes, name: str, threads: int, overlaps: bool = False) -> Kernel:
    """The kernel called `name` in machine code, in PyTorch's context on the current device; see `Kernel`.

    Raises:
        CompileError: the driver does not take it.
    """
    driver = _bindings("driver")
    torch.cuda.current_stream().synchronize()  # so that there is a context
    status, module = driver.cuModuleLoadData(code)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CompileError(
            f"the driver does not load {name} ({status.name}); it may be older than NVRTC: update it"
        )
    function = _value(driver, driver.cuModuleGetFunction(module, name.encode()))
    return Kernel(function, threads, overlaps)


@functools.cache
def _bindings(name: str) -> Any:
    try:
        import importlib

        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise CompileError(
            f"cuda.bindings.{name} is missing ({error}); pip install cuda-bindings nvidia-cuda-nvrtc, of "
            f"the major version of torch.version.cuda ({torch.version.cuda})"
        ) from error


def _value(module: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise CompileError(f"{module.__name__}: {status.name}")
    return values[0]
