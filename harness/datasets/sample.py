"""The noun every loader produces: one benchmark item, ready to be asked and to be judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Text:
    """A run of text inside a message."""

    text: str


@dataclass(frozen=True)
class Image:
    """An encoded picture, exactly as the file holds it.

    Attributes:
        data: the file's bytes; never re-encoded on the way to the engine.
        media_type: IANA type, such as ``image/png``.
        name: what a report may call it (a file name or a row's id).
    """

    data: bytes
    media_type: str
    name: str


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: ``system``, ``user`` or ``assistant``, and its parts in order."""

    role: str
    parts: tuple[Text | Image, ...]


@dataclass(frozen=True)
class Sample:
    """One benchmark item.

    Attributes:
        id: unique within its data set, stable across reads.
        messages: the conversation to send, images in place.
        references: accepted answers, in the data set's own order; never empty.
        scorer: which rule judges it: a name in `harness.scoring.SCORERS`.
        category: the data set's own type of question, empty if it has none.
        metadata: fields of the published format that a report may show; JSON-serialisable.
    """

    id: str
    messages: tuple[Message, ...]
    references: tuple[str, ...]
    scorer: str
    category: str = ""
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def images(self) -> tuple[Image, ...]:
        """All pictures of the conversation, in the order in which the engine sees them."""
        return tuple(p for m in self.messages for p in m.parts if isinstance(p, Image))
