"""Images spread over ranks, each encoded whole by one of them (`mm_encoder_tp_mode=data`).

Pure functions: who encodes what, and how what was gathered goes back into prompt order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""[rows, …] of this rank to [ranks · rows, …] of all, in the order of ranks."""


def share_out(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """Which images each rank encodes: the largest first, to whoever has the fewest patches so far.

    Args:
        patches: of each image.
        ranks: how many there are; the first wins ties.

    Returns:
        For each rank, its images in prompt order.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for image in sorted(range(len(patches)), key=lambda i: -patches[i]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += patches[image]
    return [sorted(share) for share in shares]


def gathered(
    own: Tensor, rows: Sequence[int], shares: Sequence[Sequence[int]], gather: Gather
) -> Tensor:
    """All images' rows in prompt order, from this rank's images' rows.

    Args:
        own: [rows of this rank's images, …].
        rows: of each image.
        shares: images of each rank, as `share_out` gives them.
        gather: from all ranks; they call it together.

    Returns:
        [Σ rows, …].
    """
    held = [sum(rows[i] for i in share) for share in shares]
    padded = own.new_zeros((max(held), *own.shape[1:]))
    padded[: len(own)] = own
    parts: list[Tensor] = [own] * len(rows)
    for share, of_rank in zip(shares, gather(padded).split(max(held)), strict=True):
        sizes = [rows[i] for i in share]
        of_images = of_rank[: sum(sizes)].split(sizes)
        for image, part in zip(share, of_images, strict=True):
            parts[image] = part
    return torch.cat(parts)
