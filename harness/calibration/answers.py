"""How likely a model finds given answers with its experts re-routed, all or all but one.

Teacher-forced: the model reads a prompt and its answer, and the loss is that of the answer's tokens.
Of the rows that it computes, a server prefills those of the prompt, whose routes stay as they are, and
decodes those of the answer; these are dealt to steps of a few rows each, and what the rows of a step
read decides where they may go (`kernels.sere.reference`). The last row of the prompt says the answer's
first token, so that one's loss never changes; the answer's last token is said and never read.

Two things are computed once for all experts of a sample. Rows of the prompt see no row of the
answer, so their keys and values are kept. An expert of one layer changes nothing below that layer, so
what goes into each layer is kept, and layers below it are passed over. And where no row of a layer is
moved away from an expert, protecting it changes nothing at all.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.calibration.checkpoints import decoder_layers, moe_blocks
from harness.calibration.protection import Spared, pretended_steps
from harness.calibration.samples import Encoded
from harness.calibration.similarity import CalibrationError
from kernels.sere.reference import sere_by_step


@dataclass(frozen=True)
class _Layer:
    """What is kept of one layer that has experts, of R rows.

    Attributes:
        states: [1, R, hidden], what goes into the layer with everything re-routed.
        left: bool [experts], those that some row is moved away from.
    """

    states: Tensor
    left: Tensor


class AnswerLoss:
    """The summed loss of one sample's answer [nats], as `harness.calibration.protection.Loss`."""

    @torch.inference_mode()
    def __init__(
        self,
        model: nn.Module,
        sample: Encoded,
        similarity: Tensor,
        primary_experts: int,
        batch: int,
    ) -> None:
        """Run the sample once, with everything re-routed.

        Args:
            model: a causal language model of Transformers in eval mode, on any device.
            sample: prompt and answer.
            similarity: [layers that have experts, E, E] float, on any device.
            primary_experts: K, heaviest slots of a row that re-routing leaves alone.
            batch: rows that a step is taken to decode.
        """
        self._model, self._primary = model, primary_experts
        self._blocks, self._layers = moe_blocks(model), decoder_layers(model)
        device = next(model.parameters()).device
        prompt, answer = (
            torch.tensor([ids], device=device) for ids in (sample.prompt, sample.answer)
        )
        self._target = answer[0, 1:]

        past, logits = self._read(prompt)
        first = float(functional.cross_entropy(logits.float(), answer[0, :1], reduction="sum"))
        if past is None:
            self._past, self._rows = None, torch.cat([prompt, answer[:, :-1]], dim=1)
        else:
            self._past, self._rows = past, answer[:, :-1]
        start = self._rows.shape[1] - len(self._target)
        decoded = torch.arange(self._rows.shape[1], device=device) >= start
        self._step, self._steps = pretended_steps(decoded, batch)
        self._similarity = {
            number: rows.to(device) for number, rows in zip(self._blocks, similarity, strict=True)
        }

        self._kept: dict[int, _Layer] = {}
        self._moved = first
        if len(self._target):
            with contextlib.ExitStack() as hooks:
                for number in self._blocks:
                    hooks.enter_context(self._keeping(number))
                self._moved += self._loss()
        self._first = first

    @property
    def rows(self) -> int:
        """Rows that have to be computed in each layer for an expert."""
        return self._rows.shape[1] if len(self._target) else 0

    @torch.inference_mode()
    def __call__(self, spared: Spared | None) -> float:
        """The loss with everything re-routed but one expert's slots, or nothing's."""
        if spared is None or not len(self._target):
            return self._moved
        number = list(self._blocks)[spared.layer]
        if not self._kept[number].left[spared.expert]:
            return self._moved
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(self._passing_over(number))
            hooks.enter_context(self._entering(number))
            for other in self._blocks:
                if other >= number:
                    expert = spared.expert if other == number else None
                    hooks.enter_context(self._routing(other, self._moving(other, expert)))
            return self._first + self._loss()

    def _moving(self, number: int, spared: int | None) -> Callable[[Tensor, Tensor], Tensor]:
        """How a layer's slots are re-routed, one expert's excepted."""
        similarity = self._similarity[number]
        protected = torch.zeros(len(similarity), dtype=torch.bool, device=similarity.device)
        if spared is not None:
            protected[spared] = True

        def move(ids: Tensor, weights: Tensor) -> Tensor:
            return sere_by_step(
                ids, weights, self._step, self._steps, similarity, protected, self._primary
            )

        return move

    def _read(self, prompt: Tensor) -> tuple[Any, Tensor]:
        """Keys and values of the prompt, and the logits [1, vocabulary] of its last row.

        None for the former where a layer carries a state instead (linear attention) or forgets
        (sliding windows): these can not be gone on from several times.
        """
        from transformers.cache_utils import DynamicLayer

        out = self._model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        plain = past is not None and all(type(layer) is DynamicLayer for layer in past.layers)
        return past if plain else None, out.logits[0]

    def _loss(self) -> float:
        """Summed over the answer's tokens but the first."""
        past = None
        if self._past is not None:
            # Going on gives each layer new tensors, so copies may share the ones that there are.
            past = copy.copy(self._past)
            past.layers = [copy.copy(layer) for layer in self._past.layers]
        logits = self._model(
            input_ids=self._rows,
            past_key_values=past,
            use_cache=past is not None,
            logits_to_keep=len(self._target),
        ).logits[0]
        return float(functional.cross_entropy(logits.float(), self._target, reduction="sum"))

    @contextlib.contextmanager
    def _keeping(self, number: int) -> Iterator[None]:
        """Fill `_kept` for a layer as the model runs."""
        states: list[Tensor] = []

        def enter(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            states.append(args[0])

        move = self._moving(number, None)

        def look(ids: Tensor, weights: Tensor) -> Tensor:
            moved = move(ids, weights)
            left = torch.zeros(len(self._similarity[number]), dtype=torch.bool)
            left[ids[moved != ids].long().cpu()] = True
            self._kept[number] = _Layer(states[0], left)
            return moved

        hook = self._layers[number].register_forward_pre_hook(enter)
        try:
            with self._routing(number, look):
                yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _routing(self, number: int, change: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Have the experts of a layer run by the ids that `change` makes of ids and weights."""

        def route(experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if len(args) != 3 or args[1].shape != args[2].shape:
                raise CalibrationError(
                    f"{type(experts).__name__} of this Transformers takes its routes in another way "
                    "than experts(states, ids, weights); take another release of it"
                )
            states, ids, weights = args
            return states, change(ids, weights), weights

        hook = self._experts(number).register_forward_pre_hook(route)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _entering(self, number: int) -> Iterator[None]:
        """Have a layer begin from what was kept."""

        def enter(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return self._kept[number].states, *args[1:]

        hook = self._layers[number].register_forward_pre_hook(enter)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _passing_over(self, number: int) -> Iterator[None]:
        """Have the layers below one do nothing."""

        def nothing(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return states

        below = self._layers[:number]
        for layer in below:
            layer.forward = nothing
        try:
            yield
        finally:
            for layer in below:
                del layer.forward

    def _experts(self, number: int) -> Any:
        return self._blocks[number].experts
