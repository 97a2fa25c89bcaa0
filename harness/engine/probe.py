"""Verifies on a live server that the hooks act: one small request with both levers pulled hard."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.engine.control import HttpFailure, call
from harness.engine.levers import Hooks, Levers
from harness.engine.server import EngineError
from harness.settings import RoutingSettings

_OFF = RoutingSettings(
    policy="off", primary_experts=None, similarity_threshold=1.0, similarity_quantile=None,
    renormalize=True, budget=None, seed=0, floor_batch=0, auto_experts=1.0, similarity_path=None,
    protection_path=None,
)  # fmt: skip
# One primary expert and no threshold: in a batch of one, every secondary expert has to move.
_HARDEST = replace(_OFF, policy="sere", primary_experts=1, similarity_threshold=0.0)
_REQUEST_ID = "pruneroute-probe"
_TOKENS = 4


def probe(url: str, model: str, headers: Mapping[str, str], levers: Levers, hooks: Hooks) -> Hooks:
    """Send one request and see every counter move; leaves routing off and telemetry drained.

    Args:
        url, model, headers: where and whom to ask.
        levers: its control side.
        hooks: what the plugin claims to hold.

    Returns:
        The hooks as described afterwards.

    Raises:
        EngineError: a lever is in place and did nothing; its numbers would all be false.
    """
    routed = bool(hooks.layers) and hooks.routing_refusal is None
    _ask(url, model, headers, {"retain_ratio": 1.0} if hooks.vision else None)
    levers.drain()
    if routed:
        levers.set_routing(_HARDEST, None)
    before = levers.describe()
    tokens = _ask(url, model, headers, {"retain_ratio": 0.5} if hooks.vision else None)
    after, seen = levers.describe(), levers.drain()
    if hooks.vision:
        images = seen.images.get(_REQUEST_ID, ())
        if after.groups_encoded == before.groups_encoded or not images:
            raise EngineError("the vision lever is in place but no image went through it")
        if any(i.after * 2 != i.before for i in images):
            raise EngineError(f"the vision lever kept {images} of a request for half of them")
    if routed:
        still = [
            layer
            for layer, a, b in zip(hooks.layers, before.calls, after.calls, strict=True)
            if a == b
        ]
        if still:
            raise EngineError(f"routers of layers {still} are wrapped but were never called")
        counts = seen.routing.get(_REQUEST_ID)
        if counts is None or counts.steps != tokens - 1:
            raise EngineError(
                f"the routing lever counted {counts} for a request of {tokens} tokens"
            )
        if after.top_k > 1 and (counts.slots_moved == 0 or counts.experts_after != 1):
            raise EngineError(f"the routing lever is in place but moved nothing: {counts}")
        levers.set_routing(_OFF, None)
    return after


def _ask(
    url: str, model: str, headers: Mapping[str, str], mm_processor_kwargs: dict[str, Any] | None
) -> int:
    """One small request, with an image where the vision lever is. Returns the tokens answered."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "probe"}]
    if mm_processor_kwargs is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": _picture()}})
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    if mm_processor_kwargs is not None:
        body["mm_processor_kwargs"] = mm_processor_kwargs
    try:
        answer = call(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            timeout_s=120,
            headers={"X-Request-Id": _REQUEST_ID, **headers},
        )
        tokens: int = json.loads(answer)["usage"]["completion_tokens"]
        return tokens
    except (HttpFailure, ValueError, KeyError, TypeError) as e:
        raise EngineError(f"the probe request failed: {e}") from e


def _picture() -> str:
    """A picture of 256 × 128 with a gradient, so that scores differ."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((256, 128)).convert("RGB").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
