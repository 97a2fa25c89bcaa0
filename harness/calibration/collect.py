"""Runs a model over text and measures, at every mixture-of-experts layer, how alike experts are.

Works on the mixture-of-experts blocks of Transformers 5 (Qwen3-VL-MoE and its relatives): modules
with a router `gate` and fused `experts` called as ``experts(states, indices, weights)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn

from harness.calibration import MEASURES
from harness.calibration.checkpoints import expert_count, load_model, load_tokenizer, moe_blocks
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.measures import ACCUMULATORS, GramAccumulator
from harness.calibration.samples import encode_texts, texts_hash
from harness.calibration.similarity import CalibrationError, Provenance, save_similarity
from harness.calibration.texts import GENERAL_TEXTS

CHUNK_ELEMENTS = 2**26
"""Bound on experts x tokens x hidden of one chunk of expert outputs, to bound memory."""


def chunk_tokens(measure: str, experts: int, hidden: int) -> int:
    """Tokens of one chunk, on all of which every expert is run at once."""
    multiple = ACCUMULATORS[measure].multiple
    most = max(1, CHUNK_ELEMENTS // (experts * hidden))
    # Where what waits for the next chunk are hidden states, nothing has to wait as outputs, which
    # are `experts` times as many.
    return max(multiple, most - most % multiple)


def expert_outputs(experts: nn.Module, states: Tensor) -> Tensor:
    """Every expert on every token: [tokens, hidden] -> [experts, tokens, hidden].

    Goes through the module's own forward, one expert at a time, so it is right for whatever
    weight layout the module has.
    """
    tokens, count = states.shape[0], expert_count(experts)
    weights = states.new_ones(tokens, 1)
    outputs = states.new_empty(count, *states.shape)
    for e in range(count):
        chosen = torch.full((tokens, 1), e, device=states.device)
        outputs[e] = experts.forward(states, chosen, weights)
    return outputs


class Collector:
    """Sums up experts' outputs while a model is run, one sequence after the other.

    The model's own, routed output is what goes on to the next layer, so every layer sees its ordinary
    hidden states. Memory does not grow with the text: hidden states wait until they fill a chunk
    (`chunk_tokens`), all experts are run on it, and only sums remain.

    A context manager: within it, the model's blocks are watched.
    """

    def __init__(self, model: nn.Module, measure: str = MEASURES[0]) -> None:
        """Nothing summed up yet.

        Args:
            model: takes ``input_ids``; in eval mode, on any device.
            measure: one of `harness.calibration.MEASURES`.
        """
        self._model = model
        self._watchers = {
            layer: _Watcher(block, measure) for layer, block in moe_blocks(model).items()
        }

    def __enter__(self) -> Collector:
        for watcher in self._watchers.values():
            watcher.watch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for watcher in self._watchers.values():
            watcher.leave()

    @torch.inference_mode()
    def add(self, ids: Tensor) -> None:
        """Run the model over token ids, int64 [batch, length] without padding."""
        self._model(input_ids=ids, use_cache=False, logits_to_keep=1)

    def state(self) -> dict[str, Tensor]:
        """All that has been summed up and what waits, on the CPU, by ``LAYER.NAME``."""
        return {
            f"{layer}.{name}": tensor
            for layer, watcher in self._watchers.items()
            for name, tensor in watcher.state().items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the `state` of another collector of this model and measure.

        What comes of it is bit for bit what the other would have come to, where the model's own
        forward gives the same bits each time, as on a CPU.

        Raises:
            CalibrationError: it is the state of another model.
        """
        by_layer: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in state.items():
            layer, _, name = key.partition(".")
            by_layer[int(layer)][name] = tensor
        if set(by_layer) != set(self._watchers):
            raise CalibrationError(f"sums of layers {sorted(by_layer)}, not {list(self._watchers)}")
        for number, watcher in self._watchers.items():
            watcher.restore(by_layer[number])

    @torch.inference_mode()
    def finish(self) -> Iterator[tuple[int, GramAccumulator]]:
        """Each layer's sums in order, what waited included; of no more use afterwards."""
        while self._watchers:
            layer = next(iter(self._watchers))
            yield layer, self._watchers.pop(layer).finish()

    def similarities(self) -> dict[int, Tensor]:
        """As `finish`, what `GramAccumulator.similarity` makes of each layer's sums.

        Raises:
            CalibrationError: there was too little text.
        """
        return {layer: gram.similarity() for layer, gram in self.finish()}


def collect(
    model: nn.Module, batches: Iterable[Tensor], measure: str = MEASURES[0]
) -> dict[int, GramAccumulator]:
    """What a `Collector` has summed up, by layer number, after these batches of token ids."""
    with Collector(model, measure) as collector:
        for ids in batches:
            collector.add(ids)
    return dict(collector.finish())


class _Watcher:
    """Gathers what goes into one block until a chunk is full, then runs all experts on it."""

    def __init__(self, block: nn.Module, measure: str) -> None:
        experts = block.experts
        assert isinstance(experts, nn.Module)
        self._block, self._experts, self._measure = block, experts, measure
        self._gram = ACCUMULATORS[measure](expert_count(experts))
        self._waiting: list[Tensor] = []

    def watch(self) -> None:
        self._hook = self._block.register_forward_pre_hook(self._take)

    def leave(self) -> None:
        self._hook.remove()

    def _take(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        states = args[0].detach().flatten(0, -2)
        step = chunk_tokens(self._measure, expert_count(self._experts), states.shape[1])
        held = [rest.to(states.device) for rest in self._waiting]
        *full, rest = torch.cat([*held, states]).split(step)
        for chunk in full:
            self._run(chunk)
        # A copy, or the whole chunk would be kept for it; and arithmetic may depend on where in
        # memory a tensor begins, which has to be the same after `restore`.
        self._waiting = [rest.clone()]

    def state(self) -> dict[str, Tensor]:
        waiting = {"states": self._waiting[0].cpu()} if self._waiting else {}
        return self._gram.state() | waiting

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._gram.restore(state)
        self._waiting = [state["states"].clone()] if "states" in state else []

    def finish(self) -> GramAccumulator:
        device = next(self._experts.parameters()).device
        for rest in self._waiting:
            self._run(rest.to(device))
        self._waiting = []
        return self._gram

    def _run(self, states: Tensor) -> None:
        self._gram.add(expert_outputs(self._experts, states).float())


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
    """Measure a checkpoint's expert similarity and write it to `out`, in one go.

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
    if measure not in ACCUMULATORS:
        raise CalibrationError(f"measure {measure!r}: takes one of {', '.join(MEASURES)}")
    model = load_model(model_dir, device, dtype)
    sequences = encode_texts(load_tokenizer(model_dir), texts, max_tokens)
    with Collector(model, measure) as collector:
        for ids in filter(None, sequences):
            collector.add(torch.tensor([ids], device=device))
    write_similarity(out, collector.similarities(), measure, model_dir, texts_hash(sequences))


def write_similarity(
    out: Path, similarities: Mapping[int, Tensor], measure: str, model_dir: Path, data_hash: str
) -> None:
    """Write each layer's [E, E] as one file that says what it was made from."""
    save_similarity(
        out,
        torch.stack(list(similarities.values())),
        Provenance(
            measure=measure,
            model_sha256=model_fingerprint(model_dir),
            data_sha256=data_hash,
            layer_indices=tuple(similarities),
        ),
    )
