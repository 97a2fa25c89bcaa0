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
CHUNK = 32
"""Neighbours that the kernel looks at in one go."""
MAX_EXPERTS = 512
MAX_SLOTS = 16
SOURCE = Path(__file__).with_name("reroute.cu")
_ID_TYPES = {torch.int32: "int", torch.int64: "long long"}
LOGIT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Of a router's logits, by number, as the source has them."""

_library = torch.library.Library("pruneroute", "FRAGMENT")
_library.define(
    "reroute(Tensor ids, Tensor weights, Tensor row_kind, Tensor neighbours, Tensor reach, "
    "Tensor settings, Tensor(a!) counters, Tensor step, Tensor(b!) calls, Tensor logits, Tensor bias, "
    "int layer, bool sigmoid) -> (Tensor, Tensor)"
)


def reroute(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    neighbours: Tensor,
    reach: Tensor,
    settings: Tensor,
    counters: Tensor,
    step: Tensor,
    calls: Tensor,
    logits: Tensor,
    bias: Tensor,
    layer: int,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """A layer's routes of a step under the current settings; see `reference` and `rivals`.

    On a GPU, `neighbours`, `reach` and `settings` are read while the kernel before still runs. Whatever
    writes them has to have ended before that one began: a copy ahead of a step has; after a kernel that
    comes right before, synchronise.

    Args:
        ids: [rows, slots] int32 or int64, logical experts; others than 0 … E - 1 are passed through.
        weights: [rows, slots] float32, of the slots in any order.
        row_kind: [at least rows] uint8: `reference.PADDING`, `PREFILL` or `DECODE`.
        neighbours: [layers, E, P] int16, `neighbours` of the similarities.
        reach: [layers, E] int16, `reach` of the same.
        settings: [5] int32, as `SETTINGS`; at primary_experts >= slots nothing moves.
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
        ids, weights, row_kind, neighbours, reach, settings, counters, step, calls, logits, bias, layer,
        sigmoid,
    )  # fmt: skip
    return found


def neighbours(similarity: Tensor) -> Tensor:
    """Every expert's neighbours, the most similar first, as the kernel reads them.

    Args:
        similarity: [layers, E, E] float, finite.

    Returns:
        [layers, E, P] int16, of equals the lowest first. P is E, rounded up to whole chunks of 32 by
        the expert itself; a chunk has numbers 0, 8, 16, 24, then 1, 9, … of the order.
    """
    layers, experts, _ = similarity.shape
    order = similarity.argsort(dim=-1, descending=True, stable=True)
    own = torch.arange(experts, device=order.device)[None, :, None]
    order = torch.cat([order, own.expand(layers, -1, -experts % CHUNK)], dim=-1)
    lanes = order.view(layers, experts, -1, CHUNK // 8, 8).transpose(-1, -2)
    return lanes.reshape(order.shape).to(torch.int16)


def reach(similarity: Tensor, threshold: Tensor, protection: Tensor) -> Tensor:
    """How many of an expert's neighbours its slots may go to.

    Args:
        similarity: [layers, E, E] float.
        threshold: [layers], rho: an expert at least this similar will do.
        protection: [layers, E], nonzero where slots do not go elsewhere.

    Returns:
        [layers, E] int16.
    """
    near = (similarity >= threshold[:, None, None]).sum(-1)
    return near.masked_fill(protection != 0, 0).to(torch.int16)


def _ranks(neighbours: Tensor) -> Tensor:
    """A layer's [E, P] `neighbours` as [E, E] int64: which number u's neighbour v has in the order."""
    experts, padded = neighbours.shape
    order = neighbours.view(experts, -1, 8, CHUNK // 8).transpose(-1, -2).reshape(experts, padded)
    places = torch.arange(experts, device=order.device).expand(experts, -1)
    return torch.empty_like(places).scatter(1, order[:, :experts].long(), places)


def check(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    neighbours: Tensor,
    reach: Tensor,
    settings: Tensor,
    counters: Tensor,
    step: Tensor,
    calls: Tensor,
    logits: Tensor,
    bias: Tensor,
    layer: int,
) -> None:
    """Raises ValueError for what `reroute` does not take."""
    if neighbours.dim() != 3:
        raise ValueError(f"neighbours {tuple(neighbours.shape)} must be [layers, E, P]")
    layers, experts = neighbours.shape[0], neighbours.shape[1]
    if ids.dim() != 2 or ids.shape != weights.shape:
        raise ValueError(
            f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} must both be [rows, slots]"
        )
    if ids.dtype not in _ID_TYPES:
        raise ValueError(f"ids are {ids.dtype}; takes int32 or int64")
    if weights.dtype != torch.float32:
        raise ValueError(f"weights are {weights.dtype}; takes float32")
    padded = experts + -experts % CHUNK  # to whole chunks
    for name, tensor, dtype, shape in (
        ("neighbours", neighbours, torch.int16, (layers, experts, padded)),
        ("reach", reach, torch.int16, (layers, experts)),
        ("settings", settings, torch.int32, (len(SETTINGS),)),
        ("counters", counters, torch.int32, (len(counters), layers, 3)),
        ("step", step, torch.int64, (1,)),
        ("calls", calls, torch.int64, (layers,)),
        ("bias", bias, torch.float32, (experts,)),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} {tensor.dtype} {tuple(tensor.shape)} must be contiguous, {dtype} {shape}"
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
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is none of {layers}")


@functools.cache
def kernel(
    experts: int,
    slots: int,
    id_type: torch.dtype,
    logit_type: torch.dtype,
    sigmoid: bool,
    threads: int,
    device: int,
) -> nvrtc.Kernel:
    """The kernel for one model on one GPU and `threads_for` a step, from the cache or compiled.

    Raises:
        kernels.sere.nvrtc.CompileError: it cannot be had; says why.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise nvrtc.CompileError(
            f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}) lacks warp-wide reductions; "
            "takes a GPU from sm_80 on"
        )
    code = nvrtc.cached_code(
        SOURCE.read_text(encoding="utf-8"),
        SOURCE.name,
        f"sm_{major}{minor}",
        defines(experts, slots, threads, id_type, logit_type, sigmoid),
    )
    return nvrtc.load(code, "reroute", threads, overlaps=major >= 9)


