"""`python -m harness.calibrate COMMAND key=value …`: what re-routing goes by, measured on a checkpoint.

`similarity` compares a model's experts on text, `protection` finds those that are costly to do without
on answers. Each writes one small file, and can be stopped at any time and gone on with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.calibration import MEASURES, PROTECTION_FILE, partial_file, similarity_file
from harness.calibration.arguments import (
    ArgumentsError,
    Key,
    device,
    one_of,
    parse,
    path,
    text,
    usage,
    whole,
)
from harness.endings import Terminated, ended

POCKET, GENERAL = "pocket", "general"
"""Texts that are named rather than read from a file."""

_DEVICE = Key("device", "cpu|cuda", "where the model runs: cpu, cuda, cuda:N (cpu)", device, "cpu")
_DTYPE = Key(
    "dtype",
    "float32|bfloat16|float16",
    "of the model while it runs (float32 on cpu, bfloat16 on cuda); sums are float64",
    one_of("float32", "bfloat16", "float16"),
    None,
)
_MODEL = Key("model", "PATH", "folder of a mixture-of-experts checkpoint", path)


@dataclass(frozen=True)
class Command:
    """One of the commands.

    Attributes:
        says: what it does, in a line.
        keys: its arguments.
        out: where it writes unless `out` is given, from the checkpoint's folder and its arguments.
        run: does it, given its arguments and where to write.
    """

    says: str
    keys: tuple[Key, ...]
    out: Callable[[Mapping[str, Any]], str]
    run: Callable[[Mapping[str, Any], Path], None]


def _similarity(given: Mapping[str, Any], out: Path) -> None:
    from harness.calibration.checkpoints import default_dtype
    from harness.calibration.similarity_run import SimilarityTask, measure_similarity

    task = SimilarityTask(
        model=given["model"],
        out=out,
        measure=given["measure"],
        device=given["device"],
        dtype=given["dtype"] or default_dtype(given["device"]),
        max_tokens=given["max_tokens"],
    )
    measure_similarity(task, texts(given["data"], given["samples"]))


def _protection(given: Mapping[str, Any], out: Path) -> None:
    from harness.calibration.checkpoints import default_dtype
    from harness.calibration.protection_run import ProtectionTask, measure_protection
    from harness.calibration.samples import read_samples

    task = ProtectionTask(
        model=given["model"],
        similarity=given["similarity"],
        out=out,
        count=given["count"],
        primary_experts=given["primary_experts"],
        batch=given["batch"],
        device=given["device"],
        dtype=given["dtype"] or default_dtype(given["device"]),
        max_tokens=given["max_tokens"],
    )
    measure_protection(task, read_samples(given["data"], given["samples"]))


def texts(data: str, samples: int | None) -> list[str]:
    """The texts that `data` names, or those in the file that it is.

    Args:
        data: ``pocket``, what the bundled model's experts are compared on; ``general``, a little prose
            of many kinds; or a path, see `harness.calibration.samples.read_texts`.
        samples: how many, from the first on; None for all, of ``pocket`` as many as the bundled
            matrices were made from.

    Raises:
        harness.calibration.similarity.CalibrationError: the file cannot be read or has no text.
    """
    if data == POCKET:
        from harness.pocket.held_in import held_in_texts
        from harness.pocket.model import CALIBRATION_TEXTS

        return held_in_texts(samples or CALIBRATION_TEXTS, seed=0)
    if data == GENERAL:
        from harness.calibration.texts import GENERAL_TEXTS

        return list(GENERAL_TEXTS[:samples])
    from harness.calibration.samples import read_texts

    return read_texts(Path(data), samples)


COMMANDS: Mapping[str, Command] = {
    "similarity": Command(
        "how alike a layer's experts are: where re-routing may send a token",
        (
            _MODEL,
            Key(
                "data",
                "FILE|pocket|general",
                ".jsonl with a text field, or text whose paragraphs blank lines separate",
                text,
            ),
            Key(
                "measure",
                "|".join(MEASURES),
                f"of similarity ({MEASURES[0]})",
                one_of(*MEASURES),
                MEASURES[0],
            ),
            Key(
                "out",
                "FILE",
                f"to write (MODEL/{similarity_file(MEASURES[0])}; other measures add their name)",
                path,
                None,
            ),
            _DEVICE,
            _DTYPE,
            Key("samples", "N", "texts to take, from the first on (all)", whole(1), None),
            Key("max_tokens", "N", "longer texts are cut to it (2048)", whole(1), 2048),
        ),
        lambda given: similarity_file(given["measure"]),
        _similarity,
    ),
    "protection": Command(
        "which experts re-routing is to leave alone: those whose absence costs most",
        (
            _MODEL,
            Key(
                "data",
                "FILE",
                ".jsonl of the task at hand: prompt, a string or chat messages, and answer",
                path,
            ),
            Key("similarity", "FILE", "of the model, as the other command writes it", path),
            Key("count", "N", "experts to mark in each layer (16)", whole(1), 16),
            Key(
                "primary_experts",
                "K",
                "heaviest experts of a token, which stay (2)",
                whole(1),
                2,
            ),
            Key("batch", "N", "requests that are taken to decode together (8)", whole(1), 8),
            Key("out", "FILE", f"to write (MODEL/{PROTECTION_FILE})", path, None),
            _DEVICE,
            _DTYPE,
            Key("samples", "N", "lines to take, from the first on (all)", whole(1), None),
            Key("max_tokens", "N", "longer samples are left out (none are)", whole(1), None),
        ),
        lambda given: PROTECTION_FILE,
        _protection,
    ),
}


def help_text() -> str:
    """How to call this program."""
    parts = [
        usage(f"python -m harness.calibrate {name}", command.keys)
        for name, command in COMMANDS.items()
    ]
    says = [f"  {name}: {command.says}" for name, command in COMMANDS.items()]
    return "\n\n".join(["\n".join([__doc__.strip(), "", *says]), *parts])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and print the path of its file; gives the exit status.

    0, or 2 after a line that says what is wrong. Stopped by Ctrl-C (130) or SIGTERM (143) it says how
    to go on.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    out: Path | None = None
    try:
        name = arguments[0] if arguments else ""
        if name not in COMMANDS:
            said = f"{name!r} is no command" if name else "no command given"
            raise ArgumentsError(f"{said}; takes {' or '.join(COMMANDS)} (--help says more)")
        command = COMMANDS[name]
        given = parse(name, command.keys, arguments[1:])
        out = given["out"] or given["model"] / command.out(given)
        command.run(given, out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Terminated) as stop:
        if out is None or not partial_file(out).exists():
            raise
        interrupted = isinstance(stop, KeyboardInterrupt)
        word = "interrupted" if interrupted else "terminated"
        print(f"{word}; {_kept(partial_file(out))}", file=sys.stderr)
        return 130 if interrupted else 143
    print(out)
    return 0


def _kept(partial: Path) -> str:
    return f"what was done is in {partial}, and the same command goes on from there"


if __name__ == "__main__":
    sys.exit(ended(main))
