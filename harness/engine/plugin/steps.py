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


def decoding(
    scheduled: np.ndarray, computed: np.ndarray, prompt: np.ndarray, decode_width: int
) -> np.ndarray:
    """Which requests of a step decode.

    A request decodes once its whole prompt is computed and the step gives it no more than a decode
    step's rows; tokens computed anew after preemption come in longer runs and count as prefill.

    Args:
        scheduled, computed, prompt: [requests] tokens of this step, tokens done before, prompt tokens.
        decode_width: rows of one decoding request, 1 + speculative tokens.

    Returns:
        [requests] bool.
    """
    return (computed >= prompt) & (scheduled <= decode_width)


def row_kinds(scheduled: np.ndarray, decodes: np.ndarray) -> np.ndarray:
    """Kind of every row of a step.

    Args:
        scheduled: [requests] rows of each.
        decodes: [requests] bool.

    Returns:
        [Σ scheduled] uint8 of `PREFILL` and `DECODE`.
    """
    return np.repeat(np.where(decodes, DECODE, PREFILL).astype(np.uint8), scheduled)


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
    """Before a step of vLLM's V1 model runner: note what is in it.

    Args:
        runner: V1's `GPUModelRunner`.
        scheduler_output: what it is about to prepare.
    """
    note_requests(scheduler_output.scheduled_new_reqs)
    LEVER.refusal = LEVER.refusal or _refusal(runner)
    if not LEVER.layers or LEVER.refusal:
        return
    batch = runner.input_batch
    n = batch.num_reqs
    ids = batch.req_ids[:n]
    scheduled = np.array([scheduler_output.num_scheduled_tokens[r] for r in ids])
    computed, prompt = batch.num_computed_tokens_cpu[:n], batch.num_prompt_tokens[:n]
    width = 1 + getattr(runner, "num_spec_tokens", 0)
    _begin_step(runner.device, ids, scheduled, decoding(scheduled, computed, prompt, width))


def _refusal(runner: Any) -> str | None:
    """Why nobody can tell, before a step, which rows of the model's batch decode."""
    if getattr(runner, "adaptive_verification", None) is not None:
        return (
            "under adaptive verification of drafts only the device knows which rows belong to which "
            "request; turn it off"
        )
    if getattr(getattr(runner, "parallel_config", None), "use_ubatching", False):
        return (
            "batches are cut in two (enable_dbo, ubatch_size), and each half starts at row 0; leave "
            "them off"
        )
    return None


def note_prepared(runner: Any, scheduler_output: Any, batch: Any) -> None:
    """Once vLLM's V2 model runner has prepared a step: note what is in it.

    Args:
        runner: V2's `GPUModelRunner`.
        scheduler_output: what it was prepared from.
        batch: the `InputBatch` that it made. What is computed anew after preemption is prefill in it.

    """
    note_requests(scheduler_output.scheduled_new_reqs)
    LEVER.refusal = LEVER.refusal or _refusal(runner)
    if not LEVER.layers or LEVER.refusal:
        return
    scheduled = np.asarray(batch.num_scheduled_tokens)
    assert int(scheduled.sum()) == batch.num_tokens, (scheduled, batch.num_tokens)
    _begin_step(runner.device, batch.req_ids, scheduled, ~np.asarray(batch.is_prefilling_np))


def _begin_step(
    device: torch.device, ids: Sequence[str], scheduled: np.ndarray, decodes: np.ndarray
) -> None:
    """Write the kinds of a step's rows and open its counters.

    Args:
        device: of the model.
        ids: requests in the order of their rows.
        scheduled: [requests] rows.
        decodes: [requests] bool, whether they are a decode step's.
    """
    LEVER.prepare(device)
    requests = tuple(r for r, d in zip(ids, decodes.tolist(), strict=True) if d)
    LEVER.begin(requests, row_kinds(scheduled, decodes))


def install() -> None:
    """Have the model runners, of both kinds where there are two, note every step. Idempotent."""
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner._prepare_inputs, "wraps_for_pruneroute", False):
        return
    prepare = GPUModelRunner._prepare_inputs

    def prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        before_step(self, scheduler_output)
        return prepare(self, scheduler_output, *args, **kwargs)

    prepare_inputs.wraps_for_pruneroute = True  # type: ignore[attr-defined]
    GPUModelRunner._prepare_inputs = prepare_inputs
    _note_dummies(GPUModelRunner)
    if HAS_TRITON:
        # The other runner's module needs it.
        _install_v2()


def _note_dummies(runner_class: Any) -> None:
    """Steps without requests, which keep a rank in step with others, neither move nor count."""
    run = runner_class._dummy_run

    def dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if LEVER.log is not None:
            LEVER.begin((), np.empty(0, dtype=np.uint8))
        return run(self, *args, **kwargs)

    runner_class._dummy_run = dummy_run


def _install_v2() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    _note_dummies(GPUModelRunner)

    prepare = GPUModelRunner.prepare_inputs

    def prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = prepare(self, scheduler_output, *args, **kwargs)
        note_prepared(self, scheduler_output, batch)
        return batch

    GPUModelRunner.prepare_inputs = prepare_inputs
