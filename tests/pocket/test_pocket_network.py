"""The training network against Transformers: the same numbers from the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, Qwen3VLMoeForConditionalGeneration

from harness.pocket.initial import init
from harness.pocket.losses import balance_loss
from harness.pocket.network import (
    Network,
    compile_blocks,
    expert_weights,
    positions_of,
    to_raster,
    to_units,
)
from harness.pocket.recipe import Recipe, model_config
from harness.pocket.special import token_id

# Every size that could be taken for another differs from it.
R = Recipe(
    hidden_size=80,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mrope_section=(12, 10, 10),
    experts=8,
    experts_per_token=3,
    moe_intermediate_size=24,
    vision_hidden_size=48,
    vision_depth=3,
    vision_heads=3,
    vision_intermediate_size=72,
    vision_taps=(0, 2),
    vision_grid=7,
)
PAD = token_id("<|image_pad|>")
START, END = token_id("<|vision_start|>"), token_id("<|vision_end|>")
SIZES = [(192, 192), (64, 96), (256, 128)]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(seed: int = 0, **options: Any) -> Network:
    """A network whose norms and biases matter, too."""
    network = Network(R, **options)
    init(network, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return network


@pytest.fixture(scope="module")
def network() -> Network:
    return make().eval()


@pytest.fixture(scope="module")
def reference(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Transformers' model, loaded from `state_dict` as from any published checkpoint."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(model_config(R)))
    save_file(network.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    model, report = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.eval()


def words(n: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def conversation(images: int, grid: tuple[int, int], seed: int) -> list[int]:
    """Text and images by turns, of lengths that vary with the seed."""
    ids = words(3 + seed % 4, seed)
    for i in range(images):
        ids += [START, *[PAD] * (grid[0] * grid[1]), END, *words(1 + (seed + i) % 5, seed + i + 1)]
    return ids


def batch(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Padded tokens, and which of them are real."""
    length = max(map(len, prompts))
    fill = token_id("<|endoftext|>")
    tokens = torch.tensor([p + [fill] * (length - len(p)) for p in prompts])
    valid = torch.tensor([[i < len(p) for i in range(length)] for p in prompts])
    return tokens, valid


def library_patches(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """What Transformers' image processor hands on: flat patches of two equal frames, and grids."""
    n, _, height, width = pixels.shape
    rows, columns = height // 16, width // 16
    frames = torch.stack((pixels, pixels), 1)
    frames = frames.view(n, 2, 3, rows // 2, 2, 16, columns // 2, 2, 16)
    flat = frames.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(n * rows * columns, -1)
    return flat, torch.tensor([[1, rows, columns]] * n)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("size", SIZES)
def test_images_as_transformers_encodes_them(
    network: Network, reference: Any, size: tuple[int, int]
) -> None:
    pixels = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    ours = network.encode(pixels)
    theirs = reference.model.visual(*library_patches(pixels))
    close(ours.merged.flatten(0, 1), theirs.pooler_output)
    assert len(ours.taps) == len(theirs.deepstack_features) == len(R.vision_taps)
    for tap, level in zip(ours.taps, theirs.deepstack_features, strict=True):
        close(tap.flatten(0, 1), level)
    rows, columns = size[0] // 16, size[1] // 16
    last = theirs.last_hidden_state.view(3, rows * columns, -1)
    close(ours.patches, to_raster(last, rows, columns, 2))


def test_raster_order_and_back() -> None:
    patches = torch.arange(24).view(4, 6, 1)
    units = to_units(patches, 2)
    assert units.flatten().tolist()[:8] == [0, 1, 6, 7, 2, 3, 8, 9]
    assert to_raster(units, 4, 6, 2).flatten().tolist() == list(range(24))


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "images"),
    [(SIZES[0], [0, 0, 0]), *[(size, [1, 1, 1]) for size in SIZES], (SIZES[1], [2, 0, 3])],
    ids=["text", "square", "wide", "tall", "several"],
)
def test_answers_as_transformers_gives_them(
    network: Network, reference: Any, size: tuple[int, int], images: list[int]
) -> None:
    """Ragged prompts in one padded batch, each against Transformers on its own."""
    grid = size[0] // 32, size[1] // 32
    prompts = [conversation(n, grid, seed) for seed, n in enumerate(images)]
    tokens, _ = batch(prompts)
    n = sum(images)
    pixels = torch.rand(n, 3, *size, generator=torch.Generator().manual_seed(2)) * 2 - 1
    vision = network.encode(pixels) if n else None
    output = network(vision, tokens, positions_of(tokens, PAD, grid))
    logits = network.lm_head(output.hidden)
    assert output.router_logits.shape == (R.layers, *tokens.shape, R.experts)

    seen = 0
    for row, (prompt, count) in enumerate(zip(prompts, images, strict=True)):
        given: dict[str, Any] = {}
        if count:
            flat, grids = library_patches(pixels[seen : seen + count])
            given = {"pixel_values": flat, "image_grid_thw": grids}
            given["mm_token_type_ids"] = (torch.tensor([prompt]) == PAD).int()
        seen += count
        theirs = reference(
            torch.tensor([prompt]),
            output_router_logits=True,
            output_hidden_states=True,
            **given,
        )
        close(logits[row, : len(prompt)], theirs.logits[0])
        close(output.hidden[row, : len(prompt)], theirs.hidden_states[-1][0])
        ours = output.router_logits[:, row, : len(prompt)]
        close(ours, torch.stack(theirs.router_logits).view_as(ours))


