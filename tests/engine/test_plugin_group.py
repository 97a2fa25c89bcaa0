"""The layout of a fused image group, as plain data: positions, bit patterns, identity."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

from harness.engine.plugin.group import (
    POLICIES,
    Span,
    Spend,
    VisionRequest,
    append_offsets,
    downscaled_grid,
    group_extent,
    group_hash,
    group_key,
    group_offsets,
    group_spans,
    image_rows,
    kept_per_image,
    offset_columns,
    prompt_positions,
    proportional_split,
    spend_of,
    split_gaps,
    split_offsets,
)
from kernels.visionzip.selection import BUDGETS

MERGE = 2
TEXT, IMAGE, TURN_END = 1, 7, 9


@dataclass(frozen=True)
class Layout:
    """A prompt before pruning: for each group its images' merged (h, w) and the text between them.

    `texts` has one more entry than `groups`: before, between and after them.
    """

    groups: list[list[tuple[int, int]]]
    gaps: list[list[int]]
    texts: list[int]

    def rows(self) -> list[tuple[str, int, int]]:
        """Every token: kind ('text', 'gap' or 'image'), its group and its image in the group."""
        out: list[tuple[str, int, int]] = [("text", -1, -1)] * self.texts[0]
        for g, (images, gaps) in enumerate(zip(self.groups, self.gaps, strict=True)):
            for i, (h, w) in enumerate(images):
                out += [("image", g, i)] * (h * w)
                out += [("gap", g, -1)] * (gaps[i] if i < len(gaps) else 0)
            out += [("text", -1, -1)] * self.texts[g + 1]
        return out


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = st.integers(1, 9)
    image = st.tuples(size, size)
    groups = draw(st.lists(st.lists(image, min_size=1, max_size=4), max_size=3))
    # Two images are never adjacent: a vision end and a vision start lie between.
    gap = st.integers(2, 6)
    gaps = [draw(st.lists(gap, min_size=len(g) - 1, max_size=len(g) - 1)) for g in groups]
    count = len(groups) + 1
    texts = draw(st.lists(st.integers(1, 7), min_size=count, max_size=count))
    return Layout(groups, gaps, texts)


def transformers_positions(layout: Layout) -> tuple[torch.Tensor, int]:
    """Positions of the whole prompt, and the shift of what follows it, by Qwen3-VL's own method."""
    ids = torch.tensor([IMAGE if kind == "image" else TEXT for kind, _, _ in layout.rows()])
    grids = [[1, MERGE * h, MERGE * w] for group in layout.groups for h, w in group]
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)),
        get_vision_position_ids=lambda *a, **k: Qwen3VLMoeModel.get_vision_position_ids(
            None, *a, **k
        ),
    )
    positions, shift = Qwen3VLMoeModel.get_rope_index(
        model,
        ids.unsqueeze(0),
        mm_token_type_ids=(ids == IMAGE).int().unsqueeze(0),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    return positions[:, 0], int(shift)


@given(layouts(), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_kept_tokens_keep_the_positions_that_transformers_gives_the_whole_prompt(
    layout: Layout, seed: int
) -> None:
    want, shift = transformers_positions(layout)
    rows = layout.rows()
    r = Random(seed)
    share = r.random()
    stays = np.array([kind != "image" or r.random() < share for kind, _, _ in rows])

    # What the processor sends: where each group lies in the pruned prompt, and how far it reaches.
    before = np.cumsum(stays) - stays
    inside = np.array([group for _, group, _ in rows])
    groups, offsets = [], []
    for g, (images, gaps) in enumerate(zip(layout.groups, layout.gaps, strict=True)):
        own = np.flatnonzero(inside == g)
        grids = [(1, h, w) for h, w in images]
        span = Span(int(before[own[0]]), int(stays[own].sum()))
        groups.append((span, group_extent(grids, gaps)))
        offsets.append(group_offsets(grids, gaps)[:, stays[own]])
        assert image_rows([h * w for h, w in images], gaps).tolist() == [
            rows[j][0] == "image" for j in own
        ]
    got, got_shift = prompt_positions(int(stays.sum()), groups)
    for (span, _), own_offsets in zip(groups, offsets, strict=True):
        got[:, span.offset : span.end] += own_offsets

    assert got.tolist() == want[:, torch.from_numpy(stays)].tolist()
    # A later token's index plus the shift is its position, in the whole prompt and in the pruned.
    assert len(got[0]) + got_shift == len(rows) + shift == int(want.max()) + 1


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_every_row_of_a_group_is_admitted_at_its_first_position(layout: Layout) -> None:
    """So that the offset of a row may not depend on where the prompt was cut into chunks."""
    want, _ = transformers_positions(layout)
    inside = np.array([group for _, group, _ in layout.rows()])
    groups = []
    for g, (images, gaps) in enumerate(zip(layout.groups, layout.gaps, strict=True)):
        own = np.flatnonzero(inside == g)
        extent = group_extent([(1, h, w) for h, w in images], gaps)
        groups.append((Span(int(own[0]), len(own)), extent))
    got, _ = prompt_positions(len(inside), groups)
    for span, _ in groups:
        assert (got[:, span.offset : span.end] == int(want[0, span.offset])).all()


# -- offsets as bit patterns -----------------------------------------------------------------------

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Halves of these are NaN, infinite, subnormal or negative zero as 16-bit numbers.
CORNERS = [0, 1, 255, 256, 257, 65_535, 65_536, 0x7F80_7FC0, 0x7FFF_FFFF, 0x7F81_FC01, 0x0001_8000]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(values=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30), width=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_offsets_survive_bit_for_bit(dtype: torch.dtype, values: list[int], width: int) -> None:
    values = [*values, *CORNERS]
    offsets = torch.tensor([values, values[::-1], sorted(values)])
    rows = torch.randn(len(values), width).to(dtype)
    packed = append_offsets(rows, offsets)
    assert packed.dtype == dtype
    assert packed.shape == (len(values), width + offset_columns(dtype))
    # What the engine does to rows on their way: copies, cuts into chunks, joins.
    cut = len(values) // 2
    travelled = torch.cat([packed[:cut].clone(), packed[cut:]]).contiguous()
    got_rows, got_offsets = split_offsets(travelled)
    assert torch.equal(got_rows, rows)
    assert got_offsets.dtype == torch.int64
    assert torch.equal(got_offsets, offsets)
    a, b = split_offsets(packed[:cut])[1], split_offsets(packed[cut:])[1]
    assert torch.equal(torch.cat([a, b], dim=1), offsets)


# -- groups, counts, splits ------------------------------------------------------------------------


def test_a_group_ends_where_a_turn_ends() -> None:
    ids, spans = [], []
    for token in "..I.I..E.I.E..II.E..":
        if token == "I":
            spans.append(Span(len(ids), 3))
            ids += [IMAGE] * 3
        else:
            ids.append(TURN_END if token == "E" else TEXT)
    assert group_spans(ids, spans, TURN_END) == [[0, 1], [2], [3, 4]]
    assert group_spans(ids, spans, -5) == [[0, 1, 2, 3, 4]]
    assert group_spans(ids, [], TURN_END) == []
    assert group_spans(ids, spans[2:3], TURN_END) == [[0]]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.data())
def test_the_nominal_split_is_whole_proportional_and_fits(
    counts: list[int], data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, sum(counts)))
    split = proportional_split(counts, keep)
    assert sum(split) == keep
    for share, n in zip(split, counts, strict=True):
        assert abs(share - keep * n / sum(counts)) < 1
        assert 0 <= share <= n


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**32))
def test_kept_indices_are_counted_by_image(counts: list[int], seed: int) -> None:
    r = Random(seed)
    kept = sorted(r.sample(range(sum(counts)), r.randint(0, sum(counts))))
    ends = list(itertools.accumulate(counts))
    want = [sum(a <= k < b for k in kept) for a, b in zip([0, *ends], ends, strict=False)]
    assert kept_per_image(torch.tensor(kept, dtype=torch.int64), counts) == want