def threads_for(rows: int, slots: int) -> int:
    """Threads of the block: one for each slot, where slots take up powers of two, if 1,024 are enough."""
    lanes = 1 << (slots - 1).bit_length()
    return 512 if rows * lanes <= 512 else 1024


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
    neighbours: Tensor,
    reach: Tensor,
    settings: Tensor,
    counters: Tensor,
    step: Tensor,
    calls: Tensor,
    logits: Tensor,
    bias: Tensor,
    layer: int,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    check(
        ids, weights, row_kind, neighbours, reach, settings, counters, step, calls, logits, bias, layer
    )  # fmt: skip
    ids, weights, logits = ids.contiguous(), weights.contiguous(), logits.contiguous()
    rows, slots = ids.shape
    out_ids, out_weights = torch.empty_like(ids), torch.empty_like(weights)
    launch = kernel(
        neighbours.shape[1], slots, ids.dtype, logits.dtype, sigmoid, threads_for(rows, slots),
        ids.get_device(),
    )  # fmt: skip
    launch(
        (ids, weights, row_kind, neighbours[layer], reach[layer], settings, out_ids, out_weights,
         counters, step, calls, logits, bias, rows, layer, neighbours.shape[0])
    )  # fmt: skip
    return out_ids, out_weights


def _by_reference(
    ids: Tensor,
    weights: Tensor,
    row_kind: Tensor,
    neighbours: Tensor,
    reach: Tensor,
    settings: Tensor,
    counters: Tensor,
    step: Tensor,
    calls: Tensor,
    logits: Tensor,
    bias: Tensor,
    layer: int,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    check(
        ids, weights, row_kind, neighbours, reach, settings, counters, step, calls, logits, bias, layer
    )  # fmt: skip
    number, primary, renormalize, budget, seed = settings.tolist()
    policy, kind, experts = POLICIES[number], row_kind[: len(ids)], neighbours.shape[1]
    if primary >= ids.shape[1]:
        policy = "off"
    new_ids, new_weights = ids.clone(), weights.clone()
    if policy == "topk":
        new_ids, new_weights = reference.topk(ids, weights, kind, primary, bool(renormalize))
    elif policy == "sere":
        # The nearer, the more similar; by less than 0 whatever is out of reach.
        similarity = (reach[layer].unsqueeze(1) - 1 - _ranks(neighbours[layer])).float()
        new_ids = reference.sere(ids, weights, kind, similarity, reach[layer] == 0, primary, 0.0)
    elif policy == "random_remap":
        new_ids, _ = rivals.random_remap(ids, weights, kind, primary, seed, experts)
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
    counts = [reference.expert_set(i, decode, experts).sum() for i in (ids, new_ids)]
    counters[step, layer] = torch.stack([*counts, (new_ids != ids).sum()]).to(counters.dtype)
    calls[layer] += 1
    return new_ids, new_weights


def _shapes(ids: Tensor, weights: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(weights)


_library.impl("reroute", _on_gpu, "CUDA")
_library.impl("reroute", _by_reference, "CPU")
torch.library.register_fake("pruneroute::reroute", _shapes, lib=_library)
