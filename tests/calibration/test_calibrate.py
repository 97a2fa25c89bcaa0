"""The command line of calibration, on the bundled model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from harness import calibrate
from harness.calibration import MEASURES, collect
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.similarity import CalibrationError, load_similarity
from harness.calibration.texts import GENERAL_TEXTS
from harness.pocket.model import FOLDER, one_thread
from harness.pocket.recipe import Recipe


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["calibrate", *map(str, arguments)])
    with one_thread():
        return calibrate.main()


@pytest.mark.parametrize("measure", [None, *MEASURES[1:]])
def test_writes_the_measure_that_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    measure: str | None,
) -> None:
    texts = GENERAL_TEXTS[:4]
    monkeypatch.setitem(collect.calibrate.__kwdefaults__, "texts", texts)
    out = tmp_path / "s.safetensors"
    flags = ["--measure", measure] if measure else []
    assert run(monkeypatch, FOLDER, *flags, "--out", out) == 0
    assert capsys.readouterr().out == f"{out}\n"
    r = Recipe()
    load_similarity(out, layers=r.layers, experts=r.experts, model_hash=model_fingerprint(FOLDER))
    with safe_open(out, framework="pt") as file:
        assert file.metadata()["measure"] == (measure or "frobenius")


def test_what_is_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, tmp_path / "none") == 2
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit):
        run(monkeypatch, FOLDER, "--measure", "rbf")
    with pytest.raises(CalibrationError, match="takes one of frobenius, cosine, cka"):
        collect.calibrate(FOLDER, tmp_path / "s", measure="rbf")
    with pytest.raises(CalibrationError, match="0 tokens"):
        collect.calibrate(FOLDER, tmp_path / "s", texts=())
    assert list(tmp_path.iterdir()) == []
