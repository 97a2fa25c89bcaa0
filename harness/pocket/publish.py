"""``python -m harness.pocket.publish``: turn trained weights into the bundled checkpoint folder.

Writes the published layout (configuration, tokenizer, processor, bfloat16 weights), the model card,
the experts' similarity in all measures and the protected experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from harness.pocket.cache import MANIFEST
from harness.pocket.model import CARD_FILE, FOLDER, build
from harness.pocket.network import Network
from harness.pocket.recipe import Recipe


def refusal(weights: Mapping[str, Tensor], out: Path) -> str | None:
    """Why these weights are not published there; None if they are.

    Args:
        weights: tensors by name.
        out: a folder that would be replaced.
    """
    if out.exists() and not out.is_dir():
        return f"{out} is no folder; name one"
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        return (
            f"{out} holds what is no checkpoint of ours, and would be replaced; name another folder"
        )
    wanted = {k: v.shape for k, v in Network(Recipe()).state_dict().items()}
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in weights:
            return f"the weights lack {name}; give the model.safetensors of harness.pocket.train"
        if name not in wanted:
            return f"the weights hold {name}, which the model has not; give its model.safetensors"
        if weights[name].shape != wanted[name]:
            return (
                f"{name} is {tuple(weights[name].shape)} and not {tuple(wanted[name])}: these are "
                "weights of another model"
            )
    return None


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
        print(f"error: {args.weights}, {args.card}: {error}", file=sys.stderr)
        return 2
    reason = refusal(weights, args.out)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    build(args.out, weights, card=card)
    from harness.pocket.protect import protect

    protect(args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
