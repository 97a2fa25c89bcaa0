"""Request bodies: a `Sample` as the bytes of an OpenAI chat-completions request.

Encoded before the clock starts: base64 and JSON of a request with many images take tens of
milliseconds, which inside the load generator would pass for the server's latency.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from harness.datasets.sample import Image, Message, Sample, Text


def encode(
    sample: Sample,
    *,
    model: str,
    max_tokens: int,
    temperature: float,
    ignore_eos: bool = False,
    seed: int | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> bytes:
    """The JSON body that asks `sample`, streamed, with token counts in every frame.

    Args:
        model: name under which the server serves it.
        max_tokens: longest answer [tokens].
        temperature: 0 is greedy.
        ignore_eos: go on to `max_tokens` whatever the model says (vLLM's extension; left out when
            false, so that other servers accept the body).
        seed: of the sampling; `None` leaves it to the server.
        mm_processor_kwargs: passed to the multimodal processor (vLLM's extension); `None` leaves it
            out.

    Returns:
        UTF-8 JSON. Images travel as base64 data URLs of the file's own bytes, in the order and at
        the place where the sample has them.

    Raises:
        ValueError: a number is not finite (JSON has no such number).
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(m) for m in sample.messages],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        # The second is vLLM's extension: a running count of answer tokens in every frame.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    if seed is not None:
        body["seed"] = seed
    if mm_processor_kwargs is not None:
        body["mm_processor_kwargs"] = dict(mm_processor_kwargs)
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _message(message: Message) -> dict[str, Any]:
    parts = message.parts
    if len(parts) == 1 and isinstance(parts[0], Text):
        # The plain form: some chat templates take a system turn in no other.
        return {"role": message.role, "content": parts[0].text}
    return {"role": message.role, "content": [_part(p) for p in parts]}


def _part(part: Text | Image) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    data = base64.b64encode(part.data).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:{part.media_type};base64,{data}"}}
