"""What a long calibration has summed up so far, on disk, so that the same command can go on from there."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.calibration.files import write_tensors
from harness.calibration.similarity import CalibrationError

PARTIAL_VERSION = "1"


@dataclass(frozen=True)
class Progress:
    """How far a calibration had come.

    Attributes:
        done: units of work that are in the sums, in the order in which they are done.
        tensors: the sums, on the CPU.
    """

    done: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Partial:
    """A file of partial sums, and what they are sums of.

    Attributes:
        path: of the file, see `harness.calibration.partial_file`.
        made_of: everything that the sums depend on, by the name that a user knows it by. Two runs with
            the same values here may go on with each other's sums.
    """

    path: Path
    made_of: Mapping[str, str]

    def load(self) -> Progress | None:
        """What was last saved; None where there is nothing.

        Raises:
            CalibrationError: it is of another run, and the message says in what, or it is damaged.
        """
        if not self.path.exists():
            return None
        start_anew = f"delete {self.path} to start anew"
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            version, done = metadata["partial_version"], int(metadata["done"])
            theirs: dict[str, str] = json.loads(metadata["made_of"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CalibrationError(
                f"{self.path}: holds no partial sums ({error}); {start_anew}"
            ) from error
        if done < 0 or not all(bool(t.isfinite().all()) for t in tensors.values()):
            raise CalibrationError(f"{self.path}: is damaged; {start_anew}")
        if version != PARTIAL_VERSION:
            raise CalibrationError(f"{self.path}: was begun by another release; {start_anew}")
        differing = differences(theirs, self.made_of)
        if differing:
            raise CalibrationError(
                f"{self.path}: was begun with {'; '.join(differing)}; give the same again, name "
                f"another out=, or {start_anew}"
            )
        return Progress(done, tensors)

    def save(self, done: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace what is there, in one step.

        Raises:
            OSError: the place cannot be written.
        """
        metadata = {
            "partial_version": PARTIAL_VERSION,
            "done": str(done),
            "made_of": json.dumps(dict(self.made_of)),
        }
        write_tensors(self.path, tensors, metadata)

    def drop(self) -> None:
        """Delete the file: what it was for is written."""
        self.path.unlink(missing_ok=True)


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """What two runs differ in, as ``name=THEIRS, not OURS``; long hashes cut short."""
    return [
        f"{name}={_short(theirs.get(name))}, not {_short(ours.get(name))}"
        for name in dict.fromkeys([*ours, *theirs])
        if theirs.get(name) != ours.get(name)
    ]


def versions() -> dict[str, str]:
    """The libraries whose arithmetic goes into sums, by name."""
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def check_place(out: Path) -> None:
    """Whether a file can be written there, before hours go into it. Folders above it are made.

    Raises:
        CalibrationError: it cannot.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise CalibrationError(f"out={out}: cannot be written ({error.strerror})") from error
    if out.is_dir():
        raise CalibrationError(f"out={out}: is a folder; takes a file")
    if out.exists() and not _is_ours(out):
        raise CalibrationError(
            f"out={out}: is there and no file of this program; take another name"
        )


def _is_ours(path: Path) -> bool:
    """Whether a file holds matrices that were calibrated, so that new ones may take its place."""
    try:
        with safe_open(path, framework="pt") as file:
            return "model_sha256" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _short(value: str | None) -> str:
    if value is None:
        return "(none)"
    return value[:12] if len(value) == 64 else value
