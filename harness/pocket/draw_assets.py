"""Draws the glyphs, icons and lists of ``harness/pocket/assets/``. Its output is in the repository.

It need not run again unless a list or a font is to change. What was drawn came from these Debian
packages (``apt-get download``, ``dpkg-deb -x``): fonts-dejavu-core 2.37-6, fonts-liberation2
2.1.5-1, fonts-comic-neue 2.51-4, fonts-noto-cjk 1:20220127+repack1-1, fonts-wqy-microhei
0.2.0-beta-3.1, fonts-noto-color-emoji 2.042-0+deb12u1; and from these PyPI packages, unpacked:
mnemonic 0.21 and jieba 0.42.1. Pillow was 13.0.0::

    python -m harness.pocket.draw_assets --fonts DIR ... --lists DIR ... --out harness/pocket/assets
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from harness.pocket.sheets import ASCII, BASELINE, CELL, EM, GRID_COLUMNS, ICON, ICON_COLUMNS

MARKS = "，。？：、（）"
CHINESE = 212
"""Chinese characters in all, besides the marks."""

COLOUR_CHARACTERS = "红橙黄绿蓝紫黑白棕粉灰色"
TEMPLATES = (
    "图中写了什么？ 这张图片上的文字是 有几个 哪里 什么颜色 哪个 是 在 左上 右上 左下 右下 中间 "
    "上面 下面 左边 右边 年 月 日 价格 数量 名称 日期 编号 合计 电话 地址 姓名 时间 怎么做 第 步 "
    "的 和 请 按 顺序 选 项 答案 以下 笔记 图片 问题 回答 总 单价 商品 一二三四五六七八九十 没有 "
    "看 找 出 所有 它 们 多少 个 读 第几行"
)
"""Sentences and labels that the worlds say; every character of theirs must be drawable."""

WORDS_ZH = 1200
LEAST_FREQUENCY = 40


@dataclass(frozen=True)
class Face:
    """A font to draw.

    Attributes:
        name: how the repository calls it.
        file: the font file's name.
        index: which font of a collection.
        chinese: whether it has the Chinese characters.
    """

    name: str
    file: str
    index: int = 0
    chinese: bool = False


FACES = (
    Face("dejavu_sans", "DejaVuSans.ttf"),
    Face("dejavu_sans_bold", "DejaVuSans-Bold.ttf"),
    Face("dejavu_sans_mono", "DejaVuSansMono.ttf"),
    Face("dejavu_serif", "DejaVuSerif.ttf"),
    Face("liberation_serif", "LiberationSerif-Regular.ttf"),
    Face("comic_neue", "ComicNeue-Bold.otf"),
    Face("noto_sans_sc", "NotoSansCJK-Regular.ttc", 2, True),
    Face("noto_serif_sc", "NotoSerifCJK-Regular.ttc", 2, True),
    Face("wqy_micro_hei", "wqy-microhei.ttc", 0, True),
)

EMOJI_FILE = "NotoColorEmoji.ttf"
EMOJI_STRIKE = 109
"""The only size at which that font's bitmaps, 136 x 128 px, open."""

LEAST_MEAN = 0.65
"""Mean luminance to which a darker icon is lifted, of the way from darkest to lightest."""

