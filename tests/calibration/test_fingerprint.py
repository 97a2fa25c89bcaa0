"""A checkpoint's identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.calibration import fingerprint
from harness.calibration.fingerprint import FingerprintError, model_fingerprint


def checkpoint(folder: Path, value: float = 1.0, *, sharded: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    parts = {"one": torch.full((4,), value), "two": torch.zeros(2)}
    if sharded:
        names = {"one": "model-1.safetensors", "two": "model-2.safetensors"}
        for part, name in names.items():
            save_file({part: parts[part]}, folder / name)
        index = {"weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(parts, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_follows_weights_and_configuration_and_nothing_else(tmp_path: Path, sharded: bool) -> None:
    a = checkpoint(tmp_path / "a", sharded=sharded)
    b = checkpoint(tmp_path / "b", sharded=sharded)
    assert model_fingerprint(a) == model_fingerprint(b)
    assert len(model_fingerprint(a)) == 64
    save_file({"similarity": torch.eye(2)}, b / "sere_similarity.safetensors")
    (b / "README.md").write_text("hello")
    assert model_fingerprint(a) == model_fingerprint(b)
    c = checkpoint(tmp_path / "c", value=2.0, sharded=sharded)
    assert model_fingerprint(a) != model_fingerprint(c)
    (b / "config.json").write_text('{"a": 2}')
    assert model_fingerprint(a) != model_fingerprint(b)


def test_large_checkpoints_enter_by_their_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "FULL_HASH_BELOW", 1)
    a = checkpoint(tmp_path / "a", sharded=True)
    same_shapes = checkpoint(tmp_path / "b", value=2.0, sharded=True)
    assert model_fingerprint(a) == model_fingerprint(same_shapes)
    save_file({"one": torch.zeros(5)}, same_shapes / "model-1.safetensors")
    assert model_fingerprint(a) != model_fingerprint(same_shapes)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match=r"config.json: cannot be read"):
        model_fingerprint(tmp_path)
    folder = checkpoint(tmp_path / "a", sharded=True)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(FingerprintError, match=r"model-2.safetensors: missing"):
        model_fingerprint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(FingerprintError, match="no weight_map"):
        model_fingerprint(folder)


def test_header_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "FULL_HASH_BELOW", 1)
    folder = checkpoint(tmp_path / "a")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(FingerprintError, match="not a safetensors file"):
        model_fingerprint(folder)
