"""What the metrics read of a request: the fields, wherever the record comes from.

Instants are seconds from one common origin; `None` means that it never happened.
"""

from __future__ import annotations

from typing import Protocol


class Request(Protocol):
    """One request of a load."""

    @property
    def scheduled_s(self) -> float:
        """When the schedule wanted it sent."""

    @property
    def sent_s(self) -> float | None:
        """When its first byte was handed to the socket."""

    @property
    def first_token_s(self) -> float | None:
        """When the first frame that carried a token arrived."""

    @property
    def last_token_s(self) -> float | None:
        """When the last frame that carried a token arrived."""

    @property
    def end_s(self) -> float | None:
        """When it was over, whatever the outcome."""

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the answer, by the engine's count."""

    @property
    def good(self) -> bool:
        """Whether it was answered in full."""
