"""The pocket model as a PyTorch network that is quick to train: Qwen3-VL-MoE, every image of one size.

The arithmetic, parameter names and parameter layouts are those of the published checkpoints, so
`Network.state_dict` cast to bfloat16 is what ``model.safetensors`` holds. (Transformers 5 keeps the
experts in the other order, and swaps them as it loads.) What differs from Transformers'
``modeling_qwen3_vl_moe.py``, against which the tests hold this module, is speed alone:

* Images of one size share a grid, so the vision encoder is one batch, not a loop over images.
* All experts see all rows, in two matrix products; a row's weights are zero off its top-k. At these
  sizes that is four times the arithmetic of a loop over experts, and many times faster.
* Vision rows reach their places by an index made without asking the device for anything.

Sequences are padded on the right. Attention is causal and has no mask: padding comes after all real
tokens, so none of them sees it, and whoever sums a loss leaves its rows out. Experts have no
capacity limit, so padding takes nothing from real rows there either.

Weights are float32. Under ``torch.autocast`` with bfloat16, matrix products and attention run in
bfloat16; the residual stream, norms, rotations, routers and softmaxes stay in float32.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness.pocket.recipe import Recipe
from harness.pocket.special import token_id

NORM_EPS = 1e-6
VISION_ROPE_THETA = 10_000.0


class Vision(NamedTuple):
    """What the vision encoder makes of N images of H x W pixels.

    Attributes:
        merged: [N, T, hidden], one row for each merge unit, in raster order. T is H * W / 1024 for
            patches of 16 px merged 2 x 2.
        taps: a [N, T, hidden] for each DeepStack level.
        patches: [N, P, vision hidden], the last block's output, in raster order of patches; for a
            loss on the encoder itself.
    """

    merged: Tensor
    taps: tuple[Tensor, ...]
    patches: Tensor


class Output(NamedTuple):
    """What the language model makes of a batch.

    Attributes:
        hidden: [B, L, hidden], after the final norm; `Network.lm_head` takes its rows.
        router_logits: float32 [layers, B, L, experts].
    """

    hidden: Tensor
    router_logits: Tensor


# ------------------------------------------------------------------------------ rotary positions


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., tokens, width] by angles given as cos and sin, which broadcast to it."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left, right), -1) * cos + torch.cat((-right, left), -1) * sin


def _frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """float32 [width / 2]: theta ** -(0, 2, 4, … / width)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return 1.0 / theta**exponents


