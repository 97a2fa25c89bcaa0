"""Tells the routing lever, before every step, which rows decode; remembers which request is which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from harness.engine.plugin.group import group_key
from harness.engine.plugin.routing import LEVER
from kernels.sere.reference import DECODE, PREFILL

MAX_REQUESTS = 65_536
"""Requests whose image groups are remembered until telemetry is drained."""

REQUEST_GROUPS: OrderedDict[str, list[int]] = OrderedDict()
"""Request id → keys of its image groups, in order."""


def row_kinds(
    scheduled: np.ndarray, computed: np.ndarray, prompt: np.ndarray, decode_width: int
) -> np.ndarray:
    """Kind of every row of a step.

    A request decodes once its whole prompt is computed and the step gives it no more than a decode
    step's rows; tokens computed anew after preemption come in longer runs and count as prefill.

    Args:
        scheduled, computed, prompt: [requests] tokens of this step, tokens done before, prompt tokens.
        decode_width: rows of one decoding request, 1 + speculative tokens.

    Returns:
        [Σ scheduled] uint8 of `PREFILL` and `DECODE`.
    """
    decodes = (computed >= prompt) & (scheduled <= decode_width)
    kinds = np.where(decodes, DECODE, PREFILL).astype(np.uint8)
    return np.repeat(kinds, scheduled)


def note_requests(new_requests: Sequence[Any]) -> None:
    """Remember the image groups of requests that the scheduler hands over for the first time."""
    for request in new_requests:
        keys = [
            group_key(f.identifier)
            for f in sorted(request.mm_features, key=lambda f: f.mm_position.offset)
            if f.modality == "image"
        ]
        if keys:
            REQUEST_GROUPS[request.req_id] = keys
            if len(REQUEST_GROUPS) > MAX_REQUESTS:
                REQUEST_GROUPS.popitem(last=False)


def before_step(runner: Any, scheduler_output: Any) -> None:
    """Write the step's row kinds and open its counters. `runner`: vLLM's V1 model runner."""
    note_requests(scheduler_output.scheduled_new_reqs)
    if not LEVER.layers or LEVER.refusal:
        return
    LEVER.prepare(runner.device)
    batch = runner.input_batch
    n = batch.num_reqs
    ids = batch.req_ids[:n]
    scheduled = np.array([scheduler_output.num_scheduled_tokens[r] for r in ids])
    computed, prompt = batch.num_computed_tokens_cpu[:n], batch.num_prompt_tokens[:n]
    width = 1 + getattr(runner, "num_spec_tokens", 0)
    kinds = row_kinds(scheduled, computed, prompt, width)
    LEVER.row_kind[: len(kinds)] = torch.from_numpy(kinds).to(LEVER.row_kind.device)
    LEVER.row_kind[len(kinds) :] = 0
    decodes = (computed >= prompt) & (scheduled <= width)
    decode_rows = int(scheduled[decodes].sum())
    assert LEVER.log is not None
    LEVER.log.begin(
        tuple(r for r, d in zip(ids, decodes, strict=True) if d),
        decode_rows,
        len(kinds) - decode_rows,
    )


def install() -> None:
    """Call `before_step` when the V1 model runner prepares a step. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner._prepare_inputs, "wraps_for_pruneroute", False):
        return
    prepare = GPUModelRunner._prepare_inputs

    def prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        before_step(self, scheduler_output)
        return prepare(self, scheduler_output, *args, **kwargs)

    prepare_inputs.wraps_for_pruneroute = True  # type: ignore[attr-defined]
    GPUModelRunner._prepare_inputs = prepare_inputs