def test_gaps_are_cut_back_into_pieces() -> None:
    assert list(split_gaps([1, 2, 3, 4], [2, 0, 1, 1])) == [[1, 2], [], [3], [4]]
    assert list(split_gaps([], [])) == []


# -- identity --------------------------------------------------------------------------------------

Group = tuple[Sequence[str], Sequence[Sequence[int]], Sequence[Sequence[int]], Spend]
COUNTS = [32, 16, 32]
GRIDS = [[1, 8, 16], [1, 8, 8], [1, 16, 8]]
REQUEST = VisionRequest(0.5)
BASE: Group = (["a", "b", "c"], GRIDS, [[5, 6], [5]], spend_of(REQUEST, COUNTS))


def asked(**changes: object) -> Group:
    return (*BASE[:3], spend_of(dataclasses.replace(REQUEST, **changes), COUNTS))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        (["a", "c", "b"], *BASE[1:]),
        (["a", "b"], GRIDS[:2], [[5, 6]], BASE[3]),
        (["ab", "c", ""], *BASE[1:]),
        (BASE[0], [GRIDS[2], GRIDS[1], GRIDS[0]], *BASE[2:]),
        (*BASE[:2], [[5], [6, 5]], BASE[3]),
        (*BASE[:2], [[5, 6], [6]], BASE[3]),
        asked(retain_ratio=0.52),
        asked(min_tokens_per_image=2),
        asked(layer=0),
        asked(policy="grid"),
        asked(policy="random"),
        asked(budget="raw"),
        asked(merge="contextual"),
    ],
    ids=[
        "order", "fewer", "joined", "sizes", "gap-cut", "gap-text", "keep", "floor", "layer",
        "grid", "random", "budget", "merge",
    ],
)  # fmt: skip
def test_whatever_changes_a_groups_rows_changes_its_hash(other: Group) -> None:
    assert group_hash(*other) != group_hash(*BASE)


