from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.results import atomic


class Crash(RuntimeError):
    pass


def crash_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the `call`-th flush to disk fail, as a full disk or a kill would."""
    calls = iter(range(1, 1000))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == call:
            raise Crash
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic.write_text(path, "one\r\n")
    atomic.write_text(path, "two\n")
    assert path.read_bytes() == b"two\n"
    assert list(tmp_path.iterdir()) == [path]


def test_crash_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    atomic.write_text(path, "old")
    crash_at(monkeypatch, 1)
    with pytest.raises(Crash):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_has_no_utf8_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic.write_text(path, "\ud83d")
    assert path.read_text() == "old"


def test_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    atomic.write_folder(tmp_path / "cell", {"a": b"1", "b": b"2"})
    assert sorted(p.name for p in (tmp_path / "cell").iterdir()) == ["a", "b"]
    assert [p.name for p in tmp_path.iterdir()] == ["cell"]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_crash_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    crash_at(monkeypatch, call)
    with pytest.raises(Crash):
        atomic.write_folder(tmp_path / "cell", {"a": b"1", "b": b"2"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [{}, {"a": b"old"}])
def test_folder_never_takes_over_another(tmp_path: Path, content: dict[str, bytes]) -> None:
    atomic.write_folder(tmp_path / "cell", content)
    with pytest.raises(FileExistsError, match="already there"):
        atomic.write_folder(tmp_path / "cell", {"a": b"new"})
    assert {p.name: p.read_bytes() for p in (tmp_path / "cell").iterdir()} == content
    assert [p.name for p in tmp_path.iterdir()] == ["cell"]


def test_link_is_relative_and_moves(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        atomic.link(tmp_path / "latest", tmp_path / name)
        assert (tmp_path / "latest").readlink() == Path(name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "one", "two"]


def test_link_replaces_one_that_points_nowhere(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    (tmp_path / "one").mkdir()
    atomic.link(tmp_path / "latest", tmp_path / "one")
    assert (tmp_path / "latest").resolve() == tmp_path / "one"


def test_link_leaves_a_real_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(FileExistsError, match="not a link"):
        atomic.link(tmp_path / "latest", tmp_path)
    assert not (tmp_path / "latest").is_symlink()
