"""Arguments are read strictly: one line that says what is wrong and what is taken, before any work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness import calibrate
from harness.calibration.arguments import ArgumentsError, Key, parse, path, text, usage, whole

KEYS = (
    Key("model", "PATH", "a folder", path),
    Key("data", "FILE", "a file", text),
    Key("count", "N", "how many (16)", whole(1), 16),
)
TAKES = "takes model=PATH data=FILE [count=N]"


def test_values_and_defaults() -> None:
    given = parse("do", KEYS, ["data=a=b", "model=/x y"])
    assert given == {"model": Path("/x y"), "data": "a=b", "count": 16}
    assert parse("do", KEYS, ["count=3", "model=m", "data=d"])["count"] == 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["model=m"], "data= is missing"),
        ([], "model= is missing"),
        (["model=m", "data=d", "cuont=3"], "there is no key 'cuont'"),
        (["model=m", "data=d", "--count", "3"], "'--count' is not key=value"),
        (["model=m", "model=n", "data=d"], "model is given twice"),
        (["model=", "data=d"], "model=: takes a path"),
        (["model=m", "data="], "data=: takes a value after the ="),
        (["model=m", "data=d", "count=0"], "count=0: takes a whole number >= 1"),
        (["model=m", "data=d", "count=-3"], "count=-3: takes a whole number >= 1"),
        (["model=m", "data=d", "count=1.5"], "count=1.5: takes a whole number >= 1"),
        (["model=m", "data=d", "count=٣"], "count=٣: takes a whole number >= 1"),
    ],
)
def test_what_is_refused(arguments: list[str], why: str) -> None:
    with pytest.raises(ArgumentsError) as refused:
        parse("do", KEYS, arguments)
    assert str(refused.value) == f"do: {why}; {TAKES}"


def test_usage_shows_every_key() -> None:
    lines = usage("do", KEYS).splitlines()
    assert lines[0] == "do model=PATH data=FILE [count=N]"
    assert [line.split()[0] for line in lines[1:]] == ["model=PATH", "data=FILE", "[count=N]"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no command given; takes similarity or protection"),
        (["/models/Qwen", "--measure", "cka"], "'/models/Qwen' is no command; takes similarity or"),
        (
            ["similarity", "model=m", "data=d", "measure=rbf"],
            "one of frobenius, cosine, cka; takes",
        ),
        (
            ["similarity", "model=m", "data=d", "device=tpu"],
            "device=tpu: takes cpu, cuda or cuda:N",
        ),
        (["similarity", "model=m", "data=d", "dtype=int8"], "one of float32, bfloat16, float16; "),
        (["similarity", "model=m", "data=d", "count=3"], "there is no key 'count'; takes model="),
        (["protection", "model=m", "data=d.jsonl"], "similarity= is missing; takes model=PATH"),
        (["protection", "model=m", "data=d", "similarity=s", "measure=cka"], "no key 'measure'"),
    ],
)
def test_the_commands_arguments(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("work was begun")

    idle = {name: dataclasses.replace(c, run=work) for name, c in calibrate.COMMANDS.items()}
    monkeypatch.setattr(calibrate, "COMMANDS", idle)
    assert calibrate.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and words in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["protection", "-h"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert calibrate.main(arguments) == 0
    out = capsys.readouterr().out
    for command, call in (("similarity", "data=FILE|pocket|general"), ("protection", "[count=N]")):
        assert f"\npython -m harness.calibrate {command} model=PATH " in out
        assert call in out
