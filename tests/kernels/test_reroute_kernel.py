"""The CUDA kernel: its arithmetic run on a CPU, compiled for a GPU, and the operator around it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.sere import fused, nvrtc, reference, rivals
from kernels.sere.reference import DECODE, PADDING, PREFILL

HERE = Path(__file__).parent
LAYERS, STEPS = 3, 5
SOURCE = fused.SOURCE.read_text(encoding="utf-8")


def case(
    rows: int, slots: int, experts: int, seed: int, dtype: torch.dtype = torch.int32
) -> dict[str, Tensor]:
    """Routes with ties, empty slots and rows of every kind, and matrices to move them by."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts, generator=g).argsort(1)[:, :slots].to(dtype).contiguous()
    # Sums of such weights are exact, in any order; ties are common in every third.
    weights = (torch.rand(rows, slots, generator=g) * 4096).ceil() / 4096
    if seed % 3 == 0:
        weights = (weights * 4).ceil() / 4
    ids[torch.rand(rows, slots, generator=g) < 0.05] = -1
    ids[torch.rand(rows, slots, generator=g) < 0.02] = experts + 3
    kinds = torch.randint(0, 3, (rows,), generator=g).to(torch.uint8)
    if seed % 4:
        kinds.fill_(DECODE if seed % 4 < 3 else PREFILL)
    similarity = torch.rand(LAYERS, experts, experts, generator=g)
    if seed % 2:
        similarity = (similarity * 3).round() / 3 - 0.5  # ties, negative and zero
    protection = (torch.rand(LAYERS, experts, generator=g) < 0.1).to(torch.uint8)
    return {
        "ids": ids,
        "weights": weights,
        "row_kind": kinds,
        "similarity": similarity,
        "protection": protection,
        "logits": 3 * torch.randn(rows, experts, generator=g),
        "bias": torch.rand(experts, generator=g) * (seed % 2),
    }


def state(
    policy: str, primary: int, renormalize: bool, threshold: float, budget: int = 6
) -> dict[str, Tensor]:
    numbers = [fused.POLICIES.index(policy), primary, renormalize, budget, 77]
    return {
        "settings": torch.tensor(numbers, dtype=torch.int32),
        "threshold": torch.tensor([0.9, threshold, 0.1]),
        "counters": torch.zeros(STEPS, LAYERS, 3, dtype=torch.int32),
        "step": torch.tensor([2]),
        "calls": torch.zeros(LAYERS, dtype=torch.int64),
    }


