"""``python -m harness.pocket.generate``: sets of the pocket world in the benchmarks' published formats.

The loaders that read the published files read these (`harness.datasets`). Everything follows from
the arguments: the same ones give the same bytes, on the same versions of PyTorch and Pillow.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL
import torch
from PIL import Image
from torch import Tensor

from harness.endings import ended
from harness.pocket import cache
from harness.pocket.items import BANDS, BOTH, LANGUAGES, SPLITS, TASKS, Item, items
from harness.pocket.world.cc import LETTERS
from harness.pocket.world.draw import HELD_OUT
from harness.pocket.world.ocr import BANDS as BAND_SIZES
from harness.pocket.world.ocr import FINE, LARGE

FILES = {"ocr": "OCRBench.json", "cc": "CCBench.tsv", "rag": "RAG_IG.jsonl"}
"""A set's file, by task. Pictures lie beside it; CCBench has them inside."""
OCR_IMAGES = "OCRBench_Images"
RAG_IMAGES = "images"
MOST_IMAGES = 256
"""Pictures of an item, which are drawn together."""
PASS_STEP = 1_000_000
"""What is added to the index of a question for each further pass."""

TYPES = {
    "word": "Regular Text Recognition",
    "word_zh": "Regular Text Recognition",
    "digits": "Digit String Recognition",
    "code": "Non-Semantic Text Recognition",
    "date": "Date Recognition",
    "slip": "Key Information Extraction",
    "slip_zh": "Key Information Extraction",
    "table": "Doc-oriented VQA",
    "table_zh": "Doc-oriented VQA",
}
"""OCRBench's types by kind of item. All are its own but that of dates."""

_SPLIT_NAMES = {HELD_OUT: "dev"}
_REASON = "The notes say what to do in each step, the pictures which step of what they show."
_HERE = Path(__file__).parent
_SOURCES = ("world/*.py", "assets/**/*", *(f"{m}.py" for m in (
    "generate", "items", "raster", "sheets", "phrases", "special", "tokenizer"
)))  # fmt: skip


@dataclass(frozen=True)
class SetSpec:
    """Which set.

    Attributes:
        task: ``ocr``, ``cc`` or ``rag``.
        n: items; in ``cc`` questions, each of which has four rows. A longer set begins with the
            shorter one.
        seed: draws them, >= 0.
        split: ``held_out`` or ``train``.
        band: size of the print, ``large``, ``fine`` or ``both``; only ``ocr`` has a choice.
        language: ``en``, ``zh`` or ``both``.
        images_per_item: pictures of an item, >= 1; only ``ocr`` has a choice. With several, each
            shows one line, and ``image_paths`` lists them.
    """

    task: str
    n: int
    seed: int
    split: str = HELD_OUT
    band: str = BOTH
    language: str = BOTH
    images_per_item: int = 1

    def check(self) -> None:
        """Whether such a set can be drawn.

        Raises:
            ValueError: with a line for each value that is wrong, and what it takes.
        """
        findings = [
            f"{name}={value!r}: takes one of {', '.join(known)}"
            for name, value, known in (
                ("task", self.task, TASKS),
                ("split", self.split, SPLITS),
                ("band", self.band, (*BANDS, BOTH)),
                ("language", self.language, (*LANGUAGES, BOTH)),
            )
            if value not in known
        ]
        most = PASS_STEP if self.task == "cc" else None
        if self.n < 1 or (most is not None and self.n > most):
            words = "a whole number >= 1" if most is None else f"a whole number from 1 to {most}"
            findings.append(f"n={self.n}: takes {words}")
        if self.seed < 0:
            findings.append(f"seed={self.seed}: takes a whole number >= 0")
        if not 1 <= self.images_per_item <= MOST_IMAGES:
            findings.append(
                f"images_per_item={self.images_per_item}: takes a whole number from 1 to {MOST_IMAGES}"
            )
        elif self.task in ("cc", "rag"):
            if self.images_per_item > 1:
                findings.append(f"images_per_item={self.images_per_item}: only task=ocr has it")
            if self.band in BANDS:
                findings.append(f"band={self.band!r}: only task=ocr has it; takes {BOTH}")
        if findings:
            raise ValueError("\n".join(findings))

    def items(self) -> Iterator[Item]:
        """The set's items, in order."""
        drawn = items(
            self.task, self.seed, split=self.split, band=self.band, language=self.language,
            images=self.images_per_item,
        )  # fmt: skip
        return itertools.islice(drawn, self.n)


def generate(folder: Path, spec: SetSpec) -> Path:
    """Write a set to `folder`, which appears whole or not at all.

    Args:
        folder: replaced if it exists.
        spec: which set.

    Returns:
        The set's file.

    Raises:
        ValueError: `spec` asks for what there is not.
        harness.pocket.cache.CacheError, OSError: the place cannot be written.
    """
    spec.check()
    write = {"ocr": _write_ocr, "cc": _write_cc, "rag": _write_rag}[spec.task]
    cache.write_folder(folder, lambda draft: write(draft, spec))
    return folder / FILES[spec.task]


def ensure_set(
    task: str,
    n: int,
    seed: int,
    *,
    split: str = HELD_OUT,
    band: str = BOTH,
    language: str = BOTH,
    images_per_item: int = 1,
) -> Path:
    """The file of `generate` with these arguments (see `SetSpec`), from the cache if it is there.

    Raises:
        ValueError, harness.pocket.cache.CacheError, OSError: as `generate`.
    """
    spec = SetSpec(task, n, seed, split, band, language, images_per_item)
    spec.check()
    name = f"{task}-{_version()}-n{n}-s{seed}-{split}-{band}-{language}-i{images_per_item}"
    folder = cache.root() / name
    cache.ensure_folder(folder, lambda f: generate(f, spec))
    return folder / FILES[task]


