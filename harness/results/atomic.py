"""Files and folders that appear whole or not at all.

Content goes to a temporary neighbour first, reaches the disk, and only then takes the final name in
one step. A crash leaves the old content, or nothing, and perhaps a neighbour whose name starts with
a dot and ends in ``.tmp``; readers pass over those.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Make `path` hold exactly `data`, replacing what was there. The folder must exist.

    Raises:
        OSError: it could not be written; `path` is as it was.
    """
    temporary = _neighbour(path)
    try:
        _write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of `text` in UTF-8, line ends untouched.

    Raises:
        OSError: it could not be written; `path` is as it was.
        UnicodeEncodeError: `text` holds a lone surrogate; nothing was written.
    """
    write_bytes(path, text.encode())


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a new folder `path` appear at once with all `files`, given as name → content.

    Raises:
        FileExistsError: `path` is already there; it is as it was.
        OSError: something could not be written; `path` is not there.
    """
    temporary = _neighbour(path)
    temporary.mkdir()
    try:
        for name, data in files.items():
            _write_new(temporary / name, data)
        sync_folder(temporary)
        # A rename would quietly take over an *empty* folder of the same name.
        if os.path.lexists(path):
            raise FileExistsError(f"{path} is already there")
        temporary.rename(path)
    except BaseException:
        for name in files:
            (temporary / name).unlink(missing_ok=True)
        temporary.rmdir()
        raise
    sync_folder(path.parent)


def link(path: Path, target: Path) -> None:
    """Make `path` a relative symbolic link to `target`, replacing a link that was there.

    Raises:
        FileExistsError: `path` is a file or a folder, not a link; it is as it was.
        OSError: the link could not be made.
    """
    if path.exists() and not path.is_symlink():
        raise FileExistsError(f"{path} is not a link, and stays as it is")
    temporary = _neighbour(path)
    temporary.symlink_to(os.path.relpath(target, path.parent))
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the system can open folders."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_temporary(path: Path) -> bool:
    """Whether `path` is a leftover of a write that did not end."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _neighbour(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
