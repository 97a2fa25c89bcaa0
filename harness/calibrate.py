"""`python -m harness.calibrate CHECKPOINT`: similarity matrices for SERE, written beside the model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.calibration import MEASURES, SIMILARITY_FILE, similarity_file
from harness.endings import ended
from harness.engine.checkpoint import read_checkpoint


def main() -> int:
    """Calibrate one checkpoint; gives the exit status: 0, or 2 after a line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.calibrate", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder of a mixture-of-experts checkpoint")
    parser.add_argument(
        "--measure", choices=MEASURES, default=MEASURES[0], help=f"of similarity ({MEASURES[0]})"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"file to write (CHECKPOINT/{SIMILARITY_FILE}; other measures add their name)",
    )
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu, cuda (cpu)")
    arguments = parser.parse_args()
    out: Path = arguments.out or arguments.checkpoint / similarity_file(arguments.measure)
    try:
        checkpoint = read_checkpoint(arguments.checkpoint)
        if not checkpoint.moe_layers:
            raise ValueError(f"{arguments.checkpoint}: {checkpoint.architecture} has no experts")
        from harness.calibration.collect import calibrate

        calibrate(arguments.checkpoint, out, measure=arguments.measure, device=arguments.device)
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