@pytest.mark.parametrize("grid", [(6, 6), (2, 3), (8, 4), (1, 1)])
def test_positions_as_transformers_gives_them(reference: Any, grid: tuple[int, int]) -> None:
    images = [0, 1, 2, 3, 1]
    prompts = [conversation(n, grid, seed) for seed, n in enumerate(images)]
    prompts[-1] = prompts[-1][4:-1]  # begins with an image, or nearly
    tokens, valid = batch(prompts)
    theirs, _ = reference.model.get_rope_index(
        tokens,
        mm_token_type_ids=(tokens == PAD).int(),
        image_grid_thw=torch.tensor([[1, 2 * grid[0], 2 * grid[1]]] * sum(images)),
        attention_mask=valid.long(),
    )
    ours = positions_of(tokens, PAD, grid)
    assert ours.dtype == torch.int64
    assert torch.equal(ours[:, valid], theirs[:, valid])


def test_images_that_touch_are_told_apart() -> None:
    tokens = torch.tensor([[7, *[PAD] * 4, 8]])
    assert positions_of(tokens, PAD, (1, 2))[0].tolist() == [[0, 1, 1, 3, 3, 5]]
    assert positions_of(tokens, PAD, (1, 2))[2].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_pads_and_vision_rows_must_agree(network: Network) -> None:
    vision = network.encode(torch.zeros(1, 3, 64, 64))
    for pads in (3, 5):
        tokens = torch.tensor([[1, *[PAD] * pads, 2]])
        with pytest.raises(RuntimeError, match="differ in number"):
            network(vision, tokens, positions_of(tokens, PAD, (2, 2)))
    with pytest.raises(ValueError, match="multiples of 32"):
        network.encode(torch.zeros(1, 3, 64, 48))


def loss_of(network: Network, seed: int = 0, prompts: int = 2) -> Tensor:
    """A loss that everything takes part in."""
    pixels = torch.rand(prompts, 3, 64, 96, generator=torch.Generator().manual_seed(seed))
    tokens, valid = batch([conversation(1, (2, 3), seed + i) for i in range(prompts)])
    vision = network.encode(pixels)
    output = network(vision, tokens, positions_of(tokens, PAD, (2, 3)))
    target = tokens.roll(-1, 1)
    loss = torch.nn.functional.cross_entropy(
        network.lm_head(output.hidden[valid]).float(), target[valid]
    )
    loss = loss + balance_loss(output.router_logits, valid, R.experts_per_token)
    return loss + vision.patches.float().square().mean()


def gradients(network: Network, **options: Any) -> list[Tensor]:
    network.zero_grad()
    loss_of(network, **options).backward()
    return [p.grad for p in network.parameters() if p.grad is not None]


def test_gradients_reach_every_parameter(network: Network) -> None:
    gradients(network, prompts=4)
    idle = [
        name
        for name, p in network.named_parameters()
        if p.grad is None or not p.grad.isfinite().all() or not p.grad.abs().sum() > 0
    ]
    assert idle == []
    network.zero_grad()


