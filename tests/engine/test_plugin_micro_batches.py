"""A group's images go through the encoder a few at a time, and nobody can tell."""

from __future__ import annotations

import types
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from harness.engine.plugin import group as layout
from harness.engine.plugin import model, scored

GRIDS = [(1, 4, 6), (1, 2, 2), (1, 8, 4), (1, 2, 10), (1, 4, 4)]
WIDTH, HEADS = 8, 2


@pytest.mark.parametrize(
    ("patches", "limit", "runs"),
    [
        ([4], 100, [(0, 1)]),
        ([4, 4, 4], 8, [(0, 2), (2, 3)]),
        ([4, 4, 4], 100, [(0, 3)]),
        ([40, 4, 4], 8, [(0, 1), (1, 3)]),
        ([4, 40, 4], 8, [(0, 1), (1, 2), (2, 3)]),
        ([9, 9], 8, [(0, 1), (1, 2)]),
    ],
)
def test_runs_are_whole_images_and_no_longer_than_they_may_be(
    patches: list[int], limit: int, runs: list[tuple[int, int]]
) -> None:
    assert layout.micro_batches(patches, limit) == runs


class Attention(nn.Module):
    scale = 0.5

    def forward(self, *, query: Tensor, key: Tensor, cu_seqlens: Tensor) -> None:
        pass


class Tower(nn.Module):
    """An encoder of one block, which sees what vLLM's sees; its output is the mean of each merge unit."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial_merge_size = 2
        self.project = nn.Linear(WIDTH, 2 * HEADS * WIDTH)
        block = nn.Module()
        block.attn = nn.Module()
        block.attn.attn = Attention()
        self.blocks = nn.ModuleList([block])
        self.calls: list[int] = []

    def forward(self, pixels: Tensor, grid_thw: Sequence[Sequence[int]]) -> Tensor:
        self.calls.append(len(pixels))
        lengths = torch.tensor([0, *(t * h * w for t, h, w in grid_thw)])
        assert int(lengths.sum()) == len(pixels)
        query, key = self.project(pixels).view(1, len(pixels), 2, HEADS, WIDTH).unbind(2)
        self.blocks[0].attn.attn(query=3 * query, key=key, cu_seqlens=lengths.cumsum(0))
        return pixels.view(-1, 4, WIDTH).mean(1)


class Model(model.FusedGroups):
    def __init__(self, tower: Tower, limit: int) -> None:
        self.visual = tower
        self.config = types.SimpleNamespace(
            vision_config=types.SimpleNamespace(spatial_merge_size=2)
        )
        self._patches_at_once = limit
        self._normalization = None  # floats come
        self.use_data_parallel = False


@pytest.mark.parametrize("policy", ["none", "visionzip", "random", "grid"])
@pytest.mark.parametrize("contextual", [0, 3])
@torch.no_grad()
def test_micro_batches_change_nothing(
    policy: str, contextual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored, "get_tensor_model_parallel_world_size", lambda: 1)
    torch.manual_seed(0)
    tower = Tower()
    pixels = torch.randn(sum(t * h * w for t, h, w in GRIDS), WIDTH)
    tokens = len(pixels) // 4
    spend = layout.Spend(
        keep=tokens if policy == "none" else tokens // 2,
        floor=1,
        layer=-1,
        policy=layout.POLICIES.index(policy),
        budget=0,
        contextual=contextual,
    )
    found = {}
    for limit in (10_000, 40, 1):
        tower.calls.clear()
        features, kept = Model(tower, limit)._encode_group(pixels, GRIDS, range(5), spend)
        assert len(kept) == spend.keep
        assert all(n <= max(limit, 32) for n in tower.calls)
        assert sum(tower.calls) == len(pixels)
        found[limit] = (features, kept, len(tower.calls))
    assert [n for _, _, n in found.values()] == [1, 3, 5]
    for features, kept, _ in found.values():
        assert torch.equal(kept, found[10_000][1])
        torch.testing.assert_close(features, found[10_000][0])


@pytest.mark.parametrize("option", ["cudagraph_mm_encoder", "compile_mm_encoder"])
def test_an_encoder_that_calls_no_hooks_is_refused(option: str) -> None:
    config = config_with(compilation_config=types.SimpleNamespace(**{option: True}))
    with pytest.raises(ValueError, match=f"{option}=true.*leave it at false"):
        Model(Tower(), 1)._start_groups(config)


def config_with(**changes: object) -> types.SimpleNamespace:
    """As far as it is read before anything is refused."""
    parallel = types.SimpleNamespace(pipeline_parallel_size=1, use_ubatching=False)
    return types.SimpleNamespace(**{"parallel_config": parallel, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size > 1"),
        (
            {"parallel_config": {"pipeline_parallel_size": 1, "use_ubatching": True}},
            "cut in two.*leave them off",
        ),
        ({"speculative_config": {"method": "mtp"}}, "speculative decoding by 'mtp'.*ngram"),
    ],
)
def test_what_would_lose_positions_is_refused(
    changes: dict[str, dict[str, object]], reason: str
) -> None:
    config = config_with(**{k: types.SimpleNamespace(**v) for k, v in changes.items()})
    with pytest.raises(ValueError, match=reason):
        Model(Tower(), 1)._start_groups(config)
