"""What a calibration belongs to: a short, stable identity of a checkpoint folder.

Needs no tensor library, so that it may run wherever a path is known.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

FULL_HASH_BELOW = 256 * 2**20
"""Checkpoints smaller than this many bytes are hashed whole."""


class FingerprintError(ValueError):
    """The folder is not a checkpoint that can be identified; the message says what is missing."""


def model_fingerprint(model_dir: Path) -> str:
    """SHA-256, in hex, of what makes a checkpoint: its ``config.json`` and its weights.

    Weights under `FULL_HASH_BELOW` bytes enter whole. Larger ones, of which a full read would take
    minutes, enter by the index file and by every file's size and safetensors header (names,
    types, shapes and offsets): two checkpoints of the same shape, such as before and after a
    fine-tune, then look alike unless their configuration differs.

    Args:
        model_dir: a folder with ``config.json`` and safetensors weights (single or indexed).

    Raises:
        FingerprintError: a file is missing or is not safetensors.
    """
    digest = hashlib.sha256()
    digest.update(_tagged("config.json", _read(model_dir / "config.json")))
    files = weight_files(model_dir)
    whole = sum(f.stat().st_size for f in files) < FULL_HASH_BELOW
    index = model_dir / INDEX_FILE
    if not whole and index.is_file():
        digest.update(_tagged(INDEX_FILE, _read(index)))
    for file in files:
        part = _read(file) if whole else _header(file)
        digest.update(_tagged(f"{file.name} {file.stat().st_size}", part))
    return digest.hexdigest()


def weight_files(model_dir: Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted by name: those the index names, or the single one.

    Raises:
        FingerprintError: there are none, or one that the index names is missing.
    """
    index = model_dir / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(_read(index))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise FingerprintError(f"{index}: no weight_map in it ({error})") from error
    else:
        names = [SINGLE_FILE]
    files = [model_dir / name for name in names]
    for file in files:
        if not file.is_file():
            raise FingerprintError(
                f"{file}: missing; {model_dir} should hold {SINGLE_FILE}, or {INDEX_FILE} and the "
                "files that it names"
            )
    return files


def _header(file: Path) -> bytes:
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 0 < length <= file.stat().st_size - 8:
            raise FingerprintError(f"{file}: not a safetensors file (its header does not fit)")
        return f.read(length)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise FingerprintError(f"{file}: cannot be read ({error.strerror})") from error


def _tagged(name: str, content: bytes) -> bytes:
    """Name and content, so that moving bytes from one file to the next changes the hash."""
    return hashlib.sha256(name.encode()).digest() + hashlib.sha256(content).digest()
