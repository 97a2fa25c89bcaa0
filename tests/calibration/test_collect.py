"""Collection over a model: every expert on every token, and the model left as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from harness.calibration import collect as module
from harness.calibration.checkpoints import moe_blocks
from harness.calibration.collect import collect, expert_outputs
from harness.calibration.measures import CkaAccumulator, FrobeniusAccumulator
from harness.calibration.similarity import CalibrationError
from harness.calibration.texts import GENERAL_TEXTS


@pytest.fixture(scope="module")
def model() -> Iterator[nn.Module]:
    """Three layers, the second without experts, so that rows and layer numbers differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=50,
            hidden_size=24,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
            initializer_range=0.2,
        )
        yield Qwen3MoeForCausalLM(config).eval()


def test_finds_the_layers_that_have_experts(model: nn.Module) -> None:
    assert list(moe_blocks(model)) == [0, 2]
    with pytest.raises(CalibrationError, match="no mixture-of-experts block"):
        moe_blocks(nn.Sequential(nn.Linear(2, 2)))


def test_every_expert_on_every_token(model: nn.Module) -> None:
    experts = moe_blocks(model)[0].experts
    assert isinstance(experts, nn.Module)
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = expert_outputs(experts, x)
        gate, up = (x @ experts.gate_up_proj[3].T).chunk(2, dim=-1)  # type: ignore[index]
        by_hand = (nn.functional.silu(gate) * up) @ experts.down_proj[3].T  # type: ignore[index]
    assert out.shape == (5, 7, 24)
    torch.testing.assert_close(out[3], by_hand, rtol=1e-5, atol=1e-6)


def test_distances_are_those_of_the_ordinary_hidden_states(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [torch.tensor([[1, 2, 3, 4]]), torch.tensor([[9, 8, 7], [6, 5, 4]])]
    seen: dict[int, list[Tensor]] = {0: [], 2: []}
    blocks = moe_blocks(model)
    handles = [
        blocks[n].register_forward_pre_hook(
            lambda _, args, n=n: seen[n].append(args[0].flatten(0, -2).clone())
        )
        for n in seen
    ]
    with torch.inference_mode():
        before = [model(input_ids=ids).logits for ids in batches]
    for handle in handles:
        handle.remove()
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 5 * 24)  # three tokens at a time
    grams = collect(model, batches)
    assert list(grams) == [0, 2]
    for layer, gram in grams.items():
        assert gram.tokens == 10
        assert isinstance(gram, FrobeniusAccumulator)
        with torch.inference_mode():
            outputs = expert_outputs(blocks[layer].experts, torch.cat(seen[layer]))  # type: ignore[arg-type]
        flat = outputs.double().flatten(1)
        torch.testing.assert_close(gram.distances(), torch.cdist(flat, flat), rtol=1e-5, atol=1e-6)
    cka = collect(model, batches, "cka")
    for layer, gram in cka.items():
        with torch.inference_mode():
            outputs = expert_outputs(blocks[layer].experts, torch.cat(seen[layer]))  # type: ignore[arg-type]
        at_once = CkaAccumulator(5)
        at_once.add(outputs)
        torch.testing.assert_close(gram.similarity(), at_once.similarity())
    with torch.inference_mode():
        after = [model(input_ids=ids).logits for ids in batches]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(block._forward_pre_hooks for block in blocks.values())


def test_hooks_go_even_when_the_model_fails(model: nn.Module) -> None:
    with pytest.raises(IndexError):
        collect(model, [torch.tensor([[1, 49, 50]])])  # 50 is outside the vocabulary
    assert not any(block._forward_pre_hooks for block in moe_blocks(model).values())


def test_texts_are_plain_and_distinct() -> None:
    assert len(set(GENERAL_TEXTS)) == len(GENERAL_TEXTS) >= 30
    assert all(text.isascii() and len(text) >= 60 for text in GENERAL_TEXTS)
