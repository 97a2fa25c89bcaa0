"""Pictures of text and icons, composed in batches from the drawn sheets, on a CPU or a GPU.

Nothing is drawn one by one: a text run becomes one gather from the glyph sheet, for all pictures of
a batch at once. Integer arithmetic decides every place, so that the same batch gives the same
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.pocket.sheets import Sheets


@dataclass(frozen=True)
class Runs:
    """Lines of text on N pictures, R a picture.

    Attributes:
        glyphs: int64 [N, R, C], indices into `Sheets.characters`; -1 where there is none, and only
            at the end of a run.
        font: int64 [N, R].
        size: int64 [N, R], indices into `Sheets.sizes`.
        x, y: int64 [N, R], left and upper edge [px].
        colour: float32 [N, R, 3], 0 to 255.
    """

    glyphs: Tensor
    font: Tensor
    size: Tensor
    x: Tensor
    y: Tensor
    colour: Tensor


@dataclass(frozen=True)
class Icons:
    """Tinted icons on N pictures, K a picture, all of one size.

    Attributes:
        icon: int64 [N, K], indices into `Sheets.icons`; -1 for none.
        side: width and height [px].
        x, y: int64 [N, K], left and upper edge [px]; icons lie wholly inside their picture.
        colour: float32 [N, K, 3], 0 to 255.
    """

    icon: Tensor
    side: int
    x: Tensor
    y: Tensor
    colour: Tensor


def advances(sheets: Sheets, glyphs: Tensor, font: Tensor, size: Tensor) -> Tensor:
    """Width of each glyph [px]: int64, shaped as `glyphs`; 0 for -1. Font and size are [N, R]."""
    found = sheets.advance[size[..., None], font[..., None], glyphs.clamp(min=0)]
    return torch.where(glyphs >= 0, found.long(), 0)


def widths(sheets: Sheets, glyphs: Tensor, font: Tensor) -> Tensor:
    """Width of each run at every size [px]: int64 [N, R, S]."""
    table = sheets.advance[:, font[..., None], glyphs.clamp(min=0)].long()
    return (table * (glyphs >= 0)).sum(-1).movedim(0, -1)


def paint(
    sheets: Sheets,
    background: Tensor,
    runs: Sequence[Runs],
    icons: Sequence[Icons],
    *,
    height: int,
    width: int,
    noise: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Compose pictures.

    Args:
        sheets: on the device of all tensors.
        background: float32 [N, 3], 0 to 255.
        runs: groups of text lines; lines that touch give the darker coverage, the later colour.
        icons: groups of icons, under the text.
        height, width: of the pictures [px].
        noise: float32 [N], standard deviation of Gaussian pixel noise, 0 to 255.
        generator: draws the noise.

    Returns:
        uint8 [N, 3, height, width].
    """
    canvas = background[:, :, None, None].expand(-1, -1, height, width)
    for group in icons:
        canvas = _paint_icons(sheets, canvas, group)
    for lines in runs:
        canvas = _paint_runs(sheets, canvas, lines)
    shape = (len(background), 1, height, width)
    grain = torch.randn(shape, generator=generator, device=background.device)
    canvas = canvas + grain * noise[:, None, None, None]
    return canvas.round().clamp(0, 255).to(torch.uint8)


def _paint_runs(sheets: Sheets, canvas: Tensor, runs: Runs) -> Tensor:
    n, _, height, width = canvas.shape
    device = canvas.device
    rows = -(-4 * max(sheets.sizes) // 3)  # of the largest cell
    # A margin takes what hangs over the lower edge.
    cover = torch.zeros((n, height + rows, width), dtype=torch.uint8, device=device)
    owner = torch.zeros((n, height + rows, width), dtype=torch.int64, device=device)
    column = torch.arange(width, device=device)
    row = torch.arange(rows, device=device)
    for r in range(runs.glyphs.shape[1]):
        glyphs, font, size = runs.glyphs[:, r], runs.font[:, r], runs.size[:, r]
        advance = torch.where(
            glyphs >= 0, sheets.advance[size[:, None], font[:, None], glyphs.clamp(min=0)].long(), 0
        )
        ends = advance.cumsum(1)
        at = column[None] - runs.x[:, r, None]
        index = torch.searchsorted(ends, at.contiguous(), right=True).clamp(max=glyphs.shape[1] - 1)
        inside = (at >= 0) & (at < ends[:, -1:])
        glyph = glyphs.gather(1, index).clamp(min=0)
        within = at - (ends - advance).gather(1, index)
        start = sheets.base[size[:, None], font[:, None], glyph] + within
        pixel = start[:, None, :] + row[None, :, None] * sheets.stride[size][:, None, None]
        keep = inside[:, None, :] & (row[None, :, None] < sheets.height[size][:, None, None])
        value = torch.where(keep, sheets.flat[torch.where(keep, pixel, 0)], 0)
        y = (runs.y[:, r, None] + row[None]).clamp(0, height + rows - 1)
        where = y[:, :, None].expand(-1, -1, width)
        cover.scatter_reduce_(1, where, value, "amax")
        before = owner.gather(1, where)
        owner.scatter_(1, where, torch.where(value > 0, r, before))
    share = cover[:, None, :height].float() / 255
    ink = runs.colour.movedim(2, 1).gather(2, owner[:, :height].reshape(n, 1, -1).expand(-1, 3, -1))
    return canvas + (ink.view(n, 3, height, width) - canvas) * share


def _paint_icons(sheets: Sheets, canvas: Tensor, icons: Icons) -> Tensor:
    n, _, height, width = canvas.shape
    device = canvas.device
    side = icons.side
    sheet = sheets.icon_sheet(side)
    flat = canvas.reshape(n, 3, -1).clone()
    step = torch.arange(side, device=device)
    for k in range(icons.icon.shape[1]):
        picture = sheet[icons.icon[:, k].clamp(min=0)].float() / 255
        alpha = picture[:, 0] * (icons.icon[:, k] >= 0)[:, None, None]
        y = icons.y[:, k, None, None] + step[:, None]
        place = (y * width + icons.x[:, k, None, None] + step).reshape(n, 1, -1).expand(-1, 3, -1)
        alpha = alpha.reshape(n, 1, -1)
        # Shading keeps an icon's inner drawing visible in a single tint.
        shade = 0.35 + 0.65 * picture[:, 1].reshape(n, 1, -1)
        tint = icons.colour[:, k, :, None] * shade
        under = flat.gather(2, place)
        flat.scatter_(2, place, under + (tint - under) * alpha)
    return flat.view(n, 3, height, width)
