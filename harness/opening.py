"""How a run's folder is opened: begun with its plan, or gone on with, and kept from other processes."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

from harness.plan import Cell
from harness.prepare import Prepared
from harness.results.errors import ResultsError
from harness.results.plan_file import plan_tree
from harness.results.provenance import collect
from harness.results.store import RunFolder


def begin(run: RunFolder, prepared: Prepared, *, name: str, argv: Sequence[str]) -> None:
    """Claim a fresh folder, and write down what is to run in it.

    Args:
        run: just created.
        prepared: what is to run.
        name: what the run is called.
        argv: how it was asked for.

    Raises:
        ResultsError: another process is in it.
        OSError: it cannot be written.
    """
    claim(run)
    run.write_plan(
        plan_tree(
            name=name,
            created=datetime.now().astimezone(),
            cells=prepared.cells,
            top_k=prepared.top_k,
            provenance=collect(argv),
            notes={"hashes": dict(prepared.hashes), "caches": _cache_policy(prepared.cells)},
        )
    )
    for workload, loaded in prepared.workloads.items():
        run.write_samples(workload, loaded.samples)


def resume(path: Path, prepared: Prepared, *, asked: str) -> tuple[RunFolder, frozenset[str]]:
    """Claim a run of the same cells, and take out what has to be done again.

    Args:
        path: its folder.
        prepared: what is asked for now.
        asked: the setting or option that named it, for the error.

    Returns:
        The run, and the ids of its finished cells.

    Raises:
        ResultsError: there is no such run, it is of other cells, or another process is in it.
    """
    run = RunFolder.open(path)
    claim(run)
    planned, wanted = set(run.planned_ids()), {c.id for c in prepared.cells}
    if planned != wanted:
        raise ResultsError(
            f"{asked}: that run was of other cells "
            f"({len(planned - wanted)} of its {len(planned)} are not asked for now, "
            f"{len(wanted - planned)} are new); give the same settings, data and versions, or "
            "another folder"
        )
    finished = frozenset(i for i in run.cell_ids() if run.summary(i).get("status") == "ok")
    for unfinished in set(run.cell_ids()) - finished:
        run.discard_cell(unfinished)
    return run, finished


_claims: list[IO[str]] = []


def claim(run: RunFolder) -> None:
    """Keep other processes out of a run's folder for as long as this one lives.

    Raises:
        ResultsError: another process is in it.
    """
    lock = (run.path / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ResultsError(f"{run.path}: another process is running it") from None
    _claims.append(lock)


def _cache_policy(cells: Sequence[Cell]) -> str:
    policies = {c.settings.load.caches for c in cells}
    words = {
        "cold": "cold: prefix, processor and encoder caches are emptied before the warm-up of each "
        "cell and again before its measured requests; warm-up requests use other samples",
        "warm": "warm: no cache is emptied; warm-up requests use other samples",
    }
    return "; ".join(words[p] for p in sorted(policies))
