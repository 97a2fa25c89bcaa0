"""The short cuts of answers' loss change nothing, in any family; and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from harness.calibration.answers import AnswerLoss
from harness.calibration.checkpoints import decoder_layers, moe_blocks
from harness.calibration.protection import Spared, pretended_steps
from harness.calibration.samples import Encoded
from harness.calibration.similarity import CalibrationError
from kernels.sere import reference
from tests.calibration import tiny

PRIMARY, BATCH = 2, 3


def drawn(prompt: int, answer: int, seed: int) -> Encoded:
    own = torch.Generator().manual_seed(seed)
    ids = torch.randint(tiny.TEXT["vocab_size"], (prompt + answer,), generator=own).tolist()
    return Encoded(tuple(ids[:prompt]), tuple(ids[prompt:]))


SAMPLE = drawn(9, 12, 1)


def similarities(layers: int = tiny.LAYERS) -> torch.Tensor:
    """Of random experts; each layer's its own."""
    own = torch.Generator().manual_seed(5)
    return torch.rand(layers, tiny.EXPERTS, tiny.EXPERTS, generator=own)


@torch.inference_mode()
def whole(
    model: nn.Module, sample: Encoded, spared: Spared | None, similarity: torch.Tensor
) -> float:
    """The same loss from one pass over everything, step by step with the reference, at the routers."""
    start = len(sample.prompt)
    rows = start + len(sample.answer)
    # The last token of the answer is said, not read.
    decoded = (torch.arange(rows) >= start) & (torch.arange(rows) < rows - 1)
    step, steps = pretended_steps(decoded, BATCH)

    def router(layer: int) -> object:
        def route(
            _gate: nn.Module, _args: object, said: tuple[torch.Tensor, ...]
        ) -> tuple[object, ...]:
            logits, weights, ids = said
            protected = torch.zeros(tiny.EXPERTS, dtype=torch.bool)
            if spared is not None and spared.layer == layer:
                protected[spared.expert] = True
            ids = ids.clone()
            for own in (step == i for i in range(steps)):
                kinds = torch.full((int(own.sum()),), reference.DECODE)
                ids[own] = reference.sere(
                    ids[own], weights[own], kinds, similarity[layer], protected, PRIMARY, 0.0
                )
            return logits, weights, ids

        return route

    hooks = []
    for layer, block in enumerate(moe_blocks(model).values()):
        gate = block.gate
        assert isinstance(gate, nn.Module)
        hooks.append(gate.register_forward_hook(router(layer)))  # type: ignore[arg-type]
    ids = torch.tensor([sample.prompt + sample.answer])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    said = logits[start - 1 : -1].float()
    return float(functional.cross_entropy(said, ids[0, start:], reduction="sum"))


def loss_of(model: nn.Module, sample: Encoded, layers: int = tiny.LAYERS) -> AnswerLoss:
    return AnswerLoss(model, sample, similarities(layers), PRIMARY, BATCH)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_short_cuts_change_nothing(family: str) -> None:
    model = tiny.model(family)
    loss = loss_of(model, SAMPLE)
    shares_the_prompt = family != "qwen3_5_moe"
    assert loss.rows == (11 if shares_the_prompt else 20)
    similarity = similarities()
    moved = whole(model, SAMPLE, None, similarity)
    assert loss(None) == pytest.approx(moved, rel=1e-5)
    differences = []
    for layer in range(tiny.LAYERS):
        for expert in range(tiny.EXPERTS):
            spared = Spared(layer, expert)
            want = whole(model, SAMPLE, spared, similarity)
            assert loss(spared) == pytest.approx(want, rel=1e-5, abs=1e-5), spared
            differences.append(abs(want - moved))
    assert sum(x > 1e-3 for x in differences) > 5
    # Nothing stays behind, and the same is said again.
    assert whole(model, SAMPLE, None, similarity) == moved
    again = Spared(1, 0)
    assert loss(again) == loss(again)
    for layer in decoder_layers(model):
        assert "forward" not in vars(layer)
        assert not any(module._forward_pre_hooks for module in layer.modules())


def test_layers_below_are_not_run() -> None:
    model = tiny.model("qwen3_moe")
    loss = loss_of(model, SAMPLE)
    ran: list[int] = []
    for number, layer in enumerate(decoder_layers(model)):
        norm = layer.input_layernorm
        assert isinstance(norm, nn.Module)
        norm.register_forward_hook(lambda *_, number=number: ran.append(number))
    for expert in range(tiny.EXPERTS):
        loss(Spared(1, expert))
    assert len(ran) > 1 and set(ran) == {1}


def test_experts_that_no_row_is_moved_away_from_are_not_tried() -> None:
    model = tiny.model("qwen3_moe")
    loss = loss_of(model, drawn(5, 2, 3))  # one decoded row, of two secondary slots
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    changed = [
        loss(Spared(layer, expert)) != loss(None)
        for layer in range(tiny.LAYERS)
        for expert in range(tiny.EXPERTS)
    ]
    assert len(runs) == sum(changed) == 2 * tiny.LAYERS


def test_an_answer_of_one_token_is_said_by_the_prompt() -> None:
    model = tiny.model("qwen3_moe")
    sample = drawn(5, 1, 4)
    loss = loss_of(model, sample)
    assert loss.rows == 0
    want = whole(model, sample, None, similarities())
    assert loss(Spared(0, 1)) == loss(None) == pytest.approx(want)


def test_the_layers_between_count_too() -> None:
    """A first layer without experts, so that rows of matrices and numbers of layers differ."""
    config = tiny.configuration("qwen3_moe")
    config.update({"num_hidden_layers": 3, "mlp_only_layers": [0]})
    config.layer_types = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = type(tiny.model("qwen3_moe"))(config).eval()
    loss = loss_of(model, SAMPLE, 2)
    for layer in range(2):
        for expert in range(tiny.EXPERTS):
            spared = Spared(layer, expert)
            want = whole(model, SAMPLE, spared, similarities(2))
            assert loss(spared) == pytest.approx(want, rel=1e-5)


def test_routes_that_come_another_way_are_refused() -> None:
    model = tiny.model("qwen3_moe")
    block = moe_blocks(model)[0]
    experts, gate = block.experts, block.gate
    assert isinstance(experts, nn.Module) and isinstance(gate, nn.Module)

    def forward(states: torch.Tensor) -> torch.Tensor:
        rows = states.flatten(0, 1)
        _, weights, ids = gate(rows)
        return experts(rows, top_k_index=ids, top_k_weights=weights).view_as(states)

    block.forward = forward
    with pytest.raises(CalibrationError, match="takes its routes in another way"):
        loss_of(model, SAMPLE)
    assert not any(module._forward_pre_hooks for module in model.modules())
