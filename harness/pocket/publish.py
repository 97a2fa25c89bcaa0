"""``python -m harness.pocket.publish``: turn trained weights into the bundled checkpoint folder.

Writes the published layout (configuration, tokenizer, processor, bfloat16 weights), the model card,
the experts' similarity in all measures and the protected experts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.pocket.model import CARD_FILE, FOLDER, build


def main() -> int:
    """Publish; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m harness.pocket.publish", description=__doc__)
    parser.add_argument("weights", type=Path, help="model.safetensors of harness.pocket.train")
    parser.add_argument("--card", type=Path, default=FOLDER / CARD_FILE, help="Markdown")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder (default {FOLDER})")
    args = parser.parse_args()
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(args.weights)
        card = args.card.read_text(encoding="utf-8")
    except (OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    build(args.out, weights, card=card)
    from harness.pocket.protect import protect

    protect(args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