ICONS = (
    ("apple", "苹果", 0x1F34E),
    ("tree", "树", 0x1F332),
    ("flower", "花", 0x1F337),
    ("leaf", "叶子", 0x1F341),
    ("cactus", "仙人掌", 0x1F335),
    ("mushroom", "蘑菇", 0x1F344),
    ("fish", "鱼", 0x1F41F),
    ("bird", "鸟", 0x1F426),
    ("butterfly", "蝴蝶", 0x1F98B),
    ("snail", "蜗牛", 0x1F40C),
    ("elephant", "大象", 0x1F418),
    ("cat", "猫", 0x1F408),
    ("spider", "蜘蛛", 0x1F577),
    ("car", "汽车", 0x1F697),
    ("train", "火车", 0x1F682),
    ("bike", "自行车", 0x1F6B2),
    ("plane", "飞机", 0x2708),
    ("rocket", "火箭", 0x1F680),
    ("boat", "船", 0x26F5),
    ("anchor", "锚", 0x2693),
    ("house", "房子", 0x1F3E0),
    ("chair", "椅子", 0x1FA91),
    ("lamp", "灯", 0x1F4A1),
    ("clock", "钟", 0x23F0),
    ("phone", "电话", 0x260E),
    ("camera", "相机", 0x1F4F7),
    ("book", "书", 0x1F4D6),
    ("key", "钥匙", 0x1F511),
    ("lock", "锁", 0x1F512),
    ("hammer", "锤子", 0x1F528),
    ("scissors", "剪刀", 0x2702),
    ("magnet", "磁铁", 0x1F9F2),
    ("bell", "铃", 0x1F514),
    ("guitar", "吉他", 0x1F3B8),
    ("crown", "王冠", 0x1F451),
    ("trophy", "奖杯", 0x1F3C6),
    ("gift", "礼物", 0x1F381),
    ("ball", "球", 0x26BD),
    ("flag", "旗", 0x1F6A9),
    ("umbrella", "伞", 0x2614),
    ("shirt", "上衣", 0x1F455),
    ("shoe", "鞋", 0x1F460),
    ("hat", "帽子", 0x1F3A9),
    ("glasses", "眼镜", 0x1F453),
    ("hand", "手", 0x270B),
    ("heart", "心", 0x2764),
    ("star", "星", 0x2B50),
    ("moon", "月亮", 0x1F319),
)
"""English name, Chinese name, code point; chosen to differ in outline and light, without colour."""


def find(folders: Iterable[Path], name: str) -> Path:
    """The first file whose path ends with `name`.

    Raises:
        FileNotFoundError: none does.
    """
    for folder in folders:
        for path in sorted(folder.rglob(Path(name).name)):
            if path.as_posix().endswith("/" + name):
                return path
    raise FileNotFoundError(name)


def chinese_characters(frequent: Sequence[str]) -> str:
    """`CHINESE` characters: the needed ones and the first of `frequent`, in order of code point.

    Raises:
        ValueError: more are needed than there is room for.
    """
    needed = COLOUR_CHARACTERS + TEMPLATES + "".join(zh for _, zh, _ in ICONS)
    chosen = {c for c in needed if "\u4e00" <= c <= "\u9fff"}
    if len(chosen) > CHINESE:
        raise ValueError(f"{len(chosen)} characters are needed")
    for c in frequent:
        if len(chosen) == CHINESE:
            break
        chosen.add(c)
    return "".join(sorted(chosen))


def chinese_words(dictionary: str, characters: str) -> list[str]:
    """The most frequent words of 2 and 3 characters, most frequent first.

    Args:
        dictionary: lines of ``word frequency part-of-speech``.
        characters: what the words may be written with.
    """
    allowed = set(characters)
    found = []
    for line in dictionary.splitlines():
        word, frequency, *_ = line.split(" ")
        if len(word) in (2, 3) and set(word) <= allowed and int(frequency) >= LEAST_FREQUENCY:
            found.append((-int(frequency), word))
    return [word for _, word in sorted(found)[:WORDS_ZH]]


