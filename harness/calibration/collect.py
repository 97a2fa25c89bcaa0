"""Runs a model over text and measures, at every mixture-of-experts layer, how alike experts are.

Works on the mixture-of-experts blocks of Transformers 5 (Qwen3-VL-MoE and its relatives): modules
with a router `gate` and fused `experts` called as ``experts(states, indices, weights)``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.calibration import MEASURES
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.measures import ACCUMULATORS, GramAccumulator
from harness.calibration.similarity import CalibrationError, Provenance, save_similarity
from harness.calibration.texts import GENERAL_TEXTS

CHUNK_ELEMENTS = 2**26
"""Bound on experts x tokens x hidden of one chunk of expert outputs, to bound memory."""


def moe_blocks(model: nn.Module) -> dict[int, nn.Module]:
    """The model's mixture-of-experts blocks by layer number, ascending.

    Raises:
        CalibrationError: there are none.
    """
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        number = re.search(r"(?:^|\.)layers\.(\d+)\.", name + ".")
        parts = getattr(module, "gate", None), getattr(module, "experts", None)
        if number and all(isinstance(part, nn.Module) for part in parts):
            found[int(number[1])] = module
    if not found:
        raise CalibrationError(
            f"{type(model).__name__}: no mixture-of-experts block found; calibration needs a model "
            "whose layers have `gate` and fused `experts`"
        )
    return dict(sorted(found.items()))


def expert_outputs(experts: nn.Module, states: Tensor) -> Tensor:
    """Every expert on every token: [tokens, hidden] -> [experts, tokens, hidden].

    Goes through the module's own forward, one expert at a time, so it is right for whatever
    weight layout the module has.
    """
    tokens = states.shape[0]
    weights = states.new_ones(tokens, 1)
    outputs = [
        experts.forward(states, torch.full((tokens, 1), e, device=states.device), weights)
        for e in range(_count(experts))
    ]
    return torch.stack(outputs)


@torch.inference_mode()
def collect(
    model: nn.Module, batches: Iterable[Tensor], measure: str = MEASURES[0]
) -> dict[int, GramAccumulator]:
    """Run token ids through the model; what a measure makes of experts' outputs, by layer number.

    Args:
        model: takes ``input_ids``; in eval mode, on any device.
        batches: int64 [batch, length] each, without padding.
        measure: one of `harness.calibration.MEASURES`.

    Returns:
        One accumulator per mixture-of-experts layer. The model's own, routed output is what goes
        on to the next layer, so every layer sees its ordinary hidden states.
    """
    kind = ACCUMULATORS[measure]
    watchers = {layer: _Watcher(block, kind) for layer, block in moe_blocks(model).items()}
    try:
        for ids in batches:
            model(input_ids=ids, use_cache=False)
    finally:
        for watcher in watchers.values():
            watcher.hook.remove()
    return {layer: watcher.finish() for layer, watcher in watchers.items()}


class _Watcher:
    """Gathers what goes into one block until a chunk is full, then runs all experts on it."""

    def __init__(self, block: nn.Module, kind: type[GramAccumulator]) -> None:
        experts = block.experts
        assert isinstance(experts, nn.Module)
        self._experts = experts
        self._gram = kind(_count(experts))
        self._waiting: list[Tensor] = []
        self.hook = block.register_forward_pre_hook(self._take)

    def _take(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        states = args[0].detach().flatten(0, -2)
        step = max(1, CHUNK_ELEMENTS // (_count(self._experts) * states.shape[1]))
        waiting = torch.cat([*self._waiting, states])
        *full, rest = waiting.split(step)
        for chunk in full:
            self._run(chunk)
        self._waiting = [rest]

    def finish(self) -> GramAccumulator:
        for rest in self._waiting:
            self._run(rest)
        self._waiting = []
        return self._gram

    def _run(self, states: Tensor) -> None:
        self._gram.add(expert_outputs(self._experts, states).float())


def _count(experts: nn.Module) -> int:
    return int(experts.num_experts)  # type: ignore[arg-type]


@contextlib.contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bar of the library's own; as it was before, afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def calibrate(
    model_dir: Path,
    out: Path,
    *,
    measure: str = MEASURES[0],
    texts: Sequence[str] = GENERAL_TEXTS,
    max_tokens: int = 128,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Measure a checkpoint's expert similarity and write it to `out`.

    Args:
        model_dir: a checkpoint that Transformers loads.
        out: safetensors file to write, see `save_similarity`.
        measure: one of `harness.calibration.MEASURES`.
        texts: general text; each is one sequence, cut to `max_tokens`.
        max_tokens: longest sequence [tokens].
        device: where the model runs.
        dtype: of the model's weights while it runs; sums are always float64.

    Raises:
        CalibrationError: no such measure or architecture, no mixture-of-experts layers in it, or
            too little text.
    """
    import transformers

    if measure not in ACCUMULATORS:
        raise CalibrationError(f"measure {measure!r}: takes one of {', '.join(MEASURES)}")
    name = json.loads((model_dir / "config.json").read_text())["architectures"][0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise CalibrationError(f"{model_dir}: Transformers has no architecture {name!r}")
    with _quiet_loading():
        model = architecture.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
    model = model.to(device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    sequences = [tokenizer(text)["input_ids"][:max_tokens] for text in texts]
    batches = (torch.tensor([ids], device=device) for ids in sequences if ids)
    grams = collect(model, batches, measure)
    similarity = torch.stack([gram.similarity() for gram in grams.values()])
    save_similarity(
        out,
        similarity,
        Provenance(
            measure=measure,
            model_sha256=model_fingerprint(model_dir),
            data_sha256=hashlib.sha256(json.dumps(sequences).encode()).hexdigest(),
            layer_indices=tuple(grams),
        ),
    )
