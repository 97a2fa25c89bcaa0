"""Expert re-routing of a layer as one operator: one CUDA launch on a GPU, the reference elsewhere.

`torch.ops.pruneroute.reroute` is registered with its shapes, so that it works under `torch.compile`, and
reads every setting from device memory, so that a captured graph follows changes of them.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from kernels.sere import nvrtc, reference, rivals

POLICIES = ("off", "topk", "sere", "random_remap", "oea", "xshare", "lynx")
"""By number, as `settings` has it."""
BUDGETED = ("xshare", "lynx")
"""Those whose set of experts has a size."""
RESELECTING = ("oea", "xshare", "lynx")
"""Those that choose by the router's own scores."""
SETTINGS = ("policy", "primary_experts", "renormalize", "budget", "seed")
"""What each of the numbers in `settings` is."""
MAX_EXPERTS = 512
MAX_SLOTS = 16
SOURCE = Path(__file__).with_name("reroute.cu")
_ID_TYPES = {torch.int32: "int", torch.int64: "long long"}
LOGIT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Of a router's logits, by number, as the source has them."""

_library = torch.library.Library("pruneroute", "FRAGMENT")
_library.define(
    "reroute(Tensor ids, Tensor weights, Tensor row_kind, Tensor similarity, Tensor protection, "
    "Tensor settings, Tensor threshold, Tensor(a!) counters, Tensor step, Tensor(b!) calls, Tensor logits, "
    "Tensor bias, int layer, bool sigmoid) -> (Tensor, Tensor)"
)


def reroute(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    similarity: Tensor,
    protection: Tensor,
    settings: Tensor,
    threshold: Tensor,
    counters: Tensor,
    step: Tensor,
    calls: Tensor,
    logits: Tensor,
    bias: Tensor,
    layer: int,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """A layer's routes of a step under the current settings; see `reference` and `rivals`.

    Args:
        ids: [rows, slots] int32 or int64, logical experts; others than 0 … E - 1 are passed through.
        weights: [rows, slots] float32, of the slots in any order.
        row_kind: [at least rows] uint8: `reference.PADDING`, `PREFILL` or `DECODE`.
        similarity: [layers, E, E] float32 without NaN.
        protection: [layers, E] uint8, 1 where an expert is not moved away from.
        settings: [5] int32, as `SETTINGS`; at primary_experts >= slots nothing moves.
        threshold: [layers] float32, rho.
        counters: [steps, layers, 3] int32; the running step's row gets the distinct experts of decode
            rows before and after, and how many slots have moved.
        step: [1] int64, the row of `counters`.
        calls: [layers] int64; the layer's is raised by one.
        logits: [rows, E] float32, bfloat16 or float16, the router's; only `RESELECTING` policies read
            them.
        bias: [E] float32, added to scores (to logits, under a softmax) for ranking experts.
        layer: which layer this is.
        sigmoid: whether scores are sigmoids of the logits, not their softmax.

    Returns:
        ids and weights, new tensors of the given shapes and types.

    Raises:
        ValueError: a shape, type or device is not as above.
        kernels.sere.nvrtc.CompileError: on a GPU, if the kernel cannot be made for it.
    """
    found: tuple[Tensor, Tensor] = torch.ops.pruneroute.reroute(
        ids, weights, row_kind, similarity, protection, settings, threshold, counters, step, calls,
        logits, bias, layer, sigmoid,
    )  # fmt: skip
    return found


def check(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    similarity: Tensor,
    protection: Tensor,
    logits: Tensor,
    bias: Tensor,
    layer: int,
) -> None:
    """Raises ValueError for what `reroute` does not take."""
    layers, experts = similarity.shape[0], similarity.shape[-1]
    if ids.dim() != 2 or ids.shape != weights.shape:
        raise ValueError(
            f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} must both be [rows, slots]"
        )
    if ids.dtype not in _ID_TYPES:
        raise ValueError(f"ids are {ids.dtype}; takes int32 or int64")
    if weights.dtype != torch.float32:
        raise ValueError(f"weights are {weights.dtype}; takes float32")
    if similarity.shape != (layers, experts, experts) or similarity.dtype != torch.float32:
        raise ValueError(
            f"similarity {similarity.dtype} {tuple(similarity.shape)} must be float32 [layers, E, E]"
        )
    if protection.shape != (layers, experts) or protection.dtype != torch.uint8:
        raise ValueError(
            f"protection {protection.dtype} {tuple(protection.shape)} must be uint8 "
            f"{(layers, experts)}"
        )
    if row_kind.dtype != torch.uint8 or row_kind.dim() != 1 or len(row_kind) < len(ids):
        raise ValueError(
            f"row_kind {row_kind.dtype} {tuple(row_kind.shape)} must be uint8 of at least {len(ids)}"
        )
    if experts > MAX_EXPERTS or not 1 <= ids.shape[1] <= MAX_SLOTS:
        raise ValueError(
            f"{experts} experts, {ids.shape[1]} of them a row: at most {MAX_EXPERTS} and {MAX_SLOTS}"
        )
    if logits.shape != (len(ids), experts) or logits.dtype not in LOGIT_TYPES:
        raise ValueError(
            f"logits {logits.dtype} {tuple(logits.shape)} must be float [rows, E], {len(ids), experts}"
        )
    if bias.shape != (experts,) or bias.dtype != torch.float32:
        raise ValueError(f"bias {bias.dtype} {tuple(bias.shape)} must be float32 [E]")
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is none of {layers}")