def _version() -> str:
    files = {f for pattern in _SOURCES for f in _HERE.glob(pattern) if f.is_file()}
    return cache.source_hash(sorted(files), PIL.__version__, torch.__version__)


# -- formats --------------------------------------------------------------------------------------


def _png(picture: Tensor) -> bytes:
    """A picture, uint8 [H, W, 3], without loss."""
    buffer = io.BytesIO()
    Image.fromarray(picture.numpy()).save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()


def _write_ocr(folder: Path, spec: SetSpec) -> None:
    (folder / OCR_IMAGES / "pocket").mkdir(parents=True)
    entries = []
    for number, item in enumerate(spec.items()):
        paths = []
        for k, picture in enumerate(item.pictures):
            path = f"pocket/{number:05d}_{k}.png"
            (folder / OCR_IMAGES / path).write_bytes(_png(picture))
            paths.append(path)
        band = LARGE if item.print_px >= BAND_SIZES[LARGE][0] else FINE
        entry: dict[str, Any] = {
            "dataset_name": f"pocket {band}",
            "id": number,
            "type": TYPES[item.kind],
            "question": item.fields["question"],
            "answers": [item.answer],
            "image_path": paths[0],
        }
        if spec.images_per_item > 1:
            entry["image_paths"] = paths
        entries.append(entry)
    text = json.dumps(entries, indent=1, ensure_ascii=False)
    (folder / FILES["ocr"]).write_text(text + "\n", encoding="utf-8")


def _write_cc(folder: Path, spec: SetSpec) -> None:
    passes = len(LETTERS)
    with (folder / FILES["cc"]).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(["index", "question", *LETTERS, "answer", "category", "image"])
        later: list[list[list[object]]] = [[] for _ in range(1, passes)]
        for number, item in enumerate(spec.items()):
            options = [item.fields[letter] for letter in LETTERS]
            right = LETTERS.index(item.answer)
            for turn in range(passes):
                turned = options[turn:] + options[:turn]
                answer = LETTERS[(right - turn) % passes]
                # Only the first pass holds the picture; the others name that row.
                image = str(number) if turn else base64.b64encode(_png(item.pictures[0])).decode()
                index, question = number + turn * PASS_STEP, item.fields["question"]
                row = [index, question, *turned, answer, item.kind, image]
                if turn:
                    later[turn - 1].append(row)
                else:
                    table.writerow(row)
        for rows in later:
            table.writerows(rows)


def _write_rag(folder: Path, spec: SetSpec) -> None:
    (folder / RAG_IMAGES).mkdir()
    with (folder / FILES["rag"]).open("w", encoding="utf-8", newline="\n") as file:
        for number, item in enumerate(spec.items()):
            paths = []
            for k, picture in enumerate(item.pictures, 1):
                path = f"{RAG_IMAGES}/{number:05d}_{k:02d}.png"
                (folder / path).write_bytes(_png(picture))
                paths.append(path)
            ends = list(itertools.accumulate(item.documents, initial=0))
            topic = re.findall(r"!\[(.*?)\]", item.answer)[0]
            entry = {
                "id": str(number),
                "query": item.fields["query"],
                "documents": [item.fields[f"document {d}"] for d in range(len(item.documents))],
                "images": [paths[a:b] for a, b in itertools.pairwise(ends)],
                "gt_raw_answer": json.dumps(
                    {"reason": _REASON, "category": "how-to", "answer": item.answer},
                    ensure_ascii=False,
                ),
                "gt_clean_answer": item.answer,
                "category": [topic, "how-to"],
                "split": _SPLIT_NAMES.get(spec.split, spec.split),
            }
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


# -- command line ---------------------------------------------------------------------------------


def _refusal(folder: Path) -> str | None:
    """Why `folder` must not be replaced; `None` if it may."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"--out {folder}: is no folder"
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    if not found and not any(folder.iterdir()):
        return None
    try:
        listed: Any = json.loads((folder / cache.MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        listed = None
    if not isinstance(listed, dict) or not listed.keys() & set(FILES.values()):
        return f"--out {folder}: is not empty, and no set of this program; take another folder"
    strange = sorted(found - listed.keys() - {cache.MANIFEST})
    if strange:
        return (
            f"--out {folder}: also holds {strange[0]}, which is not of its set; take it away first"
        )
    return None


def main() -> int:
    """Write a set and print the path of its file; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.pocket.generate",
        description="Write a set of the pocket world in the published format of a benchmark: "
        "OCRBench (ocr), CCBench (cc) or RAG-IGBench (rag).",
    )
    add = parser.add_argument
    add("--task", required=True, choices=TASKS)
    add("--n", type=int, required=True, help="items (cc: questions, of four rows each)")
    add("--seed", type=int, required=True, help="draws them; a whole number >= 0")
    add("--out", type=Path, required=True, help="a new or empty folder, or an earlier set")
    add("--split", choices=SPLITS, default=HELD_OUT, help=f"default {HELD_OUT}")
    add("--band", choices=(*BANDS, BOTH), default=BOTH, help=f"of the print, default {BOTH} (ocr)")
    add("--language", choices=(*LANGUAGES, BOTH), default=BOTH, help=f"default {BOTH}")
    add("--images-per-item", type=int, default=1, help="default 1 (ocr)")
    args = parser.parse_args()
    spec = SetSpec(
        args.task, args.n, args.seed, args.split, args.band, args.language, args.images_per_item
    )
    try:
        spec.check()
    except ValueError as error:
        parser.error("\n".join(f"--{f.replace('_', '-', 2)}" for f in str(error).splitlines()))
    try:
        folder = args.out.resolve()
        refusal = _refusal(folder)
        if refusal is not None:
            parser.error(refusal)
        print(generate(folder, spec))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
