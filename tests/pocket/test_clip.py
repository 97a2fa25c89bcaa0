"""The pocket CLIP: its folder, its tokenizer, and that training learns, on a small stand-in world."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as PillowImage
from torch import Tensor

from harness.pocket import clip
from harness.pocket.special import token_id
from harness.pocket.tokenizer import character_id, vocab_size

open_clip = pytest.importorskip("open_clip", reason="the extra clip is not installed")

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "黄": (230, 210, 40),
}
PLACES = {"top left": (0, 0), "top right": (0, 1), "左下": (1, 0), "bottom right": (1, 1)}
PAIRS = [(c, p) for c in COLOURS for p in PLACES]
SMALL = clip.ClipRecipe(
    embed=32, context=32, image_size=32, vision_width=32, vision_layers=1, text_width=32,
    text_layers=1, heads=2,
)  # fmt: skip


def caption(pair: tuple[str, str]) -> str:
    return f"{pair[0]} square at {pair[1]}"


def pixels(pair: tuple[str, str]) -> Tensor:
    image = torch.full((48, 48, 3), 200, dtype=torch.uint8)
    row, column = PLACES[pair[1]]
    y, x = 24 * row + 4, 24 * column + 4
    image[y : y + 16, x : x + 16] = torch.tensor(COLOURS[pair[0]], dtype=torch.uint8)
    return image


class World:
    """Every pair once a batch, in an order that follows from the step."""

    def __init__(self, folder: Path) -> None:
        clip.write_folder(folder, SMALL)
        self.tokens = clip.tokenize([caption(p) for p in PAIRS], folder)
        self.images = torch.stack([pixels(p) for p in PAIRS])

    def __call__(self, step: int) -> tuple[Tensor, ...]:
        order = torch.tensor(random.Random(step).sample(range(len(PAIRS)), len(PAIRS)))
        return self.images[order], self.tokens[order]


def train(folder: Path, steps: int, **options: Any) -> clip.Progress:
    return clip.train_clip(
        World(folder), steps=steps, device="cpu", folder=folder, recipe=SMALL, lr=3e-3,
        log=lambda _: None, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "model"
    progress = train(folder, 150)
    assert progress.done
    assert progress.loss < 0.7 * torch.log(torch.tensor(float(len(PAIRS))))
    return folder


def test_it_learns_and_loads_through_open_clip(trained: Path) -> None:
    model = clip.load(folder=trained)
    images = [PillowImage.fromarray(pixels(p).numpy()) for p in PAIRS]
    captions = [caption(p) for p in PAIRS]
    assert clip.retrieval(model, images, captions) >= 0.8
    assert clip.retrieval(model, images, captions[1:] + captions[:1]) <= 0.2
    table = clip.similarities(model, images, captions, batch=5)
    assert table.shape == (len(PAIRS), len(PAIRS))
    assert table.abs().max() <= 1.001
    with pytest.raises(ValueError, match="takes pairs"):
        clip.retrieval(model, images, captions[:3])


def test_equal_captions_are_right_for_each_other(trained: Path) -> None:
    model = clip.load(folder=trained)
    image = PillowImage.fromarray(pixels(PAIRS[0]).numpy())
    assert clip.retrieval(model, [image] * 3, [caption(PAIRS[0])] * 3) == 1


def test_training_sees_what_preprocessing_gives(trained: Path) -> None:
    model = clip.load(folder=trained)
    image = pixels(PAIRS[5])
    ours = clip._pixels(image[None], SMALL.image_size)[0]
    theirs = model.preprocess(PillowImage.fromarray(image.numpy()))
    assert (ours - theirs).abs().max() < 0.02


def test_resumed_training_goes_on_where_it_was(tmp_path: Path) -> None:
    state = tmp_path / "state" / "clip.pt"
    cut = train(tmp_path / "a", 8, checkpoint=state, seconds=0)
    assert (cut.step, cut.done) == (1, False)
    assert train(tmp_path / "a", 8, checkpoint=state).done
    assert train(tmp_path / "b", 8).step == 8
    one, two = (
        open_clip.factory.load_state_dict(str(tmp_path / x / clip.WEIGHTS_FILE)) for x in "ab"
    )
    assert all(torch.equal(one[name], two[name]) for name in two)
    with pytest.raises(ValueError, match="remove it to begin anew"):
        train(tmp_path / "a", 9, checkpoint=state)
    done = train(tmp_path / "a", 8, checkpoint=state)
    assert done.step == 8


class TellingWorld(World):
    """It also tells which colour is in which quarter, and which one the caption names."""

    def __call__(self, step: int) -> tuple[Tensor, ...]:
        order = random.Random(step).sample(range(len(PAIRS)), len(PAIRS))
        things = torch.zeros(len(PAIRS), 4, len(COLOURS), dtype=torch.bool)
        for row, pair in enumerate(order):
            colour, place = PAIRS[pair]
            down, right = PLACES[place]
            things[row, 2 * down + right, list(COLOURS).index(colour)] = True
        return (*super().__call__(step), things, things.any(1))


def test_heads_learn_and_are_resumed_and_are_not_kept(tmp_path: Path) -> None:
    seen: list[clip.Progress] = []

    def train_telling(name: str, **options: Any) -> clip.Progress:
        folder = tmp_path / name
        return clip.train_clip(
            TellingWorld(folder), steps=100, device="cpu", folder=folder, recipe=SMALL,
            things=len(COLOURS), log=seen.append, **options,
        )  # fmt: skip

    state = tmp_path / "clip.pt"
    cut = train_telling("a", checkpoint=state, seconds=0)
    assert (cut.step, cut.done) == (1, False)
    done = train_telling("a", checkpoint=state)
    assert done.done and done == replace(seen[-1], pairs_per_s=done.pairs_per_s)
    assert done.patch < 0.5 * cut.patch and done.whole < 0.5 * cut.whole
    train_telling("b")
    one, two = (
        open_clip.factory.load_state_dict(str(tmp_path / x / clip.WEIGHTS_FILE)) for x in "ab"
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in two)
    plain = open_clip.create_model(f"local-dir:{tmp_path / 'a'}", load_weights=False)
    assert one.keys() == plain.state_dict().keys()
    assert clip.load(folder=tmp_path / "a").model.encode_image(torch.zeros(1, 3, 32, 32)).ndim == 2


def test_tokens_are_characters_and_an_end(tmp_path: Path) -> None:
    clip.write_folder(tmp_path, SMALL)
    short, fixed, long = clip.tokenize(["a红", "红，  red", "x" * 99], tmp_path).tolist()
    end, pad = token_id(clip.END), token_id(clip.PAD)
    assert short == [ord("a"), character_id("红"), end] + [pad] * 29
    assert fixed[:6] == [character_id("红"), ord(","), ord(" "), *b"red"]
    assert long == [ord("x")] * 31 + [end]
    # A phrase of the pocket model's prompts is no token here.
    assert clip.tokenize(["how many"], tmp_path)[0, :8].tolist() == list(b"how many")
    assert len(clip.clip_tokenizer_json()["model"]["vocab"]) < vocab_size()


def test_the_default_fits_into_its_folder(tmp_path: Path) -> None:
    clip.write_folder(tmp_path, clip.ClipRecipe())
    model = open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False)
    clip.export(model, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4_000_000
    assert clip.load(folder=tmp_path).model.visual.image_size == (160, 160)
    (tmp_path / clip.WEIGHTS_FILE).unlink()
    with pytest.raises(RuntimeError):
        clip.load(folder=tmp_path)


def test_loss_of_equal_captions_counts_no_twin_as_wrong() -> None:
    x = torch.eye(4)
    scale = torch.tensor(3.0)
    tokens = torch.arange(4)[:, None]
    apart = clip.contrastive_loss(x, x, scale, tokens)
    assert apart < 1e-6
    twins = torch.cat([x[:3], x[:1]])
    ids = torch.tensor([0, 1, 2, 0])[:, None]
    assert clip.contrastive_loss(twins, twins, scale, ids) < 1e-6
    assert clip.contrastive_loss(twins, twins, scale, tokens) > 0.1


def test_no_network_is_needed(trained: Path) -> None:
    code = (
        "import socket, sys, pathlib\n"
        "def no(*a, **k): raise OSError('network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = no\n"
        "from harness.pocket import clip\n"
        f"m = clip.load(folder=pathlib.Path({json.dumps(str(trained))}))\n"
        "print(m.tokenizer(['a']).shape)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert run.returncode == 0, run.stderr
    assert "32" in run.stdout
