"""Random weights for the bundled model, drawn so that an untrained model behaves like a live one.

Nothing is trained. What the draw has to give a harness:

* **Lively activations.** Matrices are scaled by fan-in (standard deviation ``gain / sqrt(in)``),
  with gains under which attention, experts and images each move the residual stream about as much
  as the token embedding does. Greedy answers then depend on the text and on every image, and do
  not fall into a repetition.
* **No stammering.** A printable token's output row leans away from its own embedding, which the
  residual stream still carries: else an untrained model, once it repeats itself, never stops.
* **Readable answers.** Output rows of printable ASCII are full size, all others a hundredth: the
  model never emits broken UTF-8, a pad token, or an end of turn, so an answer always has the
  number of tokens that was asked for.
* **Expert families.** Independently drawn experts are all equally far apart, so their Frobenius
  similarity (1 - d / max d) is near 0 for every pair and SERE at a threshold of 0.5 would never
  move a token. Trained experts are not like that. Here the experts of a layer come in families:
  each is its family's base weight plus its own noise, at a noise level that differs by family.
  Inside a family the similarity is about 0.6 to 0.9, across families near 0. Which expert belongs
  to which family is shuffled for every layer, and the router ignores families.
* **Lively routing.** Router logits have a standard deviation above 1: the softmax is neither flat
  nor one-hot, and different tokens pick different experts.

Every tensor has its own random stream, keyed by seed and name, so adding or reordering tensors
changes no other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from harness.pocket.recipe import Recipe

Array = npt.NDArray[np.float32]

FAMILY_NOISE = (0.08, 0.22)
"""Share of a member's standard deviation that is its own: in the tightest and loosest family."""

