"""Server-sent events: bytes as they come off the socket → events. Pure, incremental.

Follows the event-stream grammar of the WHATWG HTML standard (section 9.2): lines end with CR LF, LF
or CR; a line that starts with a colon is a comment; several ``data`` lines of one event are joined
by a newline; a blank line ends an event; an event that the stream's end cuts off is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Event:
    """One event: its type (``message`` unless the server named another) and its data."""

    type: str
    data: str


class EventParser:
    """Feed it what each read returned; get the events that this read completed."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._type = ""
        self._first_line = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[Event]:
        """Events completed by `chunk`, in order; the bytes left over wait for the next call.

        Bytes that are not UTF-8 become U+FFFD, as the standard has it.
        """
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a CR LF that two reads split
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, raw: bytes) -> Event | None:
        line = raw.decode("utf-8", errors="replace")
        if self._first_line:
            self._first_line = False
            line = line.removeprefix("\ufeff")
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._type = value
        # `id`, `retry`, comments (an empty field name) and unknown fields mean nothing here.
        return None

    def _dispatch(self) -> Event | None:
        data, type_ = self._data, self._type
        self._data, self._type = [], ""
        return Event(type_ or "message", "\n".join(data)) if data else None
