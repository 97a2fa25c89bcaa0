"""`RequestRecord`: the raw truth about one request. Every published number is derived from it.

Instants are seconds on the monotonic clock, counted from the cell's origin (the instant for which
offset 0 of the schedule was set). `None` means that it never happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Chunk:
    """One server-sent frame that carried answer tokens.

    Attributes:
        at_s: arrival, stamped before the frame was parsed.
        tokens: tokens it carried, from the server's own running usage count.
        text: the text it carried; may be empty (a token can hold part of a character).
    """

    at_s: float
    tokens: int
    text: str


@dataclass(frozen=True)
class ImageTokens:
    """Vision tokens (after the encoder's spatial merge) of one image: before and after pruning."""

    before: int
    after: int


@dataclass(frozen=True)
class RoutingCounts:
    """What the routing lever did in the decode steps that this request took part in.

    Attributes:
        steps: decode steps counted.
        batch_size: mean decode rows in those steps.
        experts_before: distinct experts per layer that the decode rows of a step picked, mean over
            steps and layers.
        experts_after: the same after re-routing.
        slots_moved: expert slots re-routed in those steps, all rows of the batch, mean per step and layer.
    """

    steps: int
    batch_size: float
    experts_before: float
    experts_after: float
    slots_moved: float


@dataclass(frozen=True)
class RequestRecord:
    """One request, from its scheduled instant to its score.

    Attributes:
        request_id: unique in the run; sent as ``X-Request-Id``.
        sample_id: `Sample.id` of what was asked.
        scheduled_s: when the schedule wanted it sent.
        sent_s: just before its first byte was handed to the socket.
        headers_s: when the response's status line and headers had arrived.
        first_token_s: arrival of the first frame that carried a token.
        last_token_s: arrival of the last frame that carried a token.
        end_s: when the stream was over, whatever the outcome.
        status: HTTP status, if one came.
        chunks: every frame that carried tokens, in order.
        text: the answer, concatenated.
        finish_reason: ``stop``, ``length``, …, as the server said it.
        error: why the request is not good, in one line; `None` if it is good.
        prompt_tokens: the engine's count (after pruning).
        output_tokens: the engine's count of answer tokens.
        images: per image, in the order sent; `None` where the engine does not tell.
        routing: `None` where the engine does not tell, or the request never reached a decode step.
        scores: metric name → value, for those that apply to its sample.
    """

    request_id: str
    sample_id: str
    scheduled_s: float
    sent_s: float | None = None
    headers_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    status: int | None = None
    chunks: tuple[Chunk, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    images: tuple[ImageTokens, ...] | None = None
    routing: RoutingCounts | None = None
    scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def good(self) -> bool:
        """A finish reason, at least one token, no error: nothing less counts as an answer."""
        return self.error is None and self.finish_reason is not None and bool(self.output_tokens)
