"""Trees of plain values ↔ JSON text, for the small files of a run.

JSON has no infinity: ``inf`` is written as the text ``"inf"`` and NaN, which says nothing, as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.results.errors import ResultsError


def to_json(tree: Any) -> str:
    """The tree as indented JSON with a line end; keys keep their order.

    Raises:
        TypeError: the tree holds something other than mappings, sequences, texts, numbers,
            booleans, paths and null.
    """
    return json.dumps(_plain(tree), indent=1, allow_nan=False) + "\n"


def from_json(data: bytes, source: str) -> dict[str, Any]:
    """The object in `data`.

    Args:
        data: the file's content.
        source: its name, for messages.

    Raises:
        ResultsError: `data` is not a JSON object; names `source`.
    """
    try:
        tree = json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ResultsError(f"{source}: damaged, not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ResultsError(f"{source}: damaged, expected a JSON object")
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Path):
        return str(value)
    return value