GAINS: dict[str, float] = {
    "embedding": 1.0,
    "attention_sharpness": 2.4,
    "attention_out": 1.5,
    "router": 1.6,
    "expert_in": 1.0,
    "expert_out": 3.1,
    "output": 3.0,
    "silent_output": 0.01,
    "self_aversion": 0.3,
    "vision_positions": 0.3,
    "vision_attention": 1.4,
    "vision_out": 1.0,
    "vision_merger": 1.5,
    "bias": 0.1,
}
"""Multiples of the fan-in scale, found by measuring activations; see the module's docstring."""


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one tensor: independent of all others, the same wherever it is drawn."""
    digest = hashlib.sha256(f"pruneroute pocket/{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def families(r: Recipe, seed: int, layer: int) -> npt.NDArray[np.int64]:
    """Family of each expert of a layer: int64 [experts], values in [0, expert_families)."""
    members = np.arange(r.experts) % r.expert_families
    return stream(seed, f"families.{layer}").permutation(members)


def draw(r: Recipe, seed: int) -> Iterator[tuple[str, Array]]:
    """All tensors of the checkpoint, float32, under the names of the published checkpoints.

    Linear weights are [out, in]. Experts are fused and, as in the published files, transposed:
    ``gate_up_proj`` [experts, hidden, 2 * intermediate] (gate first), ``down_proj``
    [experts, intermediate, hidden].
    """
    yield from _language_model(r, seed)
    yield from _vision(r, seed)


def _normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Array:
    return stream(seed, name).standard_normal(shape, dtype=np.float32) * np.float32(std)


def _linear(seed: int, name: str, out: int, into: int, gain: float) -> tuple[str, Array]:
    return name, _normal(seed, name, (out, into), gain / math.sqrt(into))


def _language_model(r: Recipe, seed: int) -> Iterator[tuple[str, Array]]:
    hidden, width = r.hidden_size, r.head_dim
    root = "model.language_model"
    name = f"{root}.embed_tokens.weight"
    embedding = _normal(seed, name, (r.vocab_size, hidden), GAINS["embedding"])
    yield name, embedding
    for layer in range(r.layers):
        at = f"{root}.layers.{layer}"
        yield f"{at}.input_layernorm.weight", np.ones(hidden, np.float32)
        yield f"{at}.post_attention_layernorm.weight", np.ones(hidden, np.float32)
        yield _linear(seed, f"{at}.self_attn.q_proj.weight", r.heads * width, hidden, 1.0)
        yield _linear(seed, f"{at}.self_attn.k_proj.weight", r.kv_heads * width, hidden, 1.0)
        yield _linear(seed, f"{at}.self_attn.v_proj.weight", r.kv_heads * width, hidden, 1.0)
        yield _linear(
            seed,
            f"{at}.self_attn.o_proj.weight",
            hidden,
            r.heads * width,
            GAINS["attention_out"],
        )
        # Queries and keys are normalised, so these weights alone set how sharp attention is.
        sharp = np.full(width, math.sqrt(GAINS["attention_sharpness"]), np.float32)
        yield f"{at}.self_attn.q_norm.weight", sharp
        yield f"{at}.self_attn.k_norm.weight", sharp
        yield _linear(seed, f"{at}.mlp.gate.weight", r.experts, hidden, GAINS["router"])
        yield from _experts(r, seed, layer, f"{at}.mlp.experts")
    yield f"{root}.norm.weight", np.ones(hidden, np.float32)
    name, head = _linear(seed, "lm_head.weight", r.vocab_size, hidden, GAINS["output"])
    printable = np.zeros(r.vocab_size, dtype=bool)
    printable[0x20:0x7F] = True
    aversion = GAINS["self_aversion"] * GAINS["output"] / GAINS["embedding"] / math.sqrt(hidden)
    head -= np.float32(aversion) * embedding
    head[~printable] *= np.float32(GAINS["silent_output"])
    yield name, head


def _experts(r: Recipe, seed: int, layer: int, at: str) -> Iterator[tuple[str, Array]]:
    hidden, inner = r.hidden_size, r.moe_intermediate_size
    family = families(r, seed, layer)
    noise = np.linspace(*FAMILY_NOISE, r.expert_families, dtype=np.float32)[family][:, None, None]
    for name, shape, std in (
        (f"{at}.gate_up_proj", (hidden, 2 * inner), GAINS["expert_in"] / math.sqrt(hidden)),
        (f"{at}.down_proj", (inner, hidden), GAINS["expert_out"] / math.sqrt(inner)),
    ):
        base = _normal(seed, f"{name}.base", (r.expert_families, *shape), std)[family]
        own = _normal(seed, f"{name}.own", (r.experts, *shape), std)
        yield name, np.sqrt(1 - noise**2) * base + noise * own


def _vision(r: Recipe, seed: int) -> Iterator[tuple[str, Array]]:
    width, root = r.vision_hidden_size, "model.visual"
    name = f"{root}.patch_embed.proj.weight"
    shape = (width, 3, r.temporal_patch_size, r.patch_size, r.patch_size)
    yield name, _normal(seed, name, shape, 1 / math.sqrt(math.prod(shape[1:])))
    yield _bias(seed, f"{root}.patch_embed.proj.bias", width)
    name = f"{root}.pos_embed.weight"
    yield name, _normal(seed, name, (r.vision_grid**2, width), GAINS["vision_positions"])
    for layer in range(r.vision_depth):
        at = f"{root}.blocks.{layer}"
        yield from _layer_norm(f"{at}.norm1", width)
        yield from _layer_norm(f"{at}.norm2", width)
        name, qkv = _linear(seed, f"{at}.attn.qkv.weight", 3 * width, width, 1.0)
        qkv[: 2 * width] *= np.float32(GAINS["vision_attention"])
        yield name, qkv
        yield _bias(seed, f"{at}.attn.qkv.bias", 3 * width)
        yield _linear(seed, f"{at}.attn.proj.weight", width, width, GAINS["vision_out"])
        yield _bias(seed, f"{at}.attn.proj.bias", width)
        inner = r.vision_intermediate_size
        yield _linear(seed, f"{at}.mlp.linear_fc1.weight", inner, width, 1.0)
        yield _bias(seed, f"{at}.mlp.linear_fc1.bias", inner)
        yield _linear(seed, f"{at}.mlp.linear_fc2.weight", width, inner, GAINS["vision_out"])
        yield _bias(seed, f"{at}.mlp.linear_fc2.bias", width)
    yield from _merger(r, seed, f"{root}.merger", norm=width)
    merged = width * r.spatial_merge_size**2
    for tap in range(len(r.vision_taps)):
        # DeepStack mergers normalise after the patches of a merge unit are joined.
        yield from _merger(r, seed, f"{root}.deepstack_merger_list.{tap}", norm=merged)


def _merger(r: Recipe, seed: int, at: str, *, norm: int) -> Iterator[tuple[str, Array]]:
    merged = r.vision_hidden_size * r.spatial_merge_size**2
    yield from _layer_norm(f"{at}.norm", norm)
    yield _linear(seed, f"{at}.linear_fc1.weight", merged, merged, 1.0)
    yield _bias(seed, f"{at}.linear_fc1.bias", merged)
    yield _linear(seed, f"{at}.linear_fc2.weight", r.hidden_size, merged, GAINS["vision_merger"])
    yield _bias(seed, f"{at}.linear_fc2.bias", r.hidden_size)


def _layer_norm(at: str, width: int) -> Iterator[tuple[str, Array]]:
    yield f"{at}.weight", np.ones(width, np.float32)
    yield f"{at}.bias", np.zeros(width, np.float32)


def _bias(seed: int, name: str, width: int) -> tuple[str, Array]:
    return name, _normal(seed, name, (width,), GAINS["bias"])
