"""A run on disk: `RunFolder`, the only writer and reader of result files.

    runs/<time>-<name>/
        plan.json                 what was to be run, and where (see `harness.results.plan_file`)
        samples/<key>.json        what a workload asked, as text
        cells/<id>/config.json    the cell's settings
                   schedule.json  when each request was to be sent
                   records.jsonl  what happened to each (see `harness.results.records`)
                   steps.npz      per-step telemetry, where the engine gives it
                   summary.json   status, reason of a failure, and the numbers of its CSV row
        results.csv, report.html  derived from the above, and can be again

A cell's folder appears at once with all its files.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from harness.datasets.sample import Sample
from harness.load.record import RequestRecord
from harness.results import atomic, trees
from harness.results import records as record_lines
from harness.results import samples as sample_texts
from harness.results.errors import ResultsError
from harness.results.samples import StoredSample
from harness.settings import WorkloadSettings

LATEST = "latest"
_CELL_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_CELL_FILES = ("config.json", "schedule.json", "records.jsonl", "summary.json")


@dataclass(frozen=True)
class RunFolder:
    """One run's folder.

    Attributes:
        path: absolute, links resolved.
    """

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, when: datetime) -> RunFolder:
        """Make ``root/<YYYY-mm-dd_HH-MM-SS>-<name>``, and `root` if need be.

        Characters of `name` that are awkward in a file name become ``-``. A folder that is already
        there is left alone: the new one gets a number.

        Raises:
            OSError: the folder could not be made.
        """
        slug = re.sub(r"[^0-9A-Za-z._-]+", "-", name).strip("-.")[:80] or "run"
        stem = f"{when:%Y-%m-%d_%H-%M-%S}-{slug}"
        root = root.resolve()
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = root / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return cls._furnish(path)
        raise FileExistsError(f"{root / stem}: 999 runs of this name and second are there already")

    @classmethod
    def create_at(cls, path: Path) -> RunFolder:
        """Make a run's folder at `path`, and what is above it if need be; an empty folder is taken.

        Raises:
            ResultsError: something is there already.
            OSError: the folder could not be made.
        """
        path = path.resolve()
        if path.exists() and not path.is_dir():
            raise ResultsError(f"{path}: is no folder; name one")
        if path.exists() and any(path.iterdir()):
            raise ResultsError(f"{path}: is not empty, and no run")
        path.mkdir(parents=True, exist_ok=True)
        return cls._furnish(path)

    @classmethod
    def _furnish(cls, path: Path) -> RunFolder:
        (path / "cells").mkdir()
        (path / "samples").mkdir()
        atomic.sync_folder(path.parent)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run; `path` may be ``runs/latest``.

        Raises:
            ResultsError: there is no run at `path`.
        """
        if path.is_symlink() and not path.exists():
            raise ResultsError(f"{path}: points to {path.readlink()}, which is gone")
        if not path.exists():
            hint = "; nothing has been run yet" if path.name == LATEST else ""
            raise ResultsError(f"{path}: no such run{hint}")
        if not (path / "plan.json").is_file():
            raise ResultsError(f"{path}: not a run: it has no plan.json")
        return cls(path.resolve())

    def write_plan(self, tree: Mapping[str, Any]) -> None:
        """Write ``plan.json`` (see `harness.results.plan_file`)."""
        atomic.write_text(self.path / "plan.json", trees.to_json(tree))

    def write_samples(self, workload: WorkloadSettings, items: Iterable[Sample]) -> None:
        """Keep what `workload` asks, for the report. Once a workload; again changes nothing."""
        path = self._samples_path(workload)
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, trees.to_json(sample_texts.to_tree(items)))

    def write_cell(
        self,
        cell_id: str,
        *,
        config: Mapping[str, Any],
        schedule: str,
        records: Iterable[RequestRecord],
        steps: bytes | None,
        summary: Mapping[str, Any],
    ) -> None:
        """Write all files of one cell; they appear together.

        Args:
            cell_id: `Cell.id`.
            config: `Settings.to_tree()` of the cell.
            schedule: the schedule as JSON text.
            records: one for each measured request, in the order of the schedule.
            steps: per-step telemetry as the bytes of an ``.npz``, if there is any.
            summary: the row of `harness.results.summary.summarize`.

        Raises:
            ResultsError: the cell has results already.
            ValueError: `cell_id` cannot be a folder's name, or `schedule` is not JSON.
            OSError: something could not be written; the cell's folder is not there.
        """
        path = self._cell_path(cell_id)
        json.loads(schedule)
        files = {
            "config.json": trees.to_json(config).encode(),
            "schedule.json": schedule.encode(),
            "records.jsonl": record_lines.to_bytes(records),
            "summary.json": trees.to_json(summary).encode(),
        }
        if steps is not None:
            files["steps.npz"] = steps
        try:
            atomic.write_folder(path, files)
        except FileExistsError:
            raise ResultsError(f"{path}: the cell has results already") from None

    def discard_cell(self, cell_id: str) -> None:
        """Remove a cell's results, for example to run it again. Gone at once, then deleted."""
        path = self._cell_path(cell_id)
        aside = path.with_name(f".discarded-{cell_id}")
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        shutil.rmtree(aside)

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of the run itself, such as ``results.csv``; gives its path."""
        path = self.path / name
        atomic.write_text(path, text)
        return path

    def point_latest(self) -> None:
        """Make ``latest`` beside the run point to it.

        Raises:
            OSError: something that is not a link has that name, or links cannot be made here.
        """
        atomic.link(self.path.parent / LATEST, self.path)

    def plan(self) -> dict[str, Any]:
        """What ``plan.json`` holds."""
        return self._tree(self.path / "plan.json")

    def cell_ids(self) -> tuple[str, ...]:
        """The cells that have results: those of the plan in its order, then strangers by name."""
        folder = self.path / "cells"
        names = folder.iterdir() if folder.is_dir() else ()
        found = {p.name for p in names if _CELL_ID.fullmatch(p.name) and p.is_dir()}
        planned = [c for c in self.planned_ids() if c in found]
        return tuple(dict.fromkeys([*planned, *sorted(found)]))

    def planned_ids(self) -> tuple[str, ...]:
        """The cells of the plan, in its order."""
        cells = self.plan().get("cells", [])
        try:
            return tuple(str(c["id"]) for c in cells)
        except (TypeError, KeyError):
            raise ResultsError(f"{self.path / 'plan.json'}: damaged at `cells`") from None

    def config(self, cell_id: str) -> dict[str, Any]:
        """The cell's settings as a tree."""
        return self._tree(self._part(cell_id, "config.json"))

    def schedule(self, cell_id: str) -> str:
        """The cell's schedule as JSON text."""
        path = self._part(cell_id, "schedule.json")
        data = _read(path)
        trees.from_json(data, str(path))
        return data.decode()

    def records(self, cell_id: str) -> tuple[RequestRecord, ...]:
        """The cell's records, in the order of the schedule."""
        path = self._part(cell_id, "records.jsonl")
        return record_lines.from_bytes(_read(path), str(path))

    def steps(self, cell_id: str) -> dict[str, np.ndarray[Any, Any]] | None:
        """The cell's per-step telemetry by array name; `None` if it has none."""
        path = self._cell_path(cell_id) / "steps.npz"
        if not path.exists():
            return None
        try:
            return unpack_steps(_read(path))
        except ValueError as error:
            raise ResultsError(f"{path}: {error}") from None

    def summary(self, cell_id: str) -> dict[str, Any]:
        """The cell's summary, as it was written when the cell ended."""
        return self._tree(self._part(cell_id, "summary.json"))

    def samples(self, workload: WorkloadSettings) -> dict[str, StoredSample]:
        """What `workload` asked, by sample id; empty if it was not kept."""
        path = self._samples_path(workload)
        if not path.exists():
            return {}
        return sample_texts.from_tree(self._tree(path), str(path))

    def _samples_path(self, workload: WorkloadSettings) -> Path:
        return self.path / "samples" / f"{sample_texts.workload_key(workload)}.json"

    def _cell_path(self, cell_id: str) -> Path:
        if not _CELL_ID.fullmatch(cell_id):
            raise ValueError(f"{cell_id!r} cannot be a cell's name")
        return self.path / "cells" / cell_id

    def _part(self, cell_id: str, name: str) -> Path:
        folder = self._cell_path(cell_id)
        if not folder.is_dir():
            raise ResultsError(f"{folder}: the cell has no results")
        missing = [n for n in _CELL_FILES if not (folder / n).is_file()]
        if missing:
            raise ResultsError(f"{folder}: damaged, without {', '.join(missing)}")
        return folder / name

    def _tree(self, path: Path) -> dict[str, Any]:
        return trees.from_json(_read(path), str(path))


def unpack_steps(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a cell's per-step telemetry, by name.

    Raises:
        ValueError: the bytes are no ``.npz``.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, KeyError) as error:
        raise ValueError(f"damaged, not an .npz: {error}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror or error}") from None
