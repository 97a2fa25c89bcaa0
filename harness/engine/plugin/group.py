"""The fused image group: how the images of one turn become one multimodal item of fixed length.

vLLM fixes the number of placeholders of an item before the encoder has run, but how a shared budget
splits over images is known only after. So all images of a turn, together with the text between them,
form one item of K vision tokens plus that text; what goes where inside it is decided in the encoder.

Pure functions over plain data and tensors; nothing here knows vLLM.

Positions are those of the unpruned prompt (VisionZip's Qwen port): a kept token keeps its (t, h, w),
text keeps its place. Outside the group they depend on the images' sizes alone and are right from the
start. Inside, every row is admitted at the group's first position and carries its own offset to it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.visionzip.budget import kept_count
from kernels.visionzip.contextual import contextual_count
from kernels.visionzip.selection import BUDGETS

LAYOUT_VERSION = 3
"""Goes into every group's hash: rows cached under another layout are never re-used."""

POLICIES = ("none", "visionzip", "random", "grid", "downscale")
"""Ways to have fewer tokens: none of them, by the attention that tokens receive, or one of the controls:
at random, at even distances, or by encoding smaller images."""

MERGES = ("none", "contextual")
"""What becomes of tokens that do not stay: they are dropped, or merged into some of the rows."""

_RANDOM_SEED = 20_240_917
"""Goes into every random choice; another number would be another draw."""


