"""`python -m harness`: one cell, or with ``-m`` a sweep."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from harness import launcher
from harness.help import conf_folder, groups, help_text


@hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")
def run_one(config: DictConfig) -> None:
    """Run one cell. Under a launcher that is not ours, a failure is an exception, as it expects."""
    from harness.sweep import run_sweep

    status = run_sweep(launcher.settings_of([config]), sys.argv)
    if HydraConfig.get().mode == RunMode.MULTIRUN and status:
        raise RuntimeError(f"the cell ended with status {status}")
    raise SystemExit(status)


def wrong_keys(arguments: Sequence[str]) -> list[str]:
    """What is wrong with the keys of command-line overrides, a line each; empty if nothing is.

    Hydra names an unknown key but not the known ones.
    """
    known: dict[str, str] = {}
    for group in groups(conf_folder()):
        known[group.name] = "one of " + ", ".join(group.choices)
        known |= {s.key: s.about for s in group.settings}
    known["experiment"] = "the name of a preset"
    parser = OverridesParser.create()
    findings = []
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        try:
            key = parser.parse_override(argument).key_or_group
        except HydraException:
            continue  # Hydra's own message points at the place
        if key not in known and not key.startswith(("hydra.", "hydra/")):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = (
                f"did you mean {near[0]} ({known[near[0]]})?" if near else "see --help for all keys"
            )
            findings.append(f"{key}: no such setting; {hint}")
    return findings


def main() -> None:
    """Entry point of the `pruneroute` command and of ``python -m harness``."""
    findings = wrong_keys(sys.argv[1:])
    if findings:
        print("error: nothing was started; these settings are wrong:", file=sys.stderr)
        print("\n".join(f"  {f}" for f in findings), file=sys.stderr)
        raise SystemExit(2)
    launcher.register()
    # Hydra's templates expand $NAME; the text has none of its own.
    ConfigStore.instance().store(
        "pruneroute",
        {"app_name": "harness", "header": "", "footer": "", "template": help_text()},
        group="hydra/help",
    )
    try:
        run_one()
    except KeyboardInterrupt:
        print("interrupted before anything was started", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