def test_what_a_request_means_for_a_group() -> None:
    assert BASE[3] == Spend(40, 1, -1, POLICIES.index("visionzip"), BUDGETS.index("log_excess"), 0)
    assert asked(merge="contextual")[3].contextual == 4
    assert asked(merge="contextual", contextual_share=0.25)[3].contextual == 10
    # Nothing to merge where all stay, and nobody to merge for where attention does not choose.
    assert asked(merge="contextual", retain_ratio=1.0)[3].contextual == 0
    assert asked(merge="contextual", policy="grid")[3].contextual == 0
    for policy in ("none", "downscale"):
        assert asked(policy=policy)[3].keep == 80
    assert asked(retain_ratio=0.1, min_tokens_per_image=20)[3].keep == 56


@pytest.mark.parametrize(
    ("height", "width", "count", "due"),
    [
        (8, 8, 64, (8, 8)),
        (8, 8, 99, (8, 8)),
        (8, 8, 32, (5, 6)),
        (8, 8, 1, (1, 1)),
        (16, 4, 16, (8, 2)),
        (1, 40, 10, (1, 10)),
        (40, 1, 10, (10, 1)),
    ],
)
def test_a_smaller_image_has_at_most_as_many_tokens(
    height: int, width: int, count: int, due: tuple[int, int]
) -> None:
    assert downscaled_grid(height, width, count) == due


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_a_smaller_image_is_no_larger_and_keeps_its_proportions(
    height: int, width: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, height * width))
    rows, columns = downscaled_grid(height, width, count)
    assert 1 <= rows <= height and 1 <= columns <= width and rows * columns <= count
    if count >= 64 and 0.5 <= height / width <= 2:
        assert 0.7 <= (rows / columns) / (height / width) <= 1.4
        assert rows * columns >= 0.8 * count


def test_a_hash_is_stable_and_says_only_what_matters() -> None:
    assert group_hash(*BASE) == group_hash(tuple(BASE[0]), GRIDS, [(5, 6), (5,)], BASE[3])
    # The same budget, however it was asked for, gives the same rows.
    assert group_hash(*asked(retain_ratio=0.51)) == group_hash(*BASE)
    assert len(group_hash(*BASE)) == 64


def test_a_groups_key_is_a_number_that_int64_holds() -> None:
    identifier = group_hash(*BASE)
    assert 0 <= group_key(identifier) < 2**60
    assert group_key("lora-3:" + identifier) == group_key(identifier)
    torch.tensor([group_key("f" * 64)], dtype=torch.int64)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"retain_ratio": 0}, "retain_ratio=0 must"),
        ({"retain_ratio": 1.01}, "retain_ratio=1.01 must"),
        ({"retain_ratio": -0.5}, "retain_ratio"),
        ({"retain_ratio": float("nan")}, "retain_ratio"),
        ({"retain_ratio": "0.5"}, "retain_ratio='0.5'"),
        ({"retain_ratio": True}, "retain_ratio=True"),
        ({"retain_ratio": None}, "retain_ratio=None"),
        ({"min_tokens_per_image": -1}, "min_tokens_per_image=-1"),
        ({"min_tokens_per_image": 1.5}, "min_tokens_per_image=1.5 must be a whole number"),
        ({"min_tokens_per_image": True}, "min_tokens_per_image=True"),
        ({"policy": "Random"}, "policy='Random' must be one of none, visionzip, random"),
        ({"policy": None}, "policy=None must be one of"),
        ({"budget": "fair"}, "budget='fair' must be one of raw, sink_clipped"),
        ({"merge": True}, "merge=True must be one of none, contextual"),
        ({"contextual_share": 1}, "contextual_share=1 must be a number in"),
        ({"contextual_share": False}, "contextual_share=False"),
        ({"layer": "last"}, "layer='last'"),
        ({"layer": None}, "layer=None"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(setting: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        VisionRequest(**setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [1, 1.0, 0.5, 1e-9])
def test_ratios_in_range_are_taken(ratio: float) -> None:
    assert VisionRequest(retain_ratio=ratio).retain_ratio == ratio
