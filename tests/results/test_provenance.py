from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.results import provenance

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\n\nprocessor\t: 1\nmodel name\t: Other\n"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def leaves(tree: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for entry in tree.values():
        if isinstance(entry, dict):
            found += [entry] if "value" in entry else leaves(entry)
    return found


def test_every_lookup_says_what_or_why() -> None:
    tree = provenance.collect(["python", "-m", "harness"])
    json.dumps(tree)
    assert tree["argv"] == ["python", "-m", "harness"]
    assert len(leaves(tree)) == len(tree) - 2 + len(provenance.PACKAGES)
    for leaf in leaves(tree):
        assert leaf["value"] is not None or leaf["why"]
    assert provenance.package_version("numpy")["value"]
    assert provenance.package_version("no-such-thing") == {"value": None, "why": "not installed"}


def test_commit_and_changes(checkout: Path) -> None:
    assert len(provenance.git_commit(checkout)) == 40
    assert provenance.git_dirty(checkout) is False
    (checkout / "new").touch()
    assert provenance.git_dirty(checkout) is True


def test_an_installed_copy_has_no_commit(checkout: Path) -> None:
    installed = checkout / ".venv" / "site-packages"
    (installed / "harness").mkdir(parents=True)
    (installed / "harness" / "__init__.py").touch()
    with pytest.raises(LookupError, match=r"git: .*did not match"):
        provenance.git_commit(installed)


def test_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="git: "):
        provenance.git_dirty(tmp_path)


def test_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    tree = provenance.collect([])
    assert tree["gpus"] == {"value": None, "why": "nvidia-smi not found"}
    assert tree["git_commit"] == {"value": None, "why": "git not found"}


def test_proc_files() -> None:
    assert provenance.cpu_model(CPUINFO) == "Some CPU @ 2.0GHz"
    assert provenance.memory_gib("MemTotal:       24576000 kB\nMemFree: 1 kB\n") == 23.4
    with pytest.raises(LookupError, match="no name"):
        provenance.cpu_model("")
    with pytest.raises(LookupError, match="MemTotal"):
        provenance.memory_gib("MemTotal: lots\n")
