"""Where generated things live, and how they appear there: whole, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

MANIFEST = "manifest.json"


class CacheError(OSError):
    """A generated folder could not be written; the message says where and what to do."""


def root() -> Path:
    """``$XDG_CACHE_HOME/pruneroute``, or ``~/.cache/pruneroute``."""
    # The XDG specification says that a relative value is to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "pruneroute"


def source_hash(files: list[Path], *extra: str) -> str:
    """12 hex digits that change whenever one of the files or extra strings does."""
    digest = hashlib.sha256()
    for part in [*(f.read_bytes() for f in files), *(e.encode() for e in extra)]:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:12]


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Have `fill` write a new folder, then put it at `folder` in one step, replacing what is there.

    A manifest of all files and their sizes is added, by which `is_whole` recognises damage.

    Raises:
        CacheError: the parent cannot be written.
    """
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    try:
        draft.chmod(0o755)
        fill(draft)
        files = sorted(p for p in draft.rglob("*") if p.is_file())
        sizes = {p.relative_to(draft).as_posix(): p.stat().st_size for p in files}
        for file in files:
            file.chmod(0o644)  # some libraries write for the owner only
        (draft / MANIFEST).write_text(json.dumps(sizes, indent=1, sort_keys=True) + "\n")
        if folder.exists():
            # A folder cannot be swapped in one step everywhere; the old one steps aside first.
            aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            folder.rename(aside / "old")
            draft.rename(folder)
            shutil.rmtree(aside)
        else:
            draft.rename(folder)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _unwritable(folder: Path, error: OSError) -> CacheError:
    cure = "free some space, or name another place"
    if folder.is_relative_to(root()):
        cure = "free some space, or set XDG_CACHE_HOME to a folder that can be written"
    elif isinstance(error, NotADirectoryError | FileExistsError):
        cure = "name a place within a folder"
    return CacheError(f"cannot write to {folder} ({error.strerror}); {cure}")


def is_whole(folder: Path) -> bool:
    """Whether the folder has its manifest and every file in it, at the size it had."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        sizes: dict[str, int] = json.loads(manifest.read_text())
    except ValueError:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in sizes.items()
    )


def ensure_folder(folder: Path, write: Callable[[Path], object]) -> Path:
    """`folder`, after `write(folder)` if it is absent or damaged. One process writes, others wait.

    Raises:
        CacheError: the cache cannot be written.
    """
    if not is_whole(folder):
        with _lock(folder):
            if not is_whole(folder):
                # What a killed writer left; no other writes here while the lock is held.
                for draft in folder.parent.glob(f".{folder.name}.*"):
                    if draft.is_dir():
                        shutil.rmtree(draft)
                write(folder)
    return folder


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Exclusive among processes; freed by the system when its holder ends, however it ends."""
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