def text_angles(positions: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the interleaved multimodal rotation.

    Frequency j turns with the height where j = 1 (mod 3), with the width where j = 2 (mod 3), as
    far as their sections last, and with the time elsewhere.

    Args:
        positions: int64 [3, B, L]: time, height, width.
        recipe: for the sections, the head's width and theta.

    Returns:
        Two float32 [B, 1, L, head_dim].
    """
    device = positions.device
    _, tall, wide = recipe.mrope_section
    j = torch.arange(recipe.head_dim // 2, device=device)
    by_height = (j % 3 == 1) & (j < 3 * tall)
    by_width = (j % 3 == 2) & (j < 3 * wide)
    time, height, width = positions.float().unsqueeze(-1)
    turned = torch.where(by_height, height, torch.where(by_width, width, time))
    angles = turned * _frequencies(recipe.head_dim, recipe.rope_theta, device)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def vision_angles(rows: Tensor, columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the encoder's rotation.

    Args:
        rows, columns: int64 [P], each patch's place in its image.
        width: of a head; the first half of its frequencies turn with the row.

    Returns:
        Two float32 [P, width].
    """
    frequencies = _frequencies(width // 2, VISION_ROPE_THETA, rows.device)
    angles = torch.cat([place.float()[:, None] * frequencies for place in (rows, columns)], dim=-1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


# -------------------------------------------------------------------------------- vision encoder


def to_units(x: Tensor, merge: int) -> Tensor:
    """Raster order to the order of merge units: [..., rows, columns, d] to [..., P, d].

    Rows and columns are multiples of `merge`. A unit's patches are next to one another, in raster
    order; so are the units.
    """
    *lead, rows, columns, width = x.shape
    x = x.reshape(*lead, rows // merge, merge, columns // merge, merge, width)
    return x.transpose(-3, -4).reshape(*lead, rows * columns, width)


def to_raster(x: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """`to_units` undone: [..., P, d] to [..., P, d], row after row of patches."""
    *lead, _, width = x.shape
    x = x.reshape(*lead, rows // merge, columns // merge, merge, merge, width)
    return x.transpose(-3, -4).reshape(*lead, rows * columns, width)


class VisionAttention(nn.Module):
    """Full attention within each image."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.heads = r.vision_heads
        self.qkv = nn.Linear(r.vision_hidden_size, 3 * r.vision_hidden_size)
        self.proj = nn.Linear(r.vision_hidden_size, r.vision_hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shapes: x [N, P, d]; cos, sin [P, d / heads]; returned [N, P, d]."""
        q, k, v = self.heads_of(x, cos, sin)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(attended.transpose(1, 2).flatten(2))

    def heads_of(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned, and values: [N, heads, P, d / heads] each."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype), v


class VisionMlp(nn.Module):
    """Two layers with a GELU (tanh form) between them."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(r.vision_hidden_size, r.vision_intermediate_size)
        self.linear_fc2 = nn.Linear(r.vision_intermediate_size, r.vision_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] to [..., d]."""
        return self.linear_fc2(functional.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """One layer of the encoder."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(r.vision_hidden_size, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(r.vision_hidden_size, eps=NORM_EPS)
        self.attn = VisionAttention(r)
        self.mlp = VisionMlp(r)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shapes: x [N, P, d]; cos, sin [P, d / heads]; returned [N, P, d]."""
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Joins the patches of a merge unit into one row of the language model's width.

    Attributes:
        joined: DeepStack's mergers normalise the joined patches, the last one each patch.
    """

    def __init__(self, r: Recipe, *, joined: bool) -> None:
        super().__init__()
        self.width = r.vision_hidden_size * r.spatial_merge_size**2
        self.joined = joined
        self.norm = nn.LayerNorm(self.width if joined else r.vision_hidden_size, eps=NORM_EPS)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, r.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[N, P, d], in the order of merge units, to [N, T, hidden]."""
        shape = (x.shape[0], -1, self.width)
        x = self.norm(x.reshape(shape)) if self.joined else self.norm(x).reshape(shape)
        return self.linear_fc2(functional.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    """Linear map of a patch's pixels. A still image is the same frame `temporal_patch_size` times."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        kernel = (r.temporal_patch_size, r.patch_size, r.patch_size)
        self.side = r.patch_size
        self.proj = nn.Conv3d(3, r.vision_hidden_size, kernel, stride=kernel)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, rows, columns, d], patches in raster order."""
        side = self.side
        n, channels, height, width = pixels.shape
        patches = pixels.reshape(n, channels, height // side, side, width // side, side)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
        # The frames are equal, so their weights may be added up before they meet the pixels.
        return functional.linear(patches, self.proj.weight.sum(2).flatten(1), self.proj.bias)


class VisionEncoder(nn.Module):
    """The vision tower, with its mergers."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.recipe = r
        self.patch_embed = PatchEmbed(r)
        self.pos_embed = nn.Embedding(r.vision_grid**2, r.vision_hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(r) for _ in range(r.vision_depth))
        self.merger = Merger(r, joined=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(r, joined=True) for _ in r.vision_taps)

    def forward(self, pixels: Tensor) -> Vision:
        """[N, 3, H, W] to the images' rows; see `Network.encode`."""
        r, merge, device = self.recipe, self.recipe.spatial_merge_size, pixels.device
        rows, columns = (side // r.patch_size for side in pixels.shape[2:])
        x = self.patch_embed(pixels) + self._places(rows, columns)
        x = to_units(x, merge)
        place = torch.cartesian_prod(
            torch.arange(rows, device=device), torch.arange(columns, device=device)
        )
        row, column = to_units(place.view(rows, columns, 2), merge).unbind(-1)
        cos, sin = vision_angles(row, column, r.vision_hidden_size // r.vision_heads)
        taps = []
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if layer in r.vision_taps:
                level = r.vision_taps.index(layer)
                taps.append(self.deepstack_merger_list[level](x))
        return Vision(self.merger(x), tuple(taps), to_raster(x, rows, columns, merge))

    def _places(self, rows: int, columns: int) -> Tensor:
        """float32 [rows, columns, d]: the learned square grid, stretched so that its corners meet.

        Bilinear interpolation is a matrix on either side, unlike `functional.interpolate` with a
        deterministic gradient.
        """
        side, device = self.recipe.vision_grid, self.pos_embed.weight.device
        grid = self.pos_embed.weight.view(side, side, -1)
        down, across = (self._hats(n, side, device) for n in (rows, columns))
        with torch.autocast(device.type, enabled=False):
            return torch.einsum("ri,cj,ijd->rcd", down, across, grid)

    @staticmethod
    def _hats(points: int, side: int, device: torch.device) -> Tensor:
        """float32 [points, side]: weights of linear interpolation between `side` nodes."""
        at = torch.arange(points, device=device) * ((side - 1) / max(points - 1, 1))
        return (1 - (at[:, None] - torch.arange(side, device=device)).abs()).clamp(min=0)


# -------------------------------------------------------------------------------- language model


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last axis; float32 in and out of it, whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to float32 [..., width]."""
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS))


class TextAttention(nn.Module):
    """Causal attention, grouped queries, queries and keys normalised per head."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.width = r.head_dim
        self.grouped = r.heads != r.kv_heads
        self.q_proj = nn.Linear(r.hidden_size, r.heads * r.head_dim, bias=False)
        self.k_proj = nn.Linear(r.hidden_size, r.kv_heads * r.head_dim, bias=False)
        self.v_proj = nn.Linear(r.hidden_size, r.kv_heads * r.head_dim, bias=False)
        self.o_proj = nn.Linear(r.heads * r.head_dim, r.hidden_size, bias=False)
        self.q_norm = RmsNorm(r.head_dim)
        self.k_norm = RmsNorm(r.head_dim)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, turned: shapes as of `forward`, to [B, heads, L, head_dim]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        v = v.transpose(1, 2)
        q = _rotate(self.q_norm(q).transpose(1, 2), cos, sin).to(v.dtype)
        k = _rotate(self.k_norm(k).transpose(1, 2), cos, sin).to(v.dtype)
        return q, k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shapes: x [B, L, hidden]; cos, sin [B, 1, L, head_dim]; returned [B, L, hidden]."""
        q, k, v = self.heads(x, cos, sin)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.grouped
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Scores experts for each row."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(r.experts, r.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] to float32 [rows, experts]."""
        # bfloat16 logits would tie, and so flip, experts near the k-th place.
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x.float(), self.weight.float())


def expert_weights(logits: Tensor, top_k: int) -> Tensor:
    """Softmax over all experts, the top-k kept and scaled to a sum of 1, zero elsewhere.

    Args:
        logits: float32 [..., experts].
        top_k: experts that a row keeps.

    Returns:
        float32 [..., experts].
    """
    probabilities = logits.softmax(-1)
    best, which = probabilities.topk(top_k, dim=-1, sorted=False)
    best = best / best.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, which, best)


class Experts(nn.Module):
    """Gated MLPs, all of them applied to all rows."""

    def __init__(self, r: Recipe) -> None:
        super().__init__()
        hidden, inner = r.hidden_size, r.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(r.experts, hidden, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(r.experts, inner, hidden))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """From x [rows, hidden] and weights [rows, experts] to [rows, hidden].

        A row's weight scales an expert's inner activations, so that the second product also sums
        over experts and no [rows, experts, hidden] is ever made. What is made is [rows, experts,
        2 * inner].
        """
        experts, hidden, twice = self.gate_up_proj.shape
        gate_up = x @ self.gate_up_proj.transpose(0, 1).reshape(hidden, experts * twice)
        gate, up = gate_up.view(-1, experts, twice).chunk(2, dim=-1)
        inner = functional.silu(gate) * up * weights.to(gate.dtype).unsqueeze(-1)
        return inner.flatten(1) @ self.down_proj.flatten(0, 1)


class MixtureOfExperts(nn.Module):
    """Router and experts.

    Attributes:
        pieces: 0 keeps the experts' activations for the backward pass; n > 0 splits the rows into n
            pieces, keeps none of them and computes them again, a piece at a time.
    """

    def __init__(self, r: Recipe, pieces: int) -> None:
        super().__init__()
        self.top_k = r.experts_per_token
        self.pieces = pieces
        self.gate = Router(r)
        self.experts = Experts(r)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, hidden] to the same shape, and router logits, float32 [B, L, experts]."""
        rows = x.flatten(0, 1)
        logits = self.gate(rows)
        weights = expert_weights(logits, self.top_k)
        if self.pieces == 0:
            y = self.experts(rows, weights)
        else:
            n = rows.shape[0]
            cuts = [n * i // self.pieces for i in range(self.pieces + 1)]
            y = torch.cat(
                [
                    checkpoint(self.experts, rows[a:b], weights[a:b], use_reentrant=False)
                    for a, b in itertools.pairwise(cuts)
                ]
            )
        return y.view(x.shape), logits.view(*x.shape[:-1], -1)


class TextBlock(nn.Module):
    """One layer of the language model."""

    def __init__(self, r: Recipe, pieces: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(r.hidden_size)
        self.self_attn = TextAttention(r)
        self.post_attention_layernorm = RmsNorm(r.hidden_size)
        self.mlp = MixtureOfExperts(r, pieces)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: x [B, L, hidden]; cos, sin [B, 1, L, head_dim].

        Returns:
            [B, L, hidden], and router logits, float32 [B, L, experts].
        """
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, logits = self.mlp(self.post_attention_layernorm(x))
        return x + y, logits


class LanguageModel(nn.Module):
    """Token embeddings, layers and the final norm."""

    def __init__(self, r: Recipe, pieces: int) -> None:
        super().__init__()
        self.recipe = r
        self.image_pad = token_id("<|image_pad|>")
        self.embed_tokens = nn.Embedding(r.vocab_size, r.hidden_size)
        self.layers = nn.ModuleList(TextBlock(r, pieces) for _ in range(r.layers))
        self.norm = RmsNorm(r.hidden_size)

    def forward(self, vision: Vision | None, tokens: Tensor, positions: Tensor) -> Output:
        """See `Network.forward`."""
        x = self.embed_tokens(tokens)
        shape = x.shape
        taps: tuple[Tensor, ...] = ()
        where = tokens
        if vision is not None:
            where = slots(tokens == self.image_pad, vision.merged.shape[:2].numel())
            rows = vision.merged.flatten(0, 1).to(x.dtype)
            x = x.flatten(0, 1).index_copy(0, where, rows).view(shape)
            taps = vision.taps
        cos, sin = text_angles(positions, self.recipe)
        logits = []
        for layer, block in enumerate(self.layers):
            x, scores = block(x, cos, sin)
            logits.append(scores)
            if layer < len(taps):
                rows = taps[layer].flatten(0, 1).to(x.dtype)
                x = x.flatten(0, 1).index_add(0, where, rows).view(shape)
        return Output(self.norm(x), torch.stack(logits))


def slots(mask: Tensor, count: int) -> Tensor:
    """Places of the set entries of a mask, in order, without asking the device how many there are.

    Args:
        mask: bool, any shape.
        count: how many entries are set.

    Returns:
        int64 [count], indices into the flattened mask.

    Raises:
        RuntimeError: another number of entries is set. On a GPU it comes later, as a device-side
            assertion.
    """
    flat = mask.flatten()
    rank = flat.cumsum(0)
    torch._assert_async(rank[-1] == count, "image pads and vision rows differ in number")
    # Unset entries, and set ones too many, all write to one slot more than there is.
    rank = torch.where(flat & (rank <= count), rank - 1, count)
    places = torch.zeros(count + 1, dtype=torch.int64, device=mask.device)
    return places.scatter_(0, rank, torch.arange(len(flat), device=mask.device))[:count]


class _Towers(nn.Module):
    """The part of a checkpoint that is called ``model``."""

    def __init__(self, r: Recipe, pieces: int) -> None:
        super().__init__()
        self.visual = VisionEncoder(r)
        self.language_model = LanguageModel(r, pieces)


class Network(nn.Module):
    """The whole model. Until `harness.pocket.initial.init` draws them, some weights are not set.

    Attributes:
        lm_head: [..., hidden] to [..., vocabulary]; the caller applies it to the rows that matter.
    """

    def __init__(self, recipe: Recipe, *, expert_pieces: int = 0) -> None:
        """Make the modules.

        Args:
            recipe: the sizes.
            expert_pieces: 0 keeps the experts' activations for the backward pass: per row and layer 6 *
                experts * inner bytes in bfloat16 if compiled, 10 if not. n > 0 keeps none of them
                and computes them again in n pieces of the rows.
        """
        super().__init__()
        self.recipe = recipe
        self.model = _Towers(recipe, expert_pieces)
        self.lm_head = nn.Linear(recipe.hidden_size, recipe.vocab_size, bias=False)

    def encode(self, pixels: Tensor) -> Vision:
        """Run the vision encoder.

        Args:
            pixels: float [N, 3, H, W] in [-1, 1]; H and W are multiples of a merge unit's side.

        Raises:
            ValueError: they are not.
        """
        side = self.recipe.patch_size * self.recipe.spatial_merge_size
        if pixels.shape[2] % side or pixels.shape[3] % side:
            raise ValueError(f"image sides must be multiples of {side}, not {list(pixels.shape)}")
        return self.model.visual(pixels)

    def forward(self, vision: Vision | None, tokens: Tensor, positions: Tensor) -> Output:
        """Run the language model.

        Vision rows take the places of image pads, image after image, row-major over the batch; the
        levels of `vision.taps` are added to those rows after the first layers, one level each.

        Args:
            vision: of all images of the batch, in the order of their pads; None where there are none.
            tokens: int64 [B, L], padded on the right, with anything but image pads.
            positions: int64 [3, B, L], as of `positions_of`.

        Raises:
            RuntimeError: there are more or fewer pads than vision rows; on a GPU, asynchronously.
        """
        return self.model.language_model(vision, tokens, positions)


def compile_blocks(
    network: Network, *, backend: str = "inductor", dynamic: bool | None = True
) -> None:
    """Compile the layers of both towers in place; names and parameters stay as they are.

    Layers of a kind share their code, and parameters are inputs of the compiled graph, so each kind
    is compiled once, not each layer.

    Args:
        network: changed in place.
        backend: of `torch.compile`.
        dynamic: whether batch and lengths are symbolic from the start; None lets PyTorch make them
            so when they first change, False compiles for each shape.
    """
    towers = network.model
    for block in [*towers.visual.blocks, *towers.language_model.layers]:
        block.compile(backend=backend, dynamic=dynamic, fullgraph=True)


# --------------------------------------------------------------------------------------- positions


def positions_of(tokens: Tensor, image_pad_id: int, grid: tuple[int, int]) -> Tensor:
    """Multimodal rotary positions: what Transformers' `get_rope_index` gives, without loops.

    A text token moves all three on by one. The tokens of an image whose first comes at p have time
    p, height p + row and width p + column; the token after the image comes at p + max(grid).

    Args:
        tokens: int64 [B, L]. Every image is a run of rows * columns pads; images may touch.
        image_pad_id: the pads.
        grid: rows and columns of every image, in merged tokens.

    Returns:
        int64 [3, B, L]: time, height, width. Padding on the right counts as text.
    """
    rows, columns = grid
    pads = (tokens == image_pad_id).long()
    within = (pads.cumsum(-1) - 1) % (rows * columns) * pads
    last = (within == rows * columns - 1) & pads.bool()
    steps = torch.where(last, max(grid), 1 - pads)
    base = steps.cumsum(-1) - steps
    return torch.stack((base, base + within // columns, base + within % columns))
