"""Images spread over ranks come back in prompt order."""

from __future__ import annotations

import pytest
import torch

from harness.engine.plugin.shards import gathered, share_out


@pytest.mark.parametrize(
    ("patches", "ranks", "want"),
    [
        ([4], 1, [[0]]),
        ([4, 4, 4], 2, [[0, 2], [1]]),
        ([10, 4, 4, 4], 2, [[0], [1, 2, 3]]),
        ([1, 9, 2, 8], 2, [[0, 1], [2, 3]]),
        ([16], 3, [[0], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_the_largest_go_to_whoever_has_least(
    patches: list[int], ranks: int, want: list[list[int]]
) -> None:
    assert share_out(patches, ranks) == want


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_every_rank_gets_all_rows_in_order(ranks: int, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(ranks)
    rows = [4, 9, 1, 16, 4, 2]
    images = [torch.randn(n, *shape, generator=g) for n in rows]
    shares = share_out(rows, ranks)
    nothing = torch.zeros(0, *shape)
    own = [torch.cat([nothing, *(images[i] for i in share)]) for share in shares]
    longest = max(map(len, own))

    def padded(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, torch.zeros(longest - len(t), *shape)])

    for rank in range(ranks):

        def gather(mine: torch.Tensor, rank: int = rank) -> torch.Tensor:
            assert torch.equal(mine, padded(own[rank]))
            return torch.cat([padded(t) for t in own])

        assert torch.equal(gathered(own[rank], rows, shares, gather), torch.cat(images))
