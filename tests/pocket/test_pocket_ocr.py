"""The generator of text pictures."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.datasets import ocrbench
from harness.pocket.ocr import IMAGE_FOLDER, KINDS, ensure_ocr, generate


def content(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        generate(tmp_path / name, n=6, images_per_item=2, seed=5)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    generate(tmp_path / "c", n=6, images_per_item=2, seed=6)
    assert content(tmp_path / "a") != content(tmp_path / "c")


def test_first_items_of_a_longer_set_are_the_shorter_set(tmp_path: Path) -> None:
    short = json.loads(generate(tmp_path / "s", n=3, images_per_item=1, seed=0).read_text())
    long = json.loads(generate(tmp_path / "l", n=9, images_per_item=1, seed=0).read_text())
    assert long[:3] == short


def test_items_have_the_published_fields_and_balanced_types(tmp_path: Path) -> None:
    items = json.loads(generate(tmp_path / "d", n=10, images_per_item=1, seed=0).read_text())
    fields = {"dataset_name", "id", "type", "question", "answers", "image_path"}
    assert all(set(item) == fields for item in items)
    counts = Counter(item["type"] for item in items)
    assert set(counts) == {kind.type for kind in KINDS}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_several_pictures_answer_in_order(tmp_path: Path) -> None:
    items = json.loads(generate(tmp_path / "d", n=4, images_per_item=3, seed=0).read_text())
    for item in items:
        assert len(item["image_paths"]) == 3
        assert item["image_path"] == item["image_paths"][0]
        assert len(item["answers"][0].split(" ")) == 3
        assert "3" in item["question"]


def test_pictures_hold_visible_text_inside_their_frame(tmp_path: Path) -> None:
    path = generate(tmp_path / "d", n=60, images_per_item=1, seed=1)
    shapes = set()
    for item in json.loads(path.read_text()):
        with Image.open(path.parent / IMAGE_FOLDER / item["image_path"]) as picture:
            pixels = np.asarray(picture.convert("L"), dtype=np.int16)
        width, height = picture.size
        assert 128 <= width <= 320 and 128 <= height <= 320
        shapes.add((width > height) - (width < height))
        ground = pixels[0, 0]
        assert np.abs(pixels - ground).max() > 80  # readable contrast
        frame = np.concatenate([pixels[:3].ravel(), pixels[-3:].ravel()])
        sides = np.concatenate([pixels[:, :3].ravel(), pixels[:, -3:].ravel()])
        assert (frame == ground).all() and (sides == ground).all()  # nothing is cut off
    assert shapes == {-1, 0, 1}  # portrait, square, landscape


@pytest.mark.parametrize(("n", "images"), [(0, 1), (1, 0)])
def test_counts_below_one_are_refused(tmp_path: Path, n: int, images: int) -> None:
    with pytest.raises(ValueError, match="both take a number >= 1"):
        generate(tmp_path / "d", n=n, images_per_item=images, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_cached_by_arguments_and_readable_by_the_loader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = ensure_ocr(n=5, images_per_item=2, seed=7)
    before = path.stat().st_mtime_ns
    assert ensure_ocr(n=5, images_per_item=2, seed=7) == path
    assert path.stat().st_mtime_ns == before
    assert ensure_ocr(n=5, images_per_item=2, seed=8) != path
    samples = ocrbench.load(path, samples=5, seed=0)
    assert all(len(s.images) == 2 for s in samples)
    assert {i.media_type for s in samples for i in s.images} == {"image/png"}