def inputs(given: dict[str, Tensor], set_to: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the operator takes of both."""
    similarity, protection = given["similarity"], given["protection"]
    near = {
        "neighbours": fused.neighbours(similarity),
        "reach": fused.reach(similarity, set_to["threshold"], protection),
    }
    left_out = ("similarity", "protection", "threshold")
    return near | {k: v for k, v in (given | set_to).items() if k not in left_out}


def wanted(
    given: dict[str, Tensor], set_to: dict[str, Tensor], sigmoid: bool
) -> tuple[Tensor, Tensor]:
    """By the reference, layer 1."""
    number, primary, renormalize, budget, seed = set_to["settings"].tolist()
    ids, weights, kinds = given["ids"], given["weights"], given["row_kind"]
    policy, experts = fused.POLICIES[number], given["similarity"].shape[-1]
    if policy == "topk" and primary < ids.shape[1]:
        return reference.topk(ids, weights, kinds, primary, bool(renormalize))
    if policy == "sere":
        protected, similarity = given["protection"][1].bool(), given["similarity"][1]
        moved = reference.sere(
            ids, weights, kinds, similarity, protected, primary, set_to["threshold"][1]
        )
        return moved, weights
    if policy == "random_remap":
        return rivals.random_remap(ids, weights, kinds, primary, seed, experts)
    scores = given["logits"].sigmoid() if sigmoid else given["logits"].softmax(1)
    choice = (scores if sigmoid else given["logits"]) + given["bias"]
    if policy == "oea":
        return rivals.oea(ids, weights, kinds, scores, choice, primary)
    if policy == "xshare" and primary < ids.shape[1]:
        return rivals.xshare(ids, weights, kinds, scores, choice, primary, budget)
    if policy == "lynx" and primary < ids.shape[1]:
        return rivals.lynx(ids, weights, kinds, scores, choice, primary, budget)
    return ids, weights


def counted(given: dict[str, Tensor], new_ids: Tensor) -> list[int]:
    decode = (given["row_kind"] == DECODE).unsqueeze(1)
    experts = given["similarity"].shape[-1]
    sets = [reference.expert_set(i, decode, experts) for i in (given["ids"], new_ids)]
    return [*(int(s.sum()) for s in sets), int((new_ids != given["ids"]).sum())]


Emulated = Callable[[dict[str, Tensor], dict[str, Tensor]], tuple[Tensor, Tensor]]
Build = Callable[[int, int, int, torch.dtype, bool], Emulated]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The kernel as a function of the CPU, for so many experts, slots and threads."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("reroute")

    def build(
        experts: int, slots: int, threads: int, dtype: torch.dtype, sigmoid: bool
    ) -> Emulated:
        library = folder / f"{experts}-{slots}-{threads}-{dtype}.so"
        said = fused.defines(experts, slots, threads, dtype, torch.float32, sigmoid)
        defines = [f"-D{d}" for d in said]
        subprocess.run(
            [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", *defines,
             "-I", str(HERE), "-I", str(fused.SOURCE.parent), "-o", str(library),
             str(HERE / "reroute_on_cpu.cpp")],
            check=True,
        )  # fmt: skip
        run = ctypes.CDLL(str(library)).run

        def call(given: dict[str, Tensor], set_to: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            ids, weights = torch.empty_like(given["ids"]), torch.empty_like(given["weights"])
            of = inputs(given, set_to)
            tensors = (
                of["ids"], of["weights"], of["row_kind"], of["neighbours"][1], of["reach"][1],
                of["settings"], ids, weights, of["counters"], of["step"], of["calls"], of["logits"],
                of["bias"],
            )  # fmt: skip
            run(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), len(ids), 1, LAYERS)
            return ids, weights

        return call

    return build


@pytest.mark.parametrize(
    ("experts", "slots", "threads", "dtype", "sigmoid"),
    [
        (32, 8, 64, torch.int32, False),
        (60, 6, 96, torch.int64, True),
        (128, 8, 64, torch.int32, False),
        (16, 1, 32, torch.int32, True),
        (320, 10, 64, torch.int32, True),
    ],
)
def test_the_kernel_computes_what_the_reference_does(
    emulated: Build, experts: int, slots: int, threads: int, dtype: torch.dtype, sigmoid: bool
) -> None:
    kernel = emulated(experts, slots, threads, dtype, sigmoid)
    moved = dict.fromkeys(fused.POLICIES, 0)
    for seed in range(16):
        given = case(1 + 5 * seed % 37, slots, experts, seed, dtype)
        for policy in fused.POLICIES:
            threshold = (0.0, 0.3, 0.5, 1.0)[seed // 2 % 4]
            budget = (0, 3, experts // 4, experts)[seed % 4]
            set_to = state(policy, 1 + seed % slots, bool(seed % 2), threshold, budget)
            ids, weights = kernel(given, set_to)
            want_ids, want_weights = wanted(given, set_to, sigmoid)
            assert torch.equal(ids, want_ids), (seed, policy)
            torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)
            if policy not in ("topk", *fused.RESELECTING):
                assert torch.equal(weights, want_weights)
            assert set_to["counters"][2, 1].tolist() == counted(given, want_ids), (seed, policy)
            assert set_to["counters"].count_nonzero() <= 3
            assert set_to["calls"].tolist() == [0, 1, 0]
            moved[policy] += int((ids != given["ids"]).sum())
    assert moved.pop("off") == 0
    assert min(moved.values()) > 20 or slots == 1


def test_neighbours_are_in_order_and_end_where_similarity_does() -> None:
    similarity = torch.tensor([[[1.0, 0.5, 0.5], [-0.5, 1.0, 0.0], [0.25, 0.75, 1.0]]])
    near = fused.neighbours(similarity)
    assert near.shape == (1, 3, 32)
    # Lanes of eight: numbers 0, 8, ... of the order, then 1, 9, ...
    assert near[0, :, [0, 4, 8]].tolist() == [[0, 1, 2], [1, 2, 0], [2, 1, 0]]
    protected = torch.tensor([[0, 1, 0]])
    for rho, reach in ((0.5, [3, 0, 2]), (0.6, [1, 0, 2]), (-1.0, [3, 0, 3]), (2.0, [0, 0, 0])):
        assert fused.reach(similarity, torch.tensor([rho]), protected)[0].tolist() == reach


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_it_compiles_without_a_gpu(arch: str) -> None:
    for experts, slots, logits in (
        (128, 8, torch.bfloat16),
        (60, 4, torch.float32),
        (512, 10, torch.float16),
    ):
        defines = fused.defines(experts, slots, 1024, torch.int32, logits)
        code = nvrtc.compile_source(SOURCE, "reroute.cu", arch, defines)
        assert code[:4] == b"\x7fELF"
        assert b"reroute" in code


def test_what_the_compiler_says_is_passed_on() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"(?s)reroute.cu for sm_90.*NO_SUCH_TYPE"):
        nvrtc.compile_source(
            SOURCE,
            "reroute.cu",
            "sm_90",
            ["EXPERTS=8", "SLOTS=2", "THREADS=32", "ID_TYPE=NO_SUCH_TYPE", "LOGITS=0", "SIGMOID=0"],
        )


def test_compiled_code_is_kept_and_damage_to_the_cache_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    defines = fused.defines(8, 2, 32)
    code = nvrtc.cached_code(SOURCE, "reroute.cu", "sm_90", defines)
    (file,) = (tmp_path / "pruneroute" / "kernels").iterdir()
    assert file.read_bytes() == code
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled anew"))
    assert nvrtc.cached_code(SOURCE, "reroute.cu", "sm_90", defines) == code
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # where no folder can be made
    assert nvrtc.cached_code(SOURCE, "reroute.cu", "sm_90", defines) == code


@pytest.mark.parametrize("policy", fused.POLICIES)
def test_the_operator_on_a_cpu_is_the_reference(policy: str) -> None:
    for seed in range(12):
        given = case(9, 4, 16, seed, (torch.int32, torch.int64)[seed % 2])
        set_to = state(policy, 2, True, 0.3)
        ids, weights = fused.reroute(**inputs(given, set_to), layer=1, sigmoid=bool(seed % 3))
        want_ids, want_weights = wanted(given, set_to, bool(seed % 3))
        assert torch.equal(ids, want_ids)
        assert torch.equal(weights, want_weights)
        assert ids.dtype == given["ids"].dtype
        assert set_to["counters"][2, 1].tolist() == counted(given, want_ids)


def test_the_operator_is_registered_as_it_behaves() -> None:
    given, set_to = case(9, 4, 16, 1), state("sere", 2, True, 0.3)
    torch.library.opcheck(
        torch.ops.pruneroute.reroute.default,
        (),
        {**inputs(given, set_to), "layer": 1, "sigmoid": False},
    )


def test_more_kinds_than_rows_are_fine_and_fewer_are_not() -> None:
    given, set_to = case(9, 4, 16, 1), state("sere", 2, True, 0.3)
    want = fused.reroute(**inputs(given, set_to), layer=1, sigmoid=False)
    longer = given | {"row_kind": torch.cat([given["row_kind"], torch.full((4,), PADDING).byte()])}
    got = fused.reroute(**inputs(longer, set_to), layer=1, sigmoid=False)
    assert torch.equal(got[0], want[0])
    with pytest.raises(ValueError, match="row_kind"):
        fewer = given | {"row_kind": given["row_kind"][:8]}
        fused.reroute(**inputs(fewer, set_to), layer=1, sigmoid=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weights": torch.rand(9, 3)}, "must both be"),
        ({"weights": torch.rand(9, 4).bfloat16()}, "takes float32"),
        ({"ids": torch.zeros(9, 4, dtype=torch.int16)}, "takes int32 or int64"),
        ({"neighbours": torch.zeros(LAYERS, 16, 16, dtype=torch.int16)}, "neighbours"),
        ({"neighbours": torch.zeros(LAYERS, 16, 32)}, "neighbours"),
        ({"neighbours": torch.zeros(LAYERS, 16, dtype=torch.int16)}, "neighbours"),
        ({"reach": torch.zeros(LAYERS, 16)}, "reach"),
        ({"settings": torch.zeros(4, dtype=torch.int32)}, "settings"),
        ({"counters": torch.zeros(5, 3, LAYERS + 1, dtype=torch.int32)}, "counters"),
        ({"counters": torch.zeros(5, 3, LAYERS, dtype=torch.int32).mT}, "counters"),
        ({"step": torch.zeros(1)}, "step"),
        ({"calls": torch.zeros(1, dtype=torch.int64)}, "calls"),
        ({"bias": torch.zeros(15)}, "bias"),
        ({"row_kind": torch.zeros(9)}, "row_kind"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, Tensor], match: str) -> None:
    given = inputs(case(9, 4, 16, 1), state("sere", 2, True, 0.3))
    with pytest.raises(ValueError, match=match):
        fused.reroute(**given | change, layer=1, sigmoid=False)
    with pytest.raises(ValueError, match="layer 3 is none of 3"):
        fused.reroute(**given, layer=3, sigmoid=False)


def test_models_beyond_the_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="17 of them a row: at most 512 and 16"):
        given = inputs(case(2, 17, 32, 1), state("off", 1, True, 0.0))
        fused.reroute(**given, layer=0, sigmoid=False)
