"""`python -m harness.calibrate CHECKPOINT`: similarity matrices for SERE, written beside the model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.calibration import SIMILARITY_FILE
from harness.engine.checkpoint import read_checkpoint


def main() -> int:
    """Calibrate one checkpoint; gives the exit status: 0, or 2 after a line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.calibrate", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder of a mixture-of-experts checkpoint")
    parser.add_argument("--out", type=Path, help=f"file to write (CHECKPOINT/{SIMILARITY_FILE})")
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu, cuda (cpu)")
    arguments = parser.parse_args()
    out: Path = arguments.out or arguments.checkpoint / SIMILARITY_FILE
    try:
        checkpoint = read_checkpoint(arguments.checkpoint)
        if not checkpoint.moe_layers:
            raise ValueError(f"{arguments.checkpoint}: {checkpoint.architecture} has no experts")
        from harness.calibration.collect import calibrate

        calibrate(arguments.checkpoint, out, device=arguments.device)
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
