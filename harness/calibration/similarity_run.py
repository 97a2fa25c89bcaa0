"""Measures a checkpoint's expert similarity so that it may be stopped and gone on with."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.calibration import partial_file
from harness.calibration.checkpoints import (
    DTYPES,
    Outline,
    check_device,
    load_model,
    load_tokenizer,
    outline,
)
from harness.calibration.collect import Collector, chunk_tokens, write_similarity
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.measures import ACCUMULATORS
from harness.calibration.memory import Need, check_fits, free_bytes, size
from harness.calibration.partial import Partial, check_place, versions
from harness.calibration.progress import Reporter
from harness.calibration.samples import encode_texts, texts_hash
from harness.calibration.similarity import CalibrationError

SAVE_EVERY = 8
"""Samples between two savings of the sums."""


@dataclass(frozen=True)
class SimilarityTask:
    """What to measure.

    Attributes:
        model: folder of the checkpoint.
        out: safetensors file to write, over what is there.
        measure: one of `harness.calibration.MEASURES`.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: a key of `harness.calibration.checkpoints.DTYPES`, of the model while it runs.
        max_tokens: longest sequence; texts are cut to it.
    """

    model: Path
    out: Path
    measure: str
    device: str
    dtype: str
    max_tokens: int


def memory_need(kind: Outline, measure: str, dtype: torch.dtype, tokens: int, longest: int) -> Need:
    """Most memory that measuring takes.

    Args:
        kind: of the model.
        measure: one of `harness.calibration.MEASURES`.
        dtype: that the model runs in.
        tokens: in all.
        longest: tokens of the longest sequence.
    """
    chunk = min(chunk_tokens(measure, kind.experts, kind.hidden), tokens)
    waiting = len(kind.layers) * chunk * kind.hidden * dtype.itemsize
    one_layer = ACCUMULATORS[measure].work_bytes(kind.experts, chunk, kind.hidden)
    # A sequence, or a chunk, as it passes through, with room for what experts widen it to.
    passing = 16 * max(longest, chunk) * kind.hidden * 4
    return Need(
        model=kind.parameters * dtype.itemsize,
        sums=len(kind.layers) * kind.experts**2 * 8,
        work=waiting + one_layer + passing,
    )


def measure_similarity(task: SimilarityTask, texts: Sequence[str]) -> None:
    """Measure, say on stderr how it goes, and write `task.out`.

    Sums are saved every `SAVE_EVERY` samples beside `task.out` (`partial_file`). The same call goes on
    from there; what it comes to is bit for bit what it would have been without a stop, where the
    model's forward gives the same bits each time, as on a CPU.

    Args:
        task: what to measure.
        texts: one sequence each.

    Raises:
        CalibrationError: the model, the text or the memory does not suffice, or the saved sums are of
            another task. Nothing has been done then.
        OSError: the place cannot be written.
    """
    check_device(task.device)
    kind, dtype = outline(task.model), DTYPES[task.dtype]
    sequences = encode_texts(load_tokenizer(task.model), texts, task.max_tokens)
    lengths = [len(ids) for ids in sequences]
    fewest = ACCUMULATORS[task.measure].fewest
    if sum(lengths) < fewest:
        raise CalibrationError(
            f"data: {sum(lengths)} tokens for calibration: give text of at least {fewest}"
        )
    data_hash = texts_hash(sequences)
    partial = Partial(
        partial_file(task.out),
        {
            "model": model_fingerprint(task.model),
            "measure": task.measure,
            "data": data_hash,
            "samples": str(len(sequences)),
            "max_tokens": str(task.max_tokens),
            "device": task.device,
            "dtype": task.dtype,
            **versions(),
        },
    )
    saved = partial.load()
    need = memory_need(kind, task.measure, dtype, sum(lengths), max(lengths))
    free = {where: free_bytes(where) for where in {"cpu", task.device}}
    print(_announcement(task, kind, need, lengths, free[task.device]), file=sys.stderr)
    check_fits(need, task.device, free)
    check_place(task.out)

    done, total = saved.done if saved else 0, len(sequences)
    if saved:
        print(f"going on after {done} of {total} samples ({partial.path})", file=sys.stderr)
    with Collector(load_model(task.model, task.device, dtype), task.measure) as collector:
        if saved:
            collector.restore(saved.tensors)
        read = list(itertools.accumulate(lengths, initial=0))
        reporter = Reporter("similarity", read[-1], read[done])
        try:
            for number, ids in enumerate(sequences[done:], done + 1):
                if ids:
                    collector.add(torch.tensor([ids], device=task.device))
                if number % SAVE_EVERY == 0 and number < total:
                    partial.save(number, collector.state())
                reporter.at(read[number], f"{number} of {total} samples")
        finally:
            reporter.close()
    write_similarity(task.out, collector.similarities(), task.measure, task.model, data_hash)
    partial.drop()


def _announcement(
    task: SimilarityTask, kind: Outline, need: Need, lengths: Sequence[int], free: int | None
) -> str:
    return (
        f"similarity ({task.measure}) of {kind.architecture}: {len(kind.layers)} layers x "
        f"{kind.experts} experts, {len(lengths)} samples, {sum(lengths)} tokens; accumulators "
        f"{size(need.sums)} and at most {size(need.work)} of work, model {size(need.model)} in "
        f"{task.dtype} on {task.device}; free: {'unknown' if free is None else size(free)}"
    )
