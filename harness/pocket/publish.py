"""``python -m harness.pocket.publish``: turn trained weights into the bundled checkpoint folder.

Writes the published layout (configuration, tokenizer, processor, bfloat16 weights), the model card,
the experts' similarity in all measures and the protected experts. What is there is replaced in one
step at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness.endings import ended
from harness.pocket.cache import MANIFEST
from harness.pocket.model import CARD_FILE, FOLDER, WEIGHTS_FILE, build
from harness.pocket.weights import read_weights


def refusal(out: Path) -> str | None:
    """Why nothing is published there; None if it may be.

    Args:
        out: a folder that would be replaced.
    """
    if out.exists() and not out.is_dir():
        return f"{out} is no folder; name one"
    if not out.is_dir() or not any(out.iterdir()):
        return None
    try:
        listed = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        listed = None
    if not isinstance(listed, dict) or not {CARD_FILE, WEIGHTS_FILE} <= listed.keys():
        return (
            f"{out} holds what is no checkpoint of ours, and would be replaced; name another folder"
        )
    found = {p.relative_to(out).as_posix() for p in out.rglob("*") if not p.is_dir()}
    strange = sorted(found - {*listed, MANIFEST})
    if strange:
        return f"{out} also holds {strange[0]}, which is not of its checkpoint; take it away first"
    return None


def main() -> int:
    """Publish; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m harness.pocket.publish", description=__doc__)
    parser.add_argument("weights", type=Path, help="model.safetensors of harness.pocket.train")
    parser.add_argument("--card", type=Path, default=FOLDER / CARD_FILE, help="Markdown")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder (default {FOLDER})")
    args = parser.parse_args()
    args.out = args.out.resolve()
    reason = refusal(args.out)
    if reason is not None:
        print(f"error: --out: {reason}", file=sys.stderr)
        return 2
    try:
        weights = read_weights(args.weights)
        card = args.card.read_text(encoding="utf-8")
        from harness.pocket.protect import mark

        build(args.out, weights, card=card, then=mark)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
