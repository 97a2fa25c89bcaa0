"""The list of settings, made from `conf/` itself, for ``--help`` and for the README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUPS = {
    "engine": "how vLLM is started, or where it runs",
    "model": "which checkpoint is served",
    "workload": "what is asked",
    "load": "when it is asked",
    "vision": "the prefill lever: VisionZip pruning of vision tokens",
    "routing": "the decode lever: SERE re-routing of experts",
    "report": "where results go",
}
_DEFAULTS = re.compile(r"^  - (\w+): (\w+)$", re.MULTILINE)
_LINE = re.compile(r"^(\w+): *(.*?) *# (.*)$")


@dataclass(frozen=True)
class Setting:
    """One line of a group's default file: key, default as written, and its comment."""

    key: str
    default: str
    about: str


@dataclass(frozen=True)
class Group:
    """One group: its name, what it is for, its choices (default first) and settings."""

    name: str
    about: str
    choices: tuple[str, ...]
    settings: tuple[Setting, ...]


def conf_folder() -> Path:
    """Where `conf/` is: beside the packages in a checkout, inside `harness` in an installed wheel."""
    here = Path(__file__).resolve().parent
    return next(c for c in (here / "conf", here.parent / "conf") if c.is_dir())


def groups(conf: Path) -> Iterator[Group]:
    """All groups, in order, read from their default files' comments."""
    defaults = dict(_DEFAULTS.findall((conf / "config.yaml").read_text()))
    for name, about in GROUPS.items():
        default = defaults[name]
        others = sorted(f.stem for f in (conf / name).glob("*.yaml") if f.stem != default)
        lines = (conf / name / f"{default}.yaml").read_text().splitlines()
        found = filter(None, map(_LINE.match, lines))
        settings = tuple(Setting(f"{name}.{m[1]}", m[2], m[3]) for m in found)
        yield Group(name, about, (default, *others), settings)


def experiments(conf: Path) -> Iterator[tuple[str, str]]:
    """(name, what it is) of every preset, from its second line."""
    for file in sorted((conf / "experiment").glob("*.yaml")):
        yield file.stem, file.read_text().splitlines()[1].removeprefix("# ")


def help_text() -> str:
    """What ``python -m harness --help`` prints."""
    conf = conf_folder()
    lines = [
        "PruneRoute: how far vision tokens can be pruned and experts re-routed before answers suffer.",
        "",
        "  python -m harness                                one cell",
        "  python -m harness -m KEY=A,B KEY=C,D             every combination, on one engine",
        "  python -m harness experiment=NAME [KEY=VALUE]    a preset",
        "  python -m harness --cfg job [KEY=VALUE]          show the settings, run nothing",
        "",
        "Presets:",
        *(f"  experiment={name:<10} {about}" for name, about in experiments(conf)),
    ]
    for group in groups(conf):
        choices = " | ".join(group.choices)
        lines += ["", f"{group.name}: {group.about} ({group.name}={choices})"]
        width = max(len(s.key) + len(s.default) for s in group.settings) + 1
        lines += [f"  {s.key + '=' + s.default:<{width}}  {s.about}" for s in group.settings]
    return "\n".join([*lines, ""])


def markdown() -> str:
    """The same list as Markdown tables, for the README."""
    parts = []
    for group in groups(conf_folder()):
        choices = ", ".join(f"`{c}`" for c in group.choices)
        parts += [f"**`{group.name}`**: {group.about} ({choices})", "", "| setting | default | |"]
        parts += ["|---|---|---|"]
        parts += [
            f"| `{s.key}` | `{s.default}` | {s.about.replace('|', '·')} |" for s in group.settings
        ]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown())
