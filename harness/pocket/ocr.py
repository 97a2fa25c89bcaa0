"""Pictures of text whose strings are known, in OCRBench's published JSON format.

Words, digit strings, random codes and dates are drawn at several sizes and colours on portrait,
landscape and square pictures. Everything follows from the arguments: the same ones give the same
bytes, on the same version of Pillow.
"""

from __future__ import annotations

import datetime
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL
from PIL import Image, ImageDraw, ImageFont

from harness.pocket import cache

JSON_FILE = "OCRBench.json"
IMAGE_FOLDER = "OCRBench_Images"
DATASET_NAME = "pocket"

QUESTION_ONE = "what is written in the image?"
QUESTION_SEVERAL = "what is written in the images? Read all {n} of them in order."

SIDES = (128, 160, 200, 224, 256, 288, 320)
"""Widths and heights of pictures [px]; not all are multiples of a patch."""

WORDS: tuple[str, ...] = (
    "anchor", "apple", "barley", "basket", "beacon", "bridge", "butter", "candle", "canyon",
    "carbon", "castle", "cedar", "circle", "clover", "coffee", "copper", "cotton", "desert",
    "dragon", "eagle", "engine", "falcon", "feather", "forest", "garden", "ginger", "glacier",
    "granite", "hammer", "harbor", "hazel", "helmet", "island", "ivory", "jacket", "jungle",
    "kernel", "kettle", "ladder", "lantern", "lemon", "magnet", "maple", "marble", "meadow",
    "mirror", "needle", "nickel", "ocean", "olive", "orchid", "paper", "pepper", "pillow",
    "planet", "quartz", "rabbit", "ribbon", "river", "rocket", "saddle", "salmon", "shadow",
    "silver", "spring", "summit", "temple", "thunder", "timber", "tunnel", "valley", "velvet",
    "violet", "walnut", "whistle", "willow", "window", "winter", "yellow", "zipper",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of text: OCRBench's name for the question type, and how a string is drawn."""

    type: str
    draw: str


KINDS: tuple[Kind, ...] = (
    Kind("Regular Text Recognition", "word"),
    Kind("Digit String Recognition", "digits"),
    Kind("Non-Semantic Text Recognition", "code"),
    Kind("Date Recognition", "date"),
)
"""The first three are OCRBench's own types; dates are an addition."""


def generate(folder: Path, *, n: int, images_per_item: int, seed: int) -> Path:
    """Write pictures and their JSON to `folder`, which appears whole or not at all.

    Args:
        folder: replaced if it exists.
        n: items, >= 1. Types take turns, so they are balanced to within one.
        images_per_item: pictures of one item, >= 1; above 1 an item also has ``image_paths``.
        seed: draws strings, sizes and colours.

    Returns:
        The JSON file. Its ``image_path`` is relative to ``OCRBench_Images`` beside it.

    Raises:
        ValueError: a count is below 1.
        harness.pocket.cache.CacheError: the place cannot be written.
    """
    if n < 1 or images_per_item < 1:
        raise ValueError(f"n={n}, images_per_item={images_per_item}: both take a number >= 1")

    def fill(draft: Path) -> None:
        (draft / IMAGE_FOLDER / DATASET_NAME).mkdir(parents=True)
        items = [_item(draft / IMAGE_FOLDER, i, images_per_item, seed) for i in range(n)]
        text = json.dumps(items, indent=1, ensure_ascii=False)
        (draft / JSON_FILE).write_text(text + "\n", encoding="utf-8")

    cache.write_folder(folder, fill)
    return folder / JSON_FILE


def ensure_ocr(*, n: int, images_per_item: int, seed: int) -> Path:
    """The JSON file of `generate` with these arguments, from the cache if it is there.

    Raises:
        ValueError, harness.pocket.cache.CacheError: as `generate`.
    """
    version = cache.source_hash([Path(__file__)], PIL.__version__)
    folder = cache.root() / f"ocr-{version}-n{n}-i{images_per_item}-s{seed}"
    cache.ensure_folder(
        folder, lambda f: generate(f, n=n, images_per_item=images_per_item, seed=seed)
    )
    return folder / JSON_FILE


def _item(images: Path, index: int, images_per_item: int, seed: int) -> dict[str, Any]:
    # A generator of its own for each item: the first items of a longer set are the shorter set.
    rng = random.Random(f"pruneroute ocr/{seed}/{images_per_item}/{index}")
    kind = KINDS[index % len(KINDS)]
    strings, paths = [], []
    for picture in range(images_per_item):
        string = _string(rng, kind.draw)
        path = f"{DATASET_NAME}/{index:05d}_{picture}.png"
        _picture(rng, string).save(images / path, format="PNG")
        strings.append(string)
        paths.append(path)
    several = images_per_item > 1
    item: dict[str, Any] = {
        "dataset_name": DATASET_NAME,
        "id": index,
        "type": kind.type,
        "question": QUESTION_SEVERAL.format(n=images_per_item) if several else QUESTION_ONE,
        "answers": [" ".join(strings)],
        "image_path": paths[0],
    }
    if several:
        item["image_paths"] = paths
    return item


def _string(rng: random.Random, draw: str) -> str:
    if draw == "word":
        return rng.choice(WORDS)
    if draw == "digits":
        return "".join(rng.choices("0123456789", k=rng.randint(4, 8)))
    if draw == "code":
        return "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=rng.randint(4, 7)))
    day = datetime.date(1970, 1, 1) + datetime.timedelta(days=rng.randrange(24_000))
    return day.isoformat()


def _picture(rng: random.Random, string: str) -> Image.Image:
    """One line of text, somewhere on a plain ground of clearly different brightness."""
    size = rng.choice(SIDES), rng.choice(SIDES)
    dark_on_light = rng.random() < 0.7
    ink, ground = _shade(rng, light=not dark_on_light), _shade(rng, light=dark_on_light)
    picture = Image.new("RGB", size, ground)
    pen = ImageDraw.Draw(picture)
    points = rng.choice((14, 18, 24, 32, 40))
    margin = 6
    while True:
        font = ImageFont.load_default(points)
        left, top, right, bottom = pen.textbbox((0, 0), string, font=font)
        room_x = int(size[0] - 2 * margin - (right - left))
        room_y = int(size[1] - 2 * margin - (bottom - top))
        if room_x >= 0 and room_y >= 0:
            break
        points -= 1  # the narrowest picture holds every string well before this becomes unreadable
    x = margin + rng.randint(0, room_x) - left
    y = margin + rng.randint(0, room_y) - top
    pen.text((x, y), string, fill=ink, font=font)
    return picture


def _shade(rng: random.Random, *, light: bool) -> tuple[int, int, int]:
    low, high = (190, 255) if light else (0, 90)
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)