def draw_face(path: Path, index: int, text: str) -> tuple[Image.Image, list[float]]:
    """All of `text` in one font, and what each glyph advances.

    Returns:
        The grid of cells, 8-bit grey, 16 levels: ink is white, starts no further left than its
        cell, and stands on row `BASELINE`. The advances [px at an em of `EM`].

    Raises:
        ValueError: a glyph does not fit its cell.
    """
    font = ImageFont.truetype(str(path), EM, index=index, layout_engine=ImageFont.Layout.BASIC)
    rows = -(-len(text) // GRID_COLUMNS)
    sheet = Image.new("L", (GRID_COLUMNS * CELL, rows * CELL))
    advances = []
    for i, character in enumerate(text):
        left, top, right, bottom = font.getbbox(character, anchor="ls")
        shift = max(0, -int(left))
        if right + shift > CELL or top < -BASELINE or bottom > CELL - BASELINE:
            raise ValueError(f"{path.name}: {character!r} does not fit")
        cell = Image.new("L", (CELL, CELL))
        ImageDraw.Draw(cell).text((shift, BASELINE), character, fill=255, font=font, anchor="ls")
        sheet.paste(cell, (i % GRID_COLUMNS * CELL, i // GRID_COLUMNS * CELL))
        advances.append(round(float(font.getlength(character)) + shift, 3))
    return sheet.point([round(v / 17) * 17 for v in range(256)]), advances


def draw_icon(font: ImageFont.FreeTypeFont, codepoint: int) -> Image.Image:
    """One emoji as luminance and alpha, `ICON` px square with a margin of 2 px.

    Luminance is stretched over what is opaque, to 80..255, and lifted where most of it is dark, so
    that a colour multiplied by it stays recognisable.
    """
    canvas = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(canvas).text((4, 4), chr(codepoint), font=font, embedded_color=True)
    cut = canvas.crop(canvas.getchannel("A").getbbox())
    room = ICON - 4
    scale = room / max(cut.size)
    size = (max(1, round(cut.width * scale)), max(1, round(cut.height * scale)))
    pixels = np.asarray(cut, dtype=np.float64)
    alpha = pixels[..., 3] / 255
    light = pixels[..., :3] @ np.array([0.299, 0.587, 0.114])
    low, high = np.percentile(light[alpha > 0.5], [3, 97])
    # A flat emoji's slight shading is not blown up to full contrast.
    low = min(low, high - 60)
    light = np.clip((light - low) / (high - low), 0, 1)
    mean = float(light[alpha > 0.5].mean())
    light = 80 + 175 * light ** min(1.0, np.log(LEAST_MEAN) / np.log(mean))
    planes = [
        Image.fromarray(plane.astype(np.float32), "F").resize(size, Image.Resampling.BOX)
        for plane in (light * alpha, alpha)
    ]
    premultiplied, opacity = (np.asarray(plane, dtype=np.float64) for plane in planes)
    shade = np.where(opacity > 0, premultiplied / np.maximum(opacity, 1e-6), 0)
    both = np.stack([shade, opacity * 255], axis=-1).round().clip(0, 255).astype(np.uint8)
    out = Image.new("LA", (ICON, ICON))
    out.paste(Image.fromarray(both, "LA"), ((ICON - size[0]) // 2, (ICON - size[1]) // 2))
    return out


def draw(fonts: Sequence[Path], lists: Sequence[Path], out: Path) -> None:
    """Write every asset but ``LICENSES.md`` to `out`.

    Raises:
        FileNotFoundError: a font or list is in none of the folders.
    """
    (out / "glyphs").mkdir(parents=True, exist_ok=True)
    frequent = find(lists, "wordlist/chinese_simplified.txt").read_text("utf-8").split()
    chinese = chinese_characters(frequent)
    english = find(lists, "wordlist/english.txt").read_text("utf-8").split()
    dictionary = find(lists, "jieba/dict.txt").read_text("utf-8")
    words_en = [w for w in english if 3 <= len(w) <= 8]
    (out / "characters.txt").write_text(chinese + MARKS + "\n", "utf-8")
    (out / "words_en.txt").write_text("\n".join(words_en) + "\n", "utf-8")
    words_zh = chinese_words(dictionary, chinese)
    (out / "words_zh.txt").write_text("\n".join(words_zh) + "\n", "utf-8")

    records = []
    for face in FACES:
        text = ASCII + (chinese + MARKS if face.chinese else "")
        sheet, advances = draw_face(find(fonts, face.file), face.index, text)
        sheet.save(out / "glyphs" / f"{face.name}.png", optimize=True)
        records.append({"name": face.name, "chinese": face.chinese, "advances": advances})
    lines = ",\n".join(json.dumps(r) for r in records)
    (out / "glyphs" / "fonts.json").write_text(f"[\n{lines}\n]\n", "utf-8")

    emoji = ImageFont.truetype(str(find(fonts, EMOJI_FILE)), EMOJI_STRIKE)
    grid = Image.new("LA", (ICON_COLUMNS * ICON, -(-len(ICONS) // ICON_COLUMNS) * ICON))
    for i, (_, _, codepoint) in enumerate(ICONS):
        place = (i % ICON_COLUMNS * ICON, i // ICON_COLUMNS * ICON)
        grid.paste(draw_icon(emoji, codepoint), place)
    grid.save(out / "icons.png", optimize=True)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("name_en", "name_zh", "codepoint"))
    writer.writerows((en, zh, f"{codepoint:04X}") for en, zh, codepoint in ICONS)
    (out / "icons.csv").write_text(table.getvalue(), "utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="draw the pocket world's glyphs and icons")
    parser.add_argument("--fonts", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--lists", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    draw(args.fonts, args.lists, args.out)


if __name__ == "__main__":
    main()
