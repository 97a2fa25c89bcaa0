"""Arguments of the form ``key=value``, read strictly: nothing unknown, missing, twice or out of range."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REQUIRED: Final = object()
"""Default of a key that must be given."""


class ArgumentsError(ValueError):
    """The arguments cannot be taken; the message is one line that ends with what is."""


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: before the ``=``.
        takes: what may follow it, as usage lines show it.
        says: what it is for.
        read: makes a value of the text after the ``=``; raises ValueError with what it takes instead.
        default: the value where the key is not given, `REQUIRED` if it must be.
    """

    name: str
    takes: str
    says: str
    read: Callable[[str], Any]
    default: Any = REQUIRED

    def __str__(self) -> str:
        shown = f"{self.name}={self.takes}"
        return shown if self.default is REQUIRED else f"[{shown}]"


def parse(command: str, keys: Sequence[Key], arguments: Sequence[str]) -> dict[str, Any]:
    """The value of every key.

    Args:
        command: whose arguments they are, for messages.
        keys: those that it takes.
        arguments: ``key=value`` each.

    Raises:
        ArgumentsError: at the first that is wrong, and where one is missing.
    """
    known = {key.name: key for key in keys}
    given: dict[str, Any] = {}

    def refused(why: str) -> ArgumentsError:
        return ArgumentsError(f"{command}: {why}; takes {' '.join(map(str, keys))}")

    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise refused(f"{argument!r} is not key=value")
        if name not in known:
            raise refused(f"there is no key {name!r}")
        if name in given:
            raise refused(f"{name} is given twice")
        try:
            given[name] = known[name].read(value)
        except ValueError as error:
            raise refused(f"{argument}: takes {error}") from None
    missing = [k.name for k in keys if k.default is REQUIRED and k.name not in given]
    if missing:
        raise refused(f"{missing[0]}= is missing")
    return {key.name: given.get(key.name, key.default) for key in keys}


def usage(command: str, keys: Sequence[Key]) -> str:
    """A line that shows how the command is called, and one for each key."""
    width = max(len(str(key)) for key in keys)
    lines = [f"{key!s:{width}}  {key.says}" for key in keys]
    return "\n  ".join([f"{command} {' '.join(map(str, keys))}", *lines])


def text(value: str) -> str:
    """Anything but nothing."""
    if not value:
        raise ValueError("a value after the =")
    return value


def path(value: str) -> Path:
    """A path."""
    if not value:
        raise ValueError("a path")
    return Path(value)


def device(value: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:N``."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ValueError("cpu, cuda or cuda:N")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    """A reader of one of these names."""

    def read(value: str) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return value

    return read


def whole(least: int) -> Callable[[str], int]:
    """A reader of whole numbers from `least` on."""

    def read(value: str) -> int:
        if not re.fullmatch(r"\d+", value, re.ASCII) or int(value) < least:
            raise ValueError(f"a whole number >= {least}")
        return int(value)

    return read
