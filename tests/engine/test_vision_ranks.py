"""Scores and images over two real ranks: the same numbers as on one."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.engine.plugin.model import FusedGroups
from harness.engine.plugin.scored import scored
from harness.engine.server import free_port
from kernels.visionzip.attention import head_scores, mean_heads
from kernels.visionzip.reference import attention_received

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

HEADS, DIM, SCALE = 6, 16, 0.3
LENGTHS = (8, 20, 4, 36)
RANKS = 2


class Attention(nn.Module):
    """As far as `scored` knows one: queries and keys by name, and a scale."""

    scale = SCALE
    head_size = DIM

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Nothing that matters."""
        return query + key


class Block(nn.Module):
    """An encoder's layer with such an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.attn = Attention()


class Encoder(nn.Module):
    """Patches [n, 2 · HEADS · DIM] are their queries and keys; a token is the sum of four patches."""

    out_hidden_size = 2 * HEADS * DIM
    spatial_merge_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, pixels: Tensor, grid_thw: list[list[int]]) -> Tensor:
        """Features, [tokens, width]."""
        assert len(pixels) == sum(t * h * w for t, h, w in grid_thw)
        query, key = pixels.view(1, len(pixels), 2, HEADS, DIM).unbind(2)
        self.blocks[0].attn.attn(query=query, key=key)
        return pixels.unflatten(0, (-1, 4)).sum(1)


def patches() -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(sum(LENGTHS), 2 * HEADS * DIM, generator=g)


def by_heads(query: Tensor, key: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    """Scores and keys from this rank's heads, in two calls of the encoder."""
    attention, first = Attention(), sum(LENGTHS[:2])
    with scored(attention, LENGTHS, keys=True, sharded=True) as found:
        for part in (slice(0, first), slice(first, None)):
            attention(query=query[None, part, own], key=key[None, part, own])
    keys = [k for _, k in found if k is not None]
    return torch.cat([s for s, _ in found]), torch.cat(keys)


def by_images(pixels: Tensor) -> list[tuple[Tensor, ...]]:
    """What a model with a whole encoder on every rank makes of all images, and of one alone."""
    model: Any = types.SimpleNamespace(
        visual=Encoder(),
        use_data_parallel=True,
        _patches_at_once=24,
        _encoder_input=lambda pixels: pixels,
        _merge_unit=lambda: 4,
    )
    model._encoded_here = types.MethodType(FusedGroups._encoded_here, model)
    grids = [(1, 2, n // 2) for n in LENGTHS]
    with torch.no_grad():
        return [
            FusedGroups._encoded(model, pixels, grids, 0, keys=True),
            FusedGroups._encoded(model, pixels[:8], grids[:1], 0, keys=False),
        ]


def on_a_rank(rank: int, port: int, folder: str) -> None:
    """What one of the ranks finds, in a file."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()):
        where = f"tcp://127.0.0.1:{port}"
        init_distributed_environment(RANKS, rank, where, rank, "gloo")
        initialize_model_parallel(RANKS)
        query, key = patches().view(-1, 2, HEADS, DIM).unbind(1)
        each = HEADS // RANKS
        mine = slice(rank * each, (rank + 1) * each)
        found = {"heads": by_heads(query, key, mine), "images": by_images(patches())}
    torch.save(found, Path(folder) / f"{rank}.pt")


def test_two_ranks_find_what_one_does(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_a_rank, (free_port(), str(tmp_path)), nprocs=RANKS)
    query, key = patches().view(-1, 2, HEADS, DIM).unbind(1)
    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    want = mean_heads(head_scores(query, key, bounds, SCALE), HEADS)
    assert torch.allclose(want, attention_received(query, key, bounds, SCALE), rtol=1e-6)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        scores, keys = found["heads"]
        assert torch.equal(scores, want)
        assert torch.allclose(keys, key.mean(1), atol=1e-6)
        for got, rows in zip(found["images"], (sum(LENGTHS), LENGTHS[0]), strict=True):
            assert torch.equal(got[0], patches()[:rows].unflatten(0, (-1, 4)).sum(1))
            assert torch.allclose(got[1], want[:rows], rtol=1e-6)
        assert torch.allclose(found["images"][0][2], key.mean(1), atol=1e-6)
        assert len(found["images"][1]) == 2
