"""Scores of a batch of patches, taken while the vision encoder runs its scored layer.

The layer's queries and keys are seen at its attention's door. FlashAttention gives away its
log-sum-exp, and the kernels need no pass of their own for it; only the scored layer is asked, nothing
else about the encoder changes. Other backends keep theirs, and the kernels compute it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils

from kernels.visionzip.attention import head_scores, mean_heads, runs_triton
from kernels.visionzip.reference import attention_received

logger = logging.getLogger("vllm.pruneroute")

Found = tuple[Tensor, Tensor | None]
"""Scores, [patches] float32, and keys, [patches, head_dim] float32, of one call of the encoder."""

_told: set[str] = set()


@contextlib.contextmanager
def scored(
    attention: nn.Module, patches: Sequence[int], *, keys: bool, sharded: bool
) -> Iterator[list[Found]]:
    """While open, every call of `attention` leaves its patches' scores, [patches] float32.

    Where `keys` is set, also their keys, mean over heads, [patches, head_dim] float32.

    Args:
        attention: vLLM's encoder attention: query and key arrive after rotary embedding, each
            [1, patches, heads of this rank, head_dim].
        patches: of each image, in the order in which they come, whole ones in each call.
        keys: whether keys are wanted.
        sharded: whether ranks hold different heads. They are gathered in order before they are
            added up, so that every rank has the same scores, and the same queries, keys and
            log-sum-exps give the same at every number of ranks.

    Raises:
        RuntimeError: the layer never ran, or on more patches than there are.
    """
    found: list[Found] = []
    lengths = iter(patches)
    entropies: list[Tensor] = []
    inputs: list[tuple[Tensor, Tensor]] = []
    patched = contextlib.ExitStack()

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key = kwargs["query"].flatten(0, 1), kwargs["key"].flatten(0, 1)
        inputs.append((query, key))
        # ROCm's function of that name has other arguments.
        flash = current_platform.is_cuda() and getattr(module, "is_flash_attn_backend", False)
        if flash and runs_triton(query):
            patched.enter_context(_entropies_kept(entropies))

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        patched.close()
        query, key = inputs.pop()
        # Not vLLM's own bounds: a backend may have them in other units, and on the device.
        bounds = [0]
        while bounds[-1] < query.shape[0]:
            length = next(lengths, None)
            if length is None:
                raise RuntimeError(
                    f"the scored layer saw more patches than the {sum(patches)} of the images"
                )
            bounds.append(bounds[-1] + length)
        lse = _fitting(entropies, query)
        entropies.clear()
        found.append(_scores(query, key, bounds, module.scale, lse, keys, sharded))

    handles = [
        attention.register_forward_pre_hook(before, with_kwargs=True),
        attention.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield found
    finally:
        patched.close()
        for handle in handles:
            handle.remove()
    if not found:
        raise RuntimeError("the scored layer of the vision encoder never ran its attention")


def _scores(
    query: Tensor,
    key: Tensor,
    bounds: Sequence[int],
    scale: float,
    lse: Tensor | None,
    keys: bool,
    sharded: bool,
) -> Found:
    """Scores of all heads and mean keys; query and key [patches, heads of this rank, head_dim]."""
    ranks = get_tensor_model_parallel_world_size() if sharded else 1
    own = key.float().mean(1) if keys else None
    if ranks > 1 and own is not None:
        own = tensor_model_parallel_all_reduce(own) / ranks
    if ranks == 1 and not runs_triton(query):
        _tell("PyTorch, a block of queries at a time")
        return attention_received(query, key, bounds, scale), own
    _tell(
        "PyTorch, head by head" if not runs_triton(query)
        else "Triton, with its own log-sum-exp" if lse is None
        else "Triton, with FlashAttention's log-sum-exp"
    )  # fmt: skip
    parts = head_scores(query, key, bounds, scale, lse)
    if ranks > 1:
        parts = tensor_model_parallel_all_gather(parts, dim=0)
    return mean_heads(parts, parts.shape[0]), own


@contextlib.contextmanager
def _entropies_kept(kept: list[Tensor]) -> Iterator[None]:
    """While open, FlashAttention leaves its log-sum-exps in `kept`."""
    # Looked up there by vLLM's wrapper at every call.
    stock = fa_utils.flash_attn_varlen_func

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        output, lse, *_ = stock(*args, **kwargs, return_softmax_lse=True)
        kept.append(lse)
        return output

    fa_utils.flash_attn_varlen_func = forward
    try:
        yield
    finally:
        fa_utils.flash_attn_varlen_func = stock


def _fitting(entropies: Sequence[Tensor], query: Tensor) -> Tensor | None:
    """The one log-sum-exp that is [heads, patches] float32, else none."""
    if len(entropies) != 1:
        return None
    lse = entropies[0]
    fits = lse.shape == (query.shape[1], query.shape[0]) and lse.dtype == torch.float32
    return lse if fits else None


def _tell(how: str) -> None:
    if how not in _told:
        _told.add(how)
        logger.info("PruneRoute: vision scores by %s", how)
