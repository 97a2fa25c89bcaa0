"""Writes what releases have: `python -m tests.engine.releases FOLDER...`, from the repository's root.

A FOLDER holds a release's sources, as `vllm-0.27.0.tar.gz` of the package index unpacks. Each gives a
`vllm-VERSION.json` beside this file, a fact a line; git shows what a new need, or a new release, brought.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.engine.releases.needs import facts_of
from tests.engine.releases.sources import Sources

HERE = Path(__file__).parent


def main(folders: list[str]) -> int:
    """Write one file for each folder."""
    if not folders:
        print(__doc__)
        return 2
    for folder in map(Path, folders):
        version = folder.name.removeprefix("vllm-")
        facts = sorted(facts_of(Sources(folder)).items())
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in facts)
        (HERE / f"vllm-{version}.json").write_text(f"{{\n{lines}\n}}\n")
        print(version)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