@dataclass(frozen=True)
class VisionRequest:
    """The vision lever as one request asks for it.

    Attributes:
        policy: how tokens are chosen, one of `POLICIES`.
        retain_ratio: share of a turn's vision tokens to keep, in (0, 1].
        min_tokens_per_image: floor for every image, in tokens.
        layer: encoder layer that scores the tokens; negative counts from the end. It, `budget`,
            `merge` and `contextual_share` are read by "visionzip" alone.
        budget: how a turn's tokens are shared out over its images, one of
            `kernels.visionzip.selection.BUDGETS`.
        merge: what becomes of the other tokens, one of `MERGES`.
        contextual_share: share of the kept rows that others are merged into, in [0, 1).
    """

    retain_ratio: float = 1.0
    min_tokens_per_image: int = 1
    layer: int = -1
    policy: str = "visionzip"
    budget: str = "log_excess"
    merge: str = "none"
    contextual_share: float = 0.1

    def __post_init__(self) -> None:
        for name, known in (("policy", POLICIES), ("budget", BUDGETS), ("merge", MERGES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}"
                )
        share = self.contextual_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"contextual_share={share!r} must be a number in [0, 1)")
        for name in ("min_tokens_per_image", "layer"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number")
        ratio = self.retain_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise ValueError(f"retain_ratio={ratio!r} must be a number in (0, 1]")
        if self.min_tokens_per_image < 0:
            raise ValueError(
                f"min_tokens_per_image={self.min_tokens_per_image} must not be negative"
            )

    @property
    def prunes(self) -> bool:
        """Whether any token may go."""
        return self.policy != "none" and self.retain_ratio < 1


@dataclass(frozen=True)
class Spend:
    """How a group's budget is spent: what the encoder is told, as plain numbers.

    Attributes:
        keep: rows of vision tokens.
        floor: fewest of each image.
        layer: encoder layer that scores.
        policy, budget: places in `POLICIES` and `kernels.visionzip.selection.BUDGETS`.
        contextual: rows of `keep` that others are merged into.
    """

    keep: int
    floor: int
    layer: int
    policy: int
    budget: int
    contextual: int


@dataclass(frozen=True)
class Span:
    """Placeholders of one image in a prompt: first token and number of tokens."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The token after the last."""
        return self.offset + self.length


def group_spans(
    token_ids: Sequence[int], spans: Sequence[Span], turn_end_id: int
) -> list[list[int]]:
    """Which images belong together: those with no end of turn between them.

    Args:
        token_ids: the prompt, placeholders expanded.
        spans: placeholders of the images, ascending.
        turn_end_id: token that closes a turn.

    Returns:
        Indices into `spans`, one list for each group, in order.
    """
    groups: list[list[int]] = []
    for index, span in enumerate(spans):
        if index and turn_end_id not in token_ids[spans[index - 1].end : span.offset]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def proportional_split(image_tokens: Sequence[int], keep: int) -> list[int]:
    """A split of `keep` over images by size alone (largest remainder; ties to the first image).

    It lays out the group's nominal token ids, which only echoes and penalties see.
    """
    total = sum(image_tokens)
    shares = [keep * n // total for n in image_tokens]
    by_remainder = sorted(
        range(len(image_tokens)), key=lambda i: (-(keep * image_tokens[i] % total), i)
    )
    for i in by_remainder[: keep - sum(shares)]:
        shares[i] += 1
    return shares


def spend_of(request: VisionRequest, image_tokens: Sequence[int]) -> Spend:
    """What a request means for a group of images.

    Args:
        request: the lever as it asks for it.
        image_tokens: tokens of each image, as it is encoded: after any downscaling.
    """
    floor, total = request.min_tokens_per_image, sum(image_tokens)
    whole = not request.prunes or request.policy == "downscale"
    keep = total if whole else kept_count(image_tokens, request.retain_ratio, floor)
    share = request.contextual_share if request.merge == "contextual" else 0.0
    floors = sum(min(floor, n) for n in image_tokens)
    zipped = request.policy == "visionzip"
    return Spend(
        keep=keep,
        floor=floor,
        layer=request.layer,
        policy=POLICIES.index(request.policy),
        budget=BUDGETS.index(request.budget),
        contextual=contextual_count(keep, share, floors, total) if zipped else 0,
    )


def check_scored_layer(request: VisionRequest, depth: int, whole: Sequence[int] | None) -> None:
    """Refuse to score tokens in a layer that shows them a window of their image only.

    There the attention that a token receives says how it does among its neighbours, not in the image.

    Args:
        request: the vision lever.
        depth: layers of the encoder; `request.layer` is one of them.
        whole: layers that attend to whole images; None where all do.

    Raises:
        ValueError: the request prunes by the scores of a window layer.
    """
    if whole is None or not request.prunes or request.policy != "visionzip":
        return
    if request.layer % depth not in whole:
        raise ValueError(
            f"layer={request.layer}: that layer of the vision encoder attends within windows; "
            f"vision.layer takes one that attends to whole images: {', '.join(map(str, whole))}"
        )


def micro_batches(patches: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cut a group's images into runs of at most `limit` patches; a larger image is a run by itself.

    Args:
        patches: of each image.
        limit: most patches of a run.

    Returns:
        First image and the one after the last, for each run, in order.
    """
    runs: list[tuple[int, int]] = []
    first, held = 0, 0
    for index, count in enumerate(patches):
        if index > first and held + count > limit:
            runs.append((first, index))
            first, held = index, 0
        held += count
    return [*runs, (first, len(patches))]


def group_hash(
    image_hashes: Sequence[str],
    grids: Sequence[Sequence[int]],
    gap_ids: Sequence[Sequence[int]],
    spend: Spend,
) -> str:
    """Identity of a group's rows: everything that they are a function of.

    The images (their hashes cover pixels and processor settings, unless a request named them; then
    their sizes at least count), the text between them, the budget and how it is spent. 64 hex digits.
    """
    parts = (
        LAYOUT_VERSION,
        tuple(image_hashes),
        tuple(tuple(map(int, g)) for g in grids),
        tuple(tuple(g) for g in gap_ids),
        astuple(spend),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def image_seed(pixel_values: Tensor, grid: Sequence[int]) -> int:
    """Seed of a picture's random choice: a hash of its content, so that repeats choose alike.

    Of the processed pixels, not of vLLM's own hash: that holds the model's path too, or is whatever
    name a request gave the picture.

    Args:
        pixel_values: [patches, width], any type.
        grid: (t, h, w) in patches.

    Returns:
        A number that int64 holds, >= 0.
    """
    digest = hashlib.sha256(repr((_RANDOM_SEED, *map(int, grid))).encode())
    digest.update(pixel_values.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def downscaled_grid(height: int, width: int, count: int) -> tuple[int, int]:
    """The grid of a smaller image, of at most `count` tokens and about the same proportions.

    Of the grids whose proportions are within a quarter of the image's, that with the most tokens,
    and of these the least distorted; where there is none, the least distorted one.

    Args:
        height, width: of the image [tokens].
        count: tokens that it may have, >= 1.

    Returns:
        Height and width [tokens], neither larger than the image's.
    """
    if count >= height * width:
        return height, width

    def rank(rows: int) -> tuple[float, ...]:
        columns = min(width, count // rows)
        distortion = abs(math.log(rows * width / (columns * height)))
        near = distortion <= math.log(1.25)
        return (near, rows * columns, -distortion) if near else (near, -distortion, 0)

    rows = max(range(1, min(height, count) + 1), key=rank)
    return rows, min(width, count // rows)


def group_key(identifier: str) -> int:
    """A 60-bit number from a group's identifier, by which telemetry finds it again."""
    return int(identifier[-15:], 16)


def group_extent(grids: Sequence[Sequence[int]], gap_lengths: Sequence[int]) -> int:
    """Positions that a group takes up: max(h, w) for each image, one for each token of text.

    Args:
        grids: (t, h, w) of each image, in merged tokens.
        gap_lengths: tokens between neighbouring images, one fewer than images.
    """
    return sum(max(h, w) for _, h, w in grids) + sum(gap_lengths)


def group_offsets(grids: Sequence[Sequence[int]], gap_lengths: Sequence[int]) -> np.ndarray:
    """Offset of every row of an unpruned group to the group's first position.

    Qwen-VL's M-RoPE: a token of an image is at its (t, h, w) in the grid counted from the image's
    first position, the next text at the largest of them plus one; text advances all three alike.

    Args:
        grids, gap_lengths: as for `group_extent`; t is 1 for images.

    Returns:
        [3, Σ t·h·w + Σ gaps] int64, in prompt order.
    """
    columns: list[np.ndarray] = []
    base = 0
    for index, (t, h, w) in enumerate(grids):
        columns.append(np.indices((t, h, w)).reshape(3, -1) + base)
        base += max(h, w)
        if index < len(gap_lengths):
            gap = gap_lengths[index]
            columns.append(np.broadcast_to(np.arange(gap) + base, (3, gap)))
            base += gap
    return np.concatenate(columns, axis=1)


def image_rows(image_tokens: Sequence[int], gap_lengths: Sequence[int]) -> np.ndarray:
    """Rows of an unpruned group that are vision tokens. [Σ tokens + Σ gaps] bool, in prompt order."""
    return np.concatenate(
        [
            np.full(n, kind)
            for lengths in zip(image_tokens, [*gap_lengths, 0], strict=True)
            for n, kind in zip(lengths, (True, False), strict=True)
        ]
    )


def prompt_positions(
    prompt_length: int, groups: Sequence[tuple[Span, int]]
) -> tuple[np.ndarray, int]:
    """Positions at admission: exact outside groups, the group's first position inside.

    Args:
        prompt_length: tokens of the prompt as vLLM counts it (after pruning).
        groups: placeholders and extent (`group_extent`) of each group, ascending.

    Returns:
        [3, prompt_length] int64, and the offset that turns a later token's index into its position.
    """
    line = np.empty(prompt_length, dtype=np.int64)
    done, position = 0, 0
    for span, extent in groups:
        text = span.offset - done
        line[done : span.offset] = np.arange(position, position + text)
        position += text
        line[span.offset : span.end] = position
        position += extent
        done = span.end
    line[done:] = np.arange(position, position + prompt_length - done)
    position += prompt_length - done
    return np.broadcast_to(line, (3, prompt_length)).copy(), position - prompt_length


def offset_columns(dtype: torch.dtype) -> int:
    """Columns of `dtype` that hold one row's three int32 offsets bit for bit."""
    return 3 * 4 // dtype.itemsize


def append_offsets(rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows with their position offsets behind them, as bit patterns.

    A bf16 number cannot hold 257; its 16 bits can hold half an int32.

    Args:
        rows: [n, width], 16- or 32-bit floating.
        offsets: [3, n] integer.

    Returns:
        [n, width + `offset_columns`], dtype of `rows`.
    """
    bits = offsets.to(rows.device, torch.int32).t().contiguous().view(rows.dtype)
    return torch.cat([rows, bits], dim=1)


def split_offsets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `append_offsets`: rows [n, width], and offsets [3, n] int64."""
    columns = offset_columns(rows.dtype)
    bits = rows[:, -columns:].contiguous().view(torch.int32)
    return rows[:, :-columns], bits.t().long()


def kept_per_image(kept: Tensor, image_tokens: Sequence[int]) -> list[int]:
    """How many of the kept indices fall into each image. `kept`: [keep] int64 ascending."""
    ends = torch.tensor(image_tokens).cumsum(0)
    counts = torch.searchsorted(kept.cpu(), ends)
    return torch.diff(counts, prepend=counts.new_zeros(1)).tolist()


def split_gaps(flat: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Cut the concatenated text between images back into its pieces."""
    start = 0
    for length in lengths:
        yield list(flat[start : start + length])
        start += length