@functools.cache
def kernel(
    experts: int,
    slots: int,
    id_type: torch.dtype,
    logit_type: torch.dtype,
    sigmoid: bool,
    device: int,
) -> nvrtc.Kernel:
    """The kernel for one model on one GPU, compiled (about half a second) or from the cache.

    Raises:
        kernels.sere.nvrtc.CompileError: it cannot be had; says why.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise nvrtc.CompileError(
            f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}) lacks warp-wide reductions; "
            "takes a GPU from sm_80 on"
        )
    threads = threads_for(experts)
    code = nvrtc.cached_code(
        SOURCE.read_text(encoding="utf-8"),
        SOURCE.name,
        f"sm_{major}{minor}",
        defines(experts, slots, threads, id_type, logit_type, sigmoid),
    )
    return nvrtc.load(code, "reroute", threads)


def threads_for(experts: int) -> int:
    """Threads of the block: a warp for each four experts or so, and for 128 rows of 8 a thread a slot."""
    return 1024 if experts > 64 else 512


def defines(
    experts: int,
    slots: int,
    threads: int,
    id_type: torch.dtype = torch.int32,
    logit_type: torch.dtype = torch.float32,
    sigmoid: bool = False,
) -> list[str]:
    """What the source takes from the command line."""
    return [
        f"EXPERTS={experts}",
        f"SLOTS={slots}",
        f"THREADS={threads}",
        f"ID_TYPE={_ID_TYPES[id_type]}",
        f"LOGITS={LOGIT_TYPES[logit_type]}",
        f"SIGMOID={int(sigmoid)}",
    ]


def _on_gpu(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    similarity: Tensor,
    protection: Tensor,
    settings: Tensor,
    threshold: Tensor,
    counters: Tensor,
    step: Tensor,
    calls: Tensor,
    logits: Tensor,
    bias: Tensor,
    layer: int,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    check(ids, weights, row_kind, similarity, protection, logits, bias, layer)
    ids, weights, logits = ids.contiguous(), weights.contiguous(), logits.contiguous()
    rows, slots = ids.shape
    out_ids, out_weights = torch.empty_like(ids), torch.empty_like(weights)
    launch = kernel(similarity.shape[-1], slots, ids.dtype, logits.dtype, sigmoid, ids.get_device())
    launch(
        (ids, weights, row_kind, similarity[layer], protection[layer], settings, threshold[layer],
         out_ids, out_weights, counters, step, calls, logits, bias, rows, layer, similarity.shape[0])
    )  # fmt: skip
    return out_ids, out_weights


def _by_reference(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    similarity: Tensor,
    protection: Tensor,
    settings: Tensor,
    threshold: Tensor,
    counters: Tensor,
    step: Tensor,
    calls: Tensor,
    logits: Tensor,
    bias: Tensor,
    layer: int,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    check(ids, weights, row_kind, similarity, protection, logits, bias, layer)
    number, primary, renormalize, budget, seed = settings.tolist()
    policy, kind = POLICIES[number], row_kind[: len(ids)]
    if primary >= ids.shape[1]:
        policy = "off"
    new_ids, new_weights = ids.clone(), weights.clone()
    if policy == "topk":
        new_ids, new_weights = reference.topk(ids, weights, kind, primary, bool(renormalize))
    elif policy == "sere":
        new_ids = reference.sere(
            ids, weights, kind, similarity[layer], protection[layer].bool(), primary, threshold[layer]
        )  # fmt: skip
    elif policy == "random_remap":
        new_ids, _ = rivals.random_remap(ids, weights, kind, primary, seed, similarity.shape[-1])
    elif policy in RESELECTING:
        scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(1)
        choice = (scores if sigmoid else logits.float()) + bias
        routes = (ids, weights, kind, scores, choice)
        if policy == "oea":
            new_ids, new_weights = rivals.oea(*routes, primary)
        elif policy == "xshare":
            new_ids, new_weights = rivals.xshare(*routes, primary, budget)
        else:
            new_ids, new_weights = rivals.lynx(*routes, primary, budget)
    decode = (kind == reference.DECODE).unsqueeze(1)
    experts = similarity.shape[-1]
    counts = [reference.expert_set(i, decode, experts).sum() for i in (ids, new_ids)]
    counters[step, layer] = torch.stack([*counts, (new_ids != ids).sum()]).to(counters.dtype)
    calls[layer] += 1
    return new_ids, new_weights


def _shapes(ids: Tensor, weights: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(weights)


_library.impl("reroute", _on_gpu, "CUDA")
_library.impl("reroute", _by_reference, "CPU")
torch.library.register_fake("pruneroute::reroute", _shapes, lib=_library)
