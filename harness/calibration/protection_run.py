"""Finds out which of a checkpoint's experts to protect, so that it may be stopped and gone on with."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.calibration import partial_file
from harness.calibration.answers import AnswerLoss
from harness.calibration.checkpoints import (
    DTYPES,
    Outline,
    check_device,
    load_model,
    load_tokenizer,
    outline,
)
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.memory import Need, check_fits, free_bytes, size
from harness.calibration.partial import Partial, Progress, check_place, versions
from harness.calibration.progress import Reporter
from harness.calibration.protection import Spared, finite, mark_costliest
from harness.calibration.samples import Encoded, Sample, encode_samples, samples_hash
from harness.calibration.similarity import (
    CalibrationError,
    Provenance,
    load_similarity,
    save_protection,
)

SAVE_S = 10.0
"""Most seconds between two savings of the sums, but for the re-routing under way."""


@dataclass(frozen=True)
class ProtectionTask:
    """What to measure.

    Attributes:
        model: folder of the checkpoint.
        similarity: file of its matrices, which say where an expert's slots go.
        out: safetensors file to write, over what is there.
        count: experts to mark in each layer, 1 to E.
        primary_experts: K, a row's heaviest slots, which stay; 1 to one less than the model's top k.
        batch: rows that a step is taken to decode.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: a key of `harness.calibration.checkpoints.DTYPES`, of the model while it runs.
        max_tokens: longest prompt with its answer; longer ones are left out. None takes all.
    """

    model: Path
    similarity: Path
    out: Path
    count: int
    primary_experts: int
    batch: int
    device: str
    dtype: str
    max_tokens: int | None


@dataclass(frozen=True)
class Steps:
    """Every (sample, layer, expert), sample by sample, layer by layer, in ascending order.

    Attributes:
        answers: tokens of each sample's answer.
        layers: number of each layer that has experts.
        depth: all layers of the model.
        experts: of a layer.
    """

    answers: tuple[int, ...]
    layers: tuple[int, ...]
    depth: int
    experts: int

    def __len__(self) -> int:
        return len(self.answers) * len(self.layers) * self.experts

    def at(self, step: int) -> tuple[int, int, int]:
        """Sample, row of the layer and expert of a step."""
        rest, expert = divmod(step, self.experts)
        return *divmod(rest, len(self.layers)), expert

    def cost(self, step: int) -> int:
        """Of all steps before this one, in answer rows times layers that are run for them."""
        sample, layer, expert = self.at(step)
        runs = [self.depth - number for number in self.layers]
        whole = sum(self.answers[:sample]) * sum(runs) * self.experts
        if sample == len(self.answers):
            return whole
        return whole + self.answers[sample] * (
            sum(runs[:layer]) * self.experts + runs[layer] * expert
        )


def memory_need(kind: Outline, dtype: torch.dtype, samples: Sequence[Encoded], batch: int) -> Need:
    """Most memory that measuring takes: one sample is at work at a time, dealt to steps of `batch` rows."""
    longest = max(s.length for s in samples)
    answer = max(len(s.answer) for s in samples)
    states = len(kind.layers) * longest * kind.hidden * dtype.itemsize
    keys_values = 2 * kind.cached * longest * dtype.itemsize
    logits = answer * kind.vocabulary * (dtype.itemsize + 8)
    # A sequence as it passes through, with room for attention and what experts widen it to.
    # Each step's own view of a layer's similarities.
    steps = -(-answer // batch) * kind.experts**2 * 8
    passing = (16 + 2 * kind.top_k) * longest * kind.hidden * 4
    return Need(
        model=kind.parameters * dtype.itemsize,
        sums=8 * (len(kind.layers) * kind.experts + len(samples)),
        work=states + keys_values + logits + passing + steps,
    )


def measure_protection(task: ProtectionTask, samples: Sequence[Sample]) -> None:
    """Measure what re-routing away from each expert costs, and write the marks to `task.out`.

    Answers are read with everything re-routed in the rows that a server decodes, and again with every
    expert of every layer protected in turn (`harness.calibration.answers`). Its cost is what that takes
    off the mean loss of the answers' tokens.

    Sums are saved beside `task.out` (`partial_file`). The same call goes on from the (sample, layer,
    expert) that they end with, to what it would have come to without a stop; `count` may be another.

    Args:
        task: what to measure.
        samples: of the work that the model is to do.

    Raises:
        CalibrationError: the model, its similarity, the samples or the memory does not suffice, a loss
            is no finite number, or the saved sums are of another task.
        OSError: the place cannot be written.
    """
    check_device(task.device)
    kind, dtype, model_hash = outline(task.model), DTYPES[task.dtype], model_fingerprint(task.model)
    _check_counts(task, kind)
    similarity = load_similarity(
        task.similarity,
        layers=len(kind.layers),
        experts=kind.experts,
        model_hash=model_hash,
        layer_indices=kind.layers,
    )
    encoded = encode_samples(load_tokenizer(task.model), samples, task.max_tokens)
    partial = Partial(
        partial_file(task.out),
        {
            "model": model_hash,
            "similarity": hashlib.sha256(similarity.numpy().tobytes()).hexdigest(),
            "primary_experts": str(task.primary_experts),
            "batch": str(task.batch),
            "data": samples_hash(encoded),
            "samples": str(len(encoded)),
            "max_tokens": str(task.max_tokens),
            "device": task.device,
            "dtype": task.dtype,
            **versions(),
        },
    )
    saved = partial.load()
    need = memory_need(kind, dtype, encoded, task.batch)
    free = {where: free_bytes(where) for where in {"cpu", task.device}}
    left_out = len(samples) - len(encoded)
    print(_announcement(task, kind, need, encoded, left_out, free[task.device]), file=sys.stderr)
    check_fits(need, task.device, free)
    check_place(task.out)

    steps = Steps(tuple(len(s.answer) for s in encoded), kind.layers, kind.depth, kind.experts)
    if saved:
        print(
            f"going on after {saved.done} of {len(steps)} experts ({partial.path})",
            file=sys.stderr,
        )
    model = load_model(task.model, task.device, dtype)
    sums = _sum_up(model, encoded, similarity, steps, task, partial, saved)
    tokens = sum(steps.answers)
    increases = sums["increases"] / tokens
    marks = mark_costliest(increases, task.count)
    save_protection(
        task.out,
        marks,
        Provenance(
            measure=f"loss_increase_k{task.primary_experts}_b{task.batch}",
            model_sha256=model_hash,
            data_sha256=samples_hash(encoded),
            layer_indices=kind.layers,
        ),
        increases,
    )
    partial.drop()
    print(_result(increases, marks.bool(), float(sums["moved"].sum()) / tokens), file=sys.stderr)


def _sum_up(
    model: nn.Module,
    samples: Sequence[Encoded],
    similarity: Tensor,
    steps: Steps,
    task: ProtectionTask,
    partial: Partial,
    saved: Progress | None,
) -> dict[str, Tensor]:
    """Loss increases summed over samples, float64 [layers, E], and re-routed losses, float64 [samples]."""
    sums = saved.tensors if saved else {
        "increases": torch.zeros(similarity.shape[:2], dtype=torch.float64),
        "moved": torch.zeros(len(samples), dtype=torch.float64),
    }  # fmt: skip
    done = saved.done if saved else 0
    reporter = Reporter("protection", steps.cost(len(steps)), steps.cost(done))
    at, loss, last_saved = -1, None, time.monotonic()
    try:
        for step in range(done, len(steps)):
            sample, layer, expert = steps.at(step)
            if loss is None or sample != at:
                at = sample
                loss = AnswerLoss(model, samples[at], similarity, task.primary_experts, task.batch)
                sums["moved"][sample] = finite(loss(None), None)
            spared = Spared(layer, expert)
            moved = float(sums["moved"][sample])
            sums["increases"][layer, expert] += moved - finite(loss(spared), spared)
            if time.monotonic() - last_saved >= SAVE_S and step + 1 < len(steps):
                partial.save(step + 1, sums)
                last_saved = time.monotonic()
            words = f"sample {sample + 1} of {len(samples)}, layer {steps.layers[layer]}"
            reporter.at(steps.cost(step + 1), words)
    finally:
        reporter.close()
    return sums


def _check_counts(task: ProtectionTask, kind: Outline) -> None:
    if not 1 <= task.count <= kind.experts:
        raise CalibrationError(f"count={task.count}: this model takes 1 to {kind.experts}")
    if not 1 <= task.primary_experts < kind.top_k:
        raise CalibrationError(
            f"primary_experts={task.primary_experts}: this model gives each token {kind.top_k} "
            f"experts, of which some must be left to re-route; takes 1 to {kind.top_k - 1}"
        )


def _announcement(
    task: ProtectionTask,
    kind: Outline,
    need: Need,
    samples: Sequence[Encoded],
    left_out: int,
    free: int | None,
) -> str:
    dropped = f" ({left_out} longer than max_tokens left out)" if left_out else ""
    return (
        f"protection of {kind.architecture}: {len(kind.layers)} layers x {kind.experts} experts, "
        f"{len(samples)} samples{dropped}, {sum(len(s.prompt) for s in samples)} tokens of prompts "
        f"and {sum(len(s.answer) for s in samples)} of answers; accumulators {size(need.sums)} and "
        f"at most {size(need.work)} of work, model {size(need.model)} in {task.dtype} on "
        f"{task.device}; free: {'unknown' if free is None else size(free)}"
    )


def _result(increases: Tensor, marked: Tensor, moved: float) -> str:
    """What was found, in one line; `marked`: bool [layers, E]."""
    others = increases[~marked]
    rest = f", another {float(others.mean()):+.6f}" if others.numel() else ""
    return (
        f"loss {moved:.4f} nats a token of answers with everything re-routed; of that, moving away from "
        f"a marked expert is {float(increases[marked].mean()):+.6f} on average{rest}"
    )
