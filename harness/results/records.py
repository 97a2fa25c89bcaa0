"""`RequestRecord` ↔ one line of JSON, exactly reversible.

Each line is an object with the record's fields by name and ``"version"``. Numbers JSON cannot hold
are written as the texts ``"nan"``, ``"inf"`` and ``"-inf"``. Lines are ASCII: whatever a model
wrote, half characters included, comes back as it was, and no text can break a line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from harness.load.record import RequestRecord
from harness.results.errors import ResultsError

VERSION = 1

# Whole numbers below it have a float.
_LARGEST = 2**1000
_NOT_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class _Wrong(ValueError):
    """A value is not what its field takes; the message starts with the field's name."""

    @classmethod
    def of(cls, value: Any) -> _Wrong:
        return cls(f": cannot be {value!r:.40}")

    def inside(self, part: str) -> _Wrong:
        """The same, seen from the object that holds `part`."""
        return _Wrong(f"{part}{self}")


def to_line(record: RequestRecord) -> str:
    """The record as one line of ASCII JSON, without the line end."""
    tree = {"version": VERSION, **_plain(record)}
    return json.dumps(tree, allow_nan=False, separators=(",", ":"))


def from_line(line: str) -> RequestRecord:
    """The record that `to_line` wrote.

    Raises:
        ValueError: the line is not a record of this version; the message says what is wrong.
    """
    try:
        tree = json.loads(line, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError("not a record: nested too deeply") from None
    if not isinstance(tree, dict):
        raise ValueError("not a record: expected a JSON object")
    version = tree.pop("version", None)
    if version != VERSION:
        raise ValueError(f"record version {version!r}; this program reads version {VERSION}")
    try:
        record: RequestRecord = _reader(RequestRecord)(tree)
    except _Wrong as wrong:
        raise wrong.inside("record") from None
    return record


def to_bytes(records: Iterable[RequestRecord]) -> bytes:
    """A whole ``records.jsonl``: one line a record, in order, each with its line end."""
    return "".join(to_line(r) + "\n" for r in records).encode("ascii")


def from_bytes(data: bytes, source: str) -> tuple[RequestRecord, ...]:
    """What `to_bytes` wrote.

    Args:
        data: the file's content.
        source: its name, for messages.

    Raises:
        ResultsError: a line is damaged, cut off or of another version; names `source` and the line.
    """
    if data and not data.endswith(b"\n"):
        lines = data.count(b"\n") + 1
        raise ResultsError(f"{source}, line {lines}: cut off in the middle of a record")
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            records.append(from_line(line.decode("ascii")))
        except ValueError as error:
            raise ResultsError(f"{source}, line {number}: {error}") from None
    return tuple(records)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """The inverse of `_plain` for values of one type: gives the value, or raises `_Wrong`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        inner = _reader(next(a for a in arguments if a is not type(None)))
        return lambda value: None if value is None else inner(value)
    if dataclasses.is_dataclass(hint):
        return _object_reader(hint)
    if origin is tuple:
        return _tuple_reader(_reader(arguments[0]))
    if origin is Mapping:
        return _mapping_reader(_reader(arguments[1]))
    return {float: _float, int: _int, str: _str}[hint]


def _object_reader(cls: Any) -> Callable[[Any], Any]:
    readers = {name: _reader(hint) for name, hint in typing.get_type_hints(cls).items()}

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Wrong.of(value)
        if value.keys() != readers.keys():
            missing, strange = readers.keys() - value.keys(), value.keys() - readers.keys()
            name = sorted(missing or strange)[0]
            raise _Wrong(f".{name}: " + ("missing" if missing else "no such field"))
        fields = {}
        for name, reader in readers.items():
            try:
                fields[name] = reader(value[name])
            except _Wrong as wrong:
                raise wrong.inside(f".{name}") from None
        return cls(**fields)

    return read


def _tuple_reader(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _Wrong.of(value)
        entries = []
        for entry in value:
            try:
                entries.append(reader(entry))
            except _Wrong as wrong:
                raise wrong.inside(f"[{len(entries)}]") from None
        return tuple(entries)

    return read


def _mapping_reader(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Wrong.of(value)
        entries = {}
        for key, entry in value.items():
            try:
                entries[key] = reader(entry)
            except _Wrong as wrong:
                raise wrong.inside(f"[{key!r}]") from None
        return types.MappingProxyType(entries)

    return read


def _float(value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, str) and value in _NOT_JSON:
        return _NOT_JSON[value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST:
        return float(value)
    raise _Wrong.of(value)


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _Wrong.of(value)


def _str(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise _Wrong.of(value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"not JSON: {name}")
