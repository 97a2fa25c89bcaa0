"""``python -m harness.pocket``: print where the bundled model is."""

from __future__ import annotations

import argparse
import sys

from harness.pocket.model import ensure


def main() -> int:
    """Print the path; gives the exit status: 0, or 1 after a line that says what is missing."""
    argparse.ArgumentParser(prog="python -m harness.pocket", description=__doc__).parse_args()
    try:
        print(ensure())
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
