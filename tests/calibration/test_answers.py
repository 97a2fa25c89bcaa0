"""The short cuts of answers' loss change nothing, in any family; and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from harness.calibration.answers import AnswerLoss
from harness.calibration.checkpoints import decoder_layers, moe_blocks
from harness.calibration.protection import Reroute
from harness.calibration.samples import Encoded
from harness.calibration.similarity import CalibrationError
from tests.calibration import tiny

PRIMARY = 2


def drawn(prompt: int, answer: int, seed: int) -> Encoded:
    own = torch.Generator().manual_seed(seed)
    ids = torch.randint(tiny.TEXT["vocab_size"], (prompt + answer,), generator=own).tolist()
    return Encoded(tuple(ids[:prompt]), tuple(ids[prompt:]))


SAMPLE = drawn(9, 6, 1)


@torch.inference_mode()
def whole(model: nn.Module, sample: Encoded, reroute: Reroute | None) -> float:
    """The same loss from one pass over everything, with what the router says replaced."""
    start = len(sample.prompt)

    def route(
        _gate: nn.Module, _args: object, said: tuple[torch.Tensor, ...]
    ) -> tuple[object, ...]:
        logits, weights, ids = said
        ids = ids.clone()
        assert reroute is not None
        for row in range(start, len(ids)):  # the router's slots are sorted by weight
            for slot in range(PRIMARY, tiny.TOP_K):
                if ids[row, slot] == reroute.expert:
                    ids[row, slot] = reroute.target
        return logits, weights, ids

    hooks = []
    if reroute is not None:
        block = list(moe_blocks(model).values())[reroute.layer]
        gate = block.gate
        assert isinstance(gate, nn.Module)
        hooks.append(gate.register_forward_hook(route))
    ids = torch.tensor([sample.prompt + sample.answer])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    said = logits[start - 1 : -1].float()
    return float(functional.cross_entropy(said, ids[0, start:], reduction="sum"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_short_cuts_change_nothing(family: str) -> None:
    model = tiny.model(family)
    loss = AnswerLoss(model, SAMPLE, PRIMARY)
    shares_the_prompt = family != "qwen3_5_moe"
    assert loss.rows == (5 if shares_the_prompt else 14)
    plain = whole(model, SAMPLE, None)
    assert loss(None) == pytest.approx(plain, rel=1e-5)
    increases = []
    for layer in range(tiny.LAYERS):
        for expert in range(tiny.EXPERTS):
            reroute = Reroute(layer, expert, (expert + 3) % tiny.EXPERTS)
            want = whole(model, SAMPLE, reroute)
            assert loss(reroute) == pytest.approx(want, rel=1e-5, abs=1e-5), reroute
            increases.append(abs(want - plain))
    assert sum(x > 1e-3 for x in increases) > 5
    # Nothing stays behind, and the same is said again.
    assert whole(model, SAMPLE, None) == plain
    again = Reroute(1, 0, 3)
    assert loss(again) == loss(again)
    for layer in decoder_layers(model):
        assert "forward" not in vars(layer)
        assert not any(module._forward_pre_hooks for module in layer.modules())


def test_layers_below_are_not_run() -> None:
    model = tiny.model("qwen3_moe")
    loss = AnswerLoss(model, SAMPLE, PRIMARY)
    ran: list[int] = []
    for number, layer in enumerate(decoder_layers(model)):
        norm = layer.input_layernorm
        assert isinstance(norm, nn.Module)
        norm.register_forward_hook(lambda *_, number=number: ran.append(number))
    for expert in range(tiny.EXPERTS):
        loss(Reroute(1, expert, (expert + 1) % tiny.EXPERTS))
    assert len(ran) > 3 and set(ran) == {1}


def test_experts_that_no_decoded_row_has_are_not_tried() -> None:
    model = tiny.model("qwen3_moe")
    loss = AnswerLoss(model, drawn(5, 2, 3), PRIMARY)  # one decoded row, of two secondary slots
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    changed = [
        loss(Reroute(layer, expert, 0 if expert else 1)) != loss(None)
        for layer in range(tiny.LAYERS)
        for expert in range(tiny.EXPERTS)
    ]
    assert len(runs) == sum(changed) == 2 * tiny.LAYERS


def test_an_answer_of_one_token_is_said_by_the_prompt() -> None:
    model = tiny.model("qwen3_moe")
    sample = drawn(5, 1, 4)
    loss = AnswerLoss(model, sample, PRIMARY)
    assert loss.rows == 0
    assert loss(Reroute(0, 1, 2)) == loss(None) == pytest.approx(whole(model, sample, None))


def test_the_layers_between_count_too() -> None:
    """A first layer without experts, so that rows of matrices and numbers of layers differ."""
    config = tiny.configuration("qwen3_moe")
    config.update({"num_hidden_layers": 3, "mlp_only_layers": [0]})
    config.layer_types = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = type(tiny.model("qwen3_moe"))(config).eval()
    loss = AnswerLoss(model, SAMPLE, PRIMARY)
    for layer in range(2):
        for expert in range(tiny.EXPERTS):
            reroute = Reroute(layer, expert, (expert + 1) % tiny.EXPERTS)
            assert loss(reroute) == pytest.approx(whole(model, SAMPLE, reroute), rel=1e-5)


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
        AnswerLoss(model, SAMPLE, PRIMARY)
    assert not any(module._forward_pre_hooks for module in model.modules())
