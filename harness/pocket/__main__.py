"""``python -m harness.pocket``: build the bundled model if needed, and print where it is."""

from __future__ import annotations

import argparse
import sys

from harness.pocket.model import ensure


def main() -> int:
    """Build if needed and print the path; gives the exit status."""
    """Build the bundled model if needed and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m harness.pocket", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws the weights (default 0)")
    seed = parser.parse_args().seed
    if seed < 0:
        parser.error(f"--seed {seed}: takes a whole number >= 0")
    try:
        print(ensure(seed))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
