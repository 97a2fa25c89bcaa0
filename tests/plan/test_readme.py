"""The README's list of settings is the one that `conf/` gives."""

from __future__ import annotations

from pathlib import Path

from harness.help import markdown


def test_the_readme_lists_the_settings_as_they_are() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    listed = text.split("`python -m harness.help` -->\n")[1].split("<!-- end of settings -->")[0]
    assert listed.strip() == markdown().strip(), "run `python -m harness.help` and paste it"
