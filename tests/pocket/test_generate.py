"""Sets of the pocket world: published formats, and the very prompts that training has."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from PIL import Image as PillowImage
from tokenizers import Tokenizer

from harness.datasets import ccbench, ocrbench, rag_igbench
from harness.datasets.sample import Image, Sample
from harness.help import conf_folder
from harness.pocket import generate as program
from harness.pocket import sheets
from harness.pocket.generate import FILES, TYPES, SetSpec, ensure_set, generate
from harness.pocket.items import Item, text_of
from harness.pocket.recipe import Recipe
from harness.pocket.tokenizer import CHAT_TEMPLATE, tokenizer_json
from harness.pocket.world.draw import NAMES, Draws
from harness.pocket.world.ocr import BANDS, KINDS, lines
from harness.pocket.world.several import several
from harness.pocket.world.text import Codec
from harness.settings import WorkloadSettings
from harness.workload import load_workload

SPECS = {
    "ocr": SetSpec("ocr", 38, 7),
    "several": SetSpec("ocr", 12, 7, images_per_item=3),
    "cc": SetSpec("cc", 17, 7),
    "rag": SetSpec("rag", 12, 7),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sets")
    return functools.cache(lambda name: generate(folder / name, SPECS[name]))


def content(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def loaded(task: str, path: Path) -> tuple[Sample, ...]:
    """All samples of a set."""
    if task == "cc":
        return ccbench.load(path, samples=len(ccbench.read_rows(path)), seed=3, circular=True)
    reader: Any = {"ocr": ocrbench, "rag": rag_igbench}[task]
    return reader.load(path, samples=len(reader.read_items(path)), seed=3)


def number_of(sample: Sample) -> int:
    return int(sample.id.split("/")[-1])


# -- the prompts of training ----------------------------------------------------------------------


def pads(image: Image) -> int:
    """Vision tokens of a picture, which the processor must not resize."""
    with PillowImage.open(io.BytesIO(image.data)) as picture:
        width, height = picture.size
    r = Recipe()
    side = r.patch_size * r.spatial_merge_size
    assert width % side == 0 and height % side == 0
    assert r.min_pixels <= width * height <= r.max_pixels
    return width // side * (height // side)


def encoded(sample: Sample) -> list[int]:
    """Tokens of a sample and its first reference, by template and tokenizer."""
    messages: list[dict[str, Any]] = [
        {
            "role": m.role,
            "content": [
                {"type": "image_url"} if isinstance(p, Image) else {"type": "text", "text": p.text}
                for p in m.parts
            ],
        }
        for m in sample.messages
    ]
    # As Transformers and vLLM set their environments up.
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    asked = template.render(messages=messages, add_generation_prompt=True)
    messages.append({"role": "assistant", "content": sample.references[0]})
    text = template.render(messages=messages)
    assert text.startswith(asked)
    pieces = text.split("<|image_pad|>")
    assert len(pieces) == len(sample.images) + 1
    text = pieces[0]
    for image, piece in zip(sample.images, pieces[1:], strict=True):
        text += "<|image_pad|>" * pads(image) + piece
    return tokenizer().encode(text).ids


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json()))


@pytest.mark.parametrize("name", SPECS)
def test_prompts_and_answers_are_token_for_token_those_of_training(
    made: Callable[[str], Path], name: str
) -> None:
    drawn = list(SPECS[name].items())
    samples = loaded(SPECS[name].task, made(name))
    found = {number_of(s): s for s in samples}
    for number, item in enumerate(drawn):
        assert encoded(found[number]) == list(item.ids), (number, item.fields)
        assert len(found[number].images) == len(item.pictures)
        for image, picture in zip(found[number].images, item.pictures, strict=True):
            with PillowImage.open(io.BytesIO(image.data)) as opened:
                assert opened.mode == "RGB"
                assert np.array_equal(np.asarray(opened), picture.numpy())


def test_text_of_tokens_is_what_the_tokenizer_decodes(made: Callable[[str], Path]) -> None:
    for entry in json.loads(made("ocr").read_text()):
        ids = tokenizer().encode(entry["question"]).ids
        assert text_of(ids) == entry["question"] == tokenizer().decode(ids)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_same_arguments_same_bytes_and_a_longer_set_begins_with_the_shorter(
    made: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    spec = dataclasses.replace(SPECS[name], n=5)
    for folder in ("a", "b"):
        generate(tmp_path / folder, spec)
    other = generate(tmp_path / "c", dataclasses.replace(spec, seed=8))
    first = content(tmp_path / "a")
    assert first == content(tmp_path / "b")
    assert first != content(other.parent)
    pictures = {k: v for k, v in first.items() if k.endswith(".png")}
    assert pictures.items() <= content(made(name).parent).items()
    short, long = (
        (p / FILES[spec.task]).read_text().splitlines() for p in (tmp_path / "a", made(name).parent)
    )
    if spec.task == "ocr":  # a list, whose last line closes it
        short[-2:], shared = [], len(short) - 2
    else:
        shared = 6 if spec.task == "cc" else 5
    assert short[:shared] == long[:shared]


def test_ocr_has_every_kind_in_both_sizes_and_languages(made: Callable[[str], Path]) -> None:
    items, entries = list(SPECS["ocr"].items()), json.loads(made("ocr").read_text())
    assert [e["answers"] for e in entries] == [[i.answer] for i in items]
    fields = ["dataset_name", "id", "type", "question", "answers", "image_path"]
    assert all(list(e) == fields for e in entries)
    counts = Counter((i.kind, e["dataset_name"]) for i, e in zip(items, entries, strict=True))
    assert set(counts) == {(k, f"pocket {b}") for k in KINDS for b in ("large", "fine")}
    assert set(counts.values()) <= {2, 3}
    for item, entry in zip(items, entries, strict=True):
        low, high = BANDS[entry["dataset_name"].removeprefix("pocket ")]
        assert low <= item.print_px <= high
        assert entry["type"] == TYPES[item.kind]
    assert len({i.pictures.shape for i in items}) >= 4


def test_several_pictures_are_read_in_order(made: Callable[[str], Path]) -> None:
    entries = json.loads(made("several").read_text())
    items = list(SPECS["several"].items())
    for entry, item in zip(entries, items, strict=True):
        assert len(entry["image_paths"]) == 3 and entry["image_path"] == entry["image_paths"][0]
        strings = entry["answers"][0].split(" ")
        assert len(strings) == 3
        chinese = not any(s.isascii() for s in strings)
        assert entry["question"] == (
            "图中写了什么？" if chinese else "what is written in the images?"
        )
        low, high = BANDS[entry["dataset_name"].removeprefix("pocket ")]
        assert low <= item.print_px <= high
    assert {i.kind for i in items} == {"word", "word_zh", "digits", "code", "date"}


def test_cc_passes_turn_the_options_and_keep_the_answer(made: Callable[[str], Path]) -> None:
    rows = ccbench.read_rows(made("cc"))
    n = SPECS["cc"].n
    assert [r.index for r in rows] == [q + k * 1_000_000 for k in range(4) for q in range(n)]
    by_question = [[r for r in rows if r.question_id == q] for q in range(n)]
    for passes in by_question:
        assert len({r.options[r.answer] for r in passes}) == 1
        assert {r.answer for r in passes} == set("ABCD")
        assert {tuple(sorted(r.options.values())) for r in passes} == {
            tuple(sorted(passes[0].options.values()))
        }
        assert {r.image_index for r in passes} == {passes[0].index}
    counts = Counter((r.category, r.question.isascii()) for r in rows[:n])
    assert len(counts) == 8 and set(counts.values()) <= {2, 3}


def test_rag_cites_pictures_of_its_notes(made: Callable[[str], Path]) -> None:
    items = rag_igbench.read_items(made("rag"))
    for item in items:
        assert item.split == "dev" and item.type == "how-to"
        assert 1 <= len(item.documents) <= 3 and all(item.images)
        assert f"![{item.topic}](IMG#" in item.answer and item.topic in item.query
    for line in made("rag").read_text().splitlines():
        entry = json.loads(line)
        assert json.loads(entry["gt_raw_answer"])["answer"] == entry["gt_clean_answer"]
        assert set(json.loads(entry["gt_raw_answer"])) == {"reason", "category", "answer"}
    assert [i.query.isascii() for i in items] == [True, False] * 6
    assert all(3 <= len(s.images) <= 12 for s in loaded("rag", made("rag")))


# -- splits and choices ---------------------------------------------------------------------------


def words_of(items: list[Item]) -> set[str]:
    """Words that the answers give back: whole answers, or what comes before each citation."""
    known = {*sheets.load().words_en, *sheets.load().words_zh}
    cited = (re.findall(r"(\S+) !\[", i.answer) or [i.answer] for i in items)
    return {w for words in cited for w in words if w in known}


@pytest.mark.parametrize("task", ["ocr", "rag"])
def test_held_out_words_never_occur_in_training(task: str) -> None:
    n = {"ocr": 180, "rag": 16}[task]
    found = {s: words_of(list(SetSpec(task, n, 3, s).items())) for s in ("train", "held_out")}
    assert min(map(len, found.values())) > 12
    assert not found["train"] & found["held_out"]
    names = {*NAMES, *sheets.load().icon_names_en, *sheets.load().icon_names_zh}
    names |= {name for colour in sheets.load().colours for name in colour[:2]}
    for words in (sheets.load().words_en, sheets.load().words_zh):
        # A word that names an icon or the like is in every split's questions.
        assert not set(words[4::5]) & found["train"] - names
        assert set(words) & found["held_out"] <= set(words[4::5])


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("task", "images"), [("ocr", 1), ("ocr", 2), ("cc", 1), ("rag", 1)])
def test_one_language(task: str, images: int, language: str) -> None:
    spec = SetSpec(task, 10, 1, language=language, images_per_item=images)
    for item in spec.items():
        asked = item.fields.get("question", item.fields.get("query", ""))
        assert asked.isascii() == (language == "en")


def test_a_band_alone_has_the_items_that_it_has_among_both() -> None:
    both = [i.ids for i in SetSpec("ocr", 90, 2).items()]
    for band, (low, high) in BANDS.items():
        if band == "middle":
            continue
        alone = list(SetSpec("ocr", 45, 2, band=band).items())
        assert all(low <= i.print_px <= high for i in alone)
        assert Counter(i.ids for i in alone) <= Counter(both)


# -- use ------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    try:
        return program.main()
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


GOOD = ("--task", "cc", "--n", "2", "--seed", "7")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--n", "0"), "--n=0: takes a whole number from 1 to 1000000"),
        (("--n", "many"), "invalid int value"),
        (("--seed", "-1"), "--seed=-1: takes a whole number >= 0"),
        (("--task", "vqa"), "invalid choice"),
        (("--split", "test"), "invalid choice"),
        (("--band", "fine"), "only task=ocr has it"),
        (("--images-per-item", "2"), "--images-per-item=2: only task=ocr has it"),
        (("--images-per-item", "0"), "--images-per-item=0: takes a whole number from 1 to 256"),
    ],
)
def test_bad_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    assert run(monkeypatch, *GOOD, "--out", str(tmp_path / "d"), *arguments) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_only_an_own_set_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    assert run(monkeypatch, *GOOD, "--out", str(folder)) == 0
    assert capsys.readouterr().out == f"{folder / 'CCBench.tsv'}\n"
    assert run(monkeypatch, *GOOD, "--out", str(folder), "--n", "3") == 0
    before = content(folder)
    (folder / "notes.txt").write_text("mine")
    assert run(monkeypatch, *GOOD, "--out", str(folder)) == 2
    assert "also holds notes.txt" in capsys.readouterr().err
    assert content(folder).items() > before.items()
    (folder / "manifest.json").unlink()
    assert run(monkeypatch, *GOOD, "--out", str(folder)) == 2
    assert "no set of this program" in capsys.readouterr().err
    assert run(monkeypatch, *GOOD, "--out", str(folder / "notes.txt")) == 2
    assert "is no folder" in capsys.readouterr().err
    assert run(monkeypatch, *GOOD, "--out", str(folder / "notes.txt" / "x")) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_sets_are_cached_by_their_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = ensure_set("ocr", 3, 7)
    before = path.stat().st_mtime_ns
    assert ensure_set("ocr", 3, 7) == path and path.stat().st_mtime_ns == before
    others = [ensure_set("ocr", 3, 8), ensure_set("ocr", 3, 7, band="fine"), ensure_set("cc", 3, 7)]
    assert len({path, *others}) == 4
    with pytest.raises(ValueError, match="images_per_item=0"):
        ensure_set("ocr", 3, 7, images_per_item=0)


@pytest.mark.parametrize(
    ("name", "images"), [("pocket_ocr", {2}), ("pocket_cc", {1}), ("pocket_rag", set(range(3, 13)))]
)
def test_workloads_without_a_path_are_pocket_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, images: set[int]
) -> None:
    import yaml

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree = yaml.safe_load((conf_folder() / "workload" / f"{name}.yaml").read_text())
    found = load_workload(WorkloadSettings(**tree | {"samples": 5}), warmups=2)
    assert (len(found.samples), len(found.warmups)) == (5, 2)
    assert {len(s.images) for s in found.samples} <= images
    # No picture is asked about twice, and all answers fit.
    pictures = [i.data for s in itertools.chain(found.samples, found.warmups) for i in s.images]
    assert len(set(pictures)) == len(pictures)
    longest = max(len(tokenizer().encode(s.references[0]).ids) for s in found.samples)
    assert longest < tree["max_tokens"]


def test_several_neighbours_make_an_item_and_keep_their_marks() -> None:
    codec = Codec(sheets.load())
    draws = Draws(torch.Generator().manual_seed(1))
    drawn = lines(codec, draws, 7, canvas=(160, 192), split="train", bands=["fine"])
    items = several(codec, drawn, 3)
    assert items.pixels.equal(drawn.pixels[:6]) and len(items.kind) == 2
    assert items.print_px.tolist() == drawn.print_px[:6].view(2, 3).amin(1).tolist()
    kept = (drawn.marks.image >= 0) & (drawn.marks.image < 6)
    assert items.marks.image.equal(torch.where(kept, drawn.marks.image, -1))