def test_recomputed_experts_give_the_same_gradients() -> None:
    whole = gradients(make())
    for pieces in (1, 3):
        for a, b in zip(whole, gradients(make(expert_pieces=pieces)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("pieces", "backend", "autocast"), [(0, "aot_eager", False), (2, "eager", True)]
)
def test_one_graph_for_each_kind_of_block(pieces: int, backend: str, autocast: bool) -> None:
    """Whole graphs, whatever the batch, the length and the layer."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, plain = make(expert_pieces=pieces), make(expert_pieces=pieces)
    compile_blocks(compiled, backend=backend)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for seed, prompts in ((0, 2), (1, 3)):
        options = {"seed": seed, "prompts": prompts}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            both = zip(gradients(plain, **options), gradients(compiled, **options), strict=True)
        for a, b in both:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


def test_under_autocast(network: Network) -> None:
    """Nearly the same in bfloat16, with float32 where it matters."""
    tokens, _ = batch([conversation(1, (2, 3), 0)])
    positions = positions_of(tokens, PAD, (2, 3))
    pixels = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = network(network.encode(pixels), tokens, positions)
        with torch.autocast("cpu", torch.bfloat16):
            vision = network.encode(pixels)
            output = network(vision, tokens, positions)
            assert network.lm_head(output.hidden).dtype == torch.bfloat16
    assert vision.merged.dtype == torch.bfloat16
    assert vision.patches.dtype == output.hidden.dtype == output.router_logits.dtype
    assert output.hidden.dtype == torch.float32
    assert (output.hidden - exact.hidden).square().mean() < 0.02 * exact.hidden.square().mean()


def test_expert_weights_are_the_top_k_renormalised() -> None:
    weights = expert_weights(torch.tensor([[0.0, 2.0, 1.0, -5.0]]), 2)
    expected = torch.tensor([2.0, 1.0]).softmax(0)
    torch.testing.assert_close(weights, torch.tensor([[0.0, expected[0], expected[1], 0.0]]))


def test_balance_loss() -> None:
    even = torch.eye(4).repeat(2, 1, 1)[None] * 30  # [1, 2, 4, 4]: every expert as often
    valid = torch.ones(2, 4, dtype=torch.bool)
    assert balance_loss(even, valid, 1).item() == pytest.approx(1.0)
    one = torch.zeros(3, 2, 4, 4)
    one[..., 2] = 30
    assert balance_loss(one, valid, 1).item() == pytest.approx(4.0)
    # Rows that do not count change nothing.
    mixed = torch.cat((even, one[:1]), dim=2)
    counted = torch.cat((valid, ~valid), dim=1)
    assert balance_loss(mixed, counted, 1).item() == pytest.approx(1.0)


def test_balance_loss_is_the_librarys_over_k() -> None:
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

    logits = torch.randn(1, 3, 7, 8, generator=torch.Generator().manual_seed(0))
    valid = torch.rand(3, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    theirs = load_balancing_loss_func((logits.view(-1, 8),), 8, 3, valid)
    torch.testing.assert_close(balance_loss(logits, valid, 3), theirs / 3)


def test_init_is_scaled_by_fan_in_and_reproducible() -> None:
    a, b = Network(R), Network(R)
    init(a, 5)
    init(b, 5)
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
    layer = a.model.language_model.layers[0]
    assert layer.self_attn.q_proj.weight.detach().std() == pytest.approx(80**-0.5, rel=0.05)
    assert layer.mlp.experts.gate_up_proj.detach().std() == pytest.approx(80**-0.5, rel=0.05)
    assert layer.mlp.experts.down_proj.detach().std() == pytest.approx(0.3 * 24**-0.5, rel=0.05)
    x = torch.randn(500, R.hidden_size, generator=torch.Generator().manual_seed(0))
    assert 0.3 < layer.mlp.gate(layer.input_layernorm(x)).std() < 1
    embedded = a.model.visual.patch_embed(torch.randn(4, 3, 64, 64))
    assert embedded.detach().std() == pytest.approx(1, rel=0.1)


def test_experts_start_in_families() -> None:
    network = Network(R)
    init(network, 0, families=4, noise=0.2)
    for name in ("gate_up_proj", "down_proj"):
        experts = getattr(network.model.language_model.layers[1].mlp.experts, name).flatten(1)
        alike = torch.corrcoef(experts.detach())
        kin = alike > 0.5
        assert (kin.sum(1) == 2).all()  # itself and the other of its family
        assert alike[kin & ~torch.eye(8, dtype=torch.bool)].mean() == pytest.approx(0.96, abs=0.02)
        assert alike[~kin].abs().max() < 0.2
    with pytest.raises(ValueError, match="families"):
        init(network, 0, families=9)
    with pytest.raises(ValueError, match="noise"):
        init(network, 0, noise=1.5)


def test_config_is_the_one_transformers_reads(reference: Any) -> None:
    """Constants that the recipe does not hold."""
    from harness.pocket.network import NORM_EPS, VISION_ROPE_THETA

    config: Any = AutoConfig.for_model(**model_config(R))
    assert config.text_config.rms_norm_eps == NORM_EPS
    assert reference.config.vision_config.rope_parameters["rope_theta"] == VISION_ROPE_THETA
