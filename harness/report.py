"""`python -m harness.report [RUN]`: `results.csv` and `report.html` again from records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.results.derive import derive
from harness.results.errors import ResultsError
from harness.results.report import write_report
from harness.results.store import LATEST, RunFolder
from harness.results.table import terminal_table, write_csv

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Rebuild, print the table and the paths. Exit status 0, or 2 if the run cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.report",
        description="Make results.csv and report.html again from the records of a run.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        default=Path("runs") / LATEST,
        metavar="RUN",
        help="the run's folder (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    try:
        run = RunFolder.open(arguments.run)
        derived = derive(run)
        rows = [r.row for r in derived[1]]
        written = [write_csv(run, rows), write_report(run, derived)]
    except (ResultsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    console = Console()
    # A log has no width to fit into.
    console.print(terminal_table(rows), width=None if console.is_terminal else 160)
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
