"""Reads and moves the levers of a running server, over vLLM's dev-mode endpoints."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.engine.control import HttpFailure, call
from harness.engine.server import EngineError
from harness.load.record import ImageTokens, RoutingCounts
from harness.settings import RoutingSettings

PROTOCOL = 5
_CACHES = ("prefix", "mm", "encoder")


@dataclass(frozen=True)
class Hooks:
    """What the plugin has taken hold of inside the engine, and counters that move when it acts.

    Attributes:
        model_class: class that vLLM runs.
        vision: whether the vision lever is in it.
        groups_encoded: image groups encoded since the start.
        routing_refusal: why routes cannot be changed; `None` if they can.
        layers: indices of the layers whose routers are wrapped.
        experts, top_k: routed experts of a layer and of a token; 0 without experts.
        calls: times that each layer's router was called; empty before the first step.
    """

    model_class: str
    vision: bool
    groups_encoded: int
    routing_refusal: str | None
    layers: tuple[int, ...]
    experts: int
    top_k: int
    calls: tuple[int, ...]


@dataclass(frozen=True)
class Telemetry:
    """What the levers did since the last look.

    Attributes:
        images: request id → vision tokens of each image.
        routing: request id → means over its decode steps.
        steps: per-step, per-layer counters as .npz bytes; `None` without experts.
        lost_steps: steps whose counters were overwritten before anybody looked.
    """

    images: Mapping[str, tuple[ImageTokens, ...]]
    routing: Mapping[str, RoutingCounts]
    steps: bytes | None
    lost_steps: int


class Levers:
    """The control side of one server.

    Args:
        url: base URL.
        headers: sent along with every call, such as an authorisation.
        timeout_s: longest wait for one call.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> None:
        self._url, self._headers, self._timeout_s = url, dict(headers or {}), timeout_s

    def describe(self) -> Hooks:
        """What is hooked.

        Raises:
            EngineError: the server has no plugin, or another version of it.
        """
        d = self._rpc("pruneroute_describe")
        if d["protocol"] != PROTOCOL:
            raise EngineError(
                f"the plugin in the engine speaks version {d['protocol']} of its protocol and this "
                f"harness version {PROTOCOL}; install the same release on both sides"
            )
        routing = d["routing"]
        return Hooks(
            model_class=d["model_class"],
            vision=d["vision"]["hooked"],
            groups_encoded=d["vision"]["groups_encoded"],
            routing_refusal=routing["refusal"],
            layers=tuple(routing["layers"]),
            experts=routing["experts"],
            top_k=routing["top_k"],
            calls=tuple(routing["calls"]),
        )

    def set_routing(self, routing: RoutingSettings, similarity_path: str | None) -> None:
        """Set the routing lever for the requests that follow.

        Args:
            routing: policy, K, rho and protection.
            similarity_path: matrices to load, on the server's disk; `None` for none.

        Raises:
            EngineError: the server refused; the message says why.
        """
        setting = {
            "policy": routing.policy,
            "primary_experts": routing.primary_experts,
            "similarity_threshold": routing.similarity_threshold,
            "similarity_quantile": routing.similarity_quantile,
            "renormalize": routing.renormalize,
            "budget": routing.budget,
            "seed": routing.seed,
            "floor_batch": routing.floor_batch,
            "auto_experts": routing.auto_experts,
            "similarity_path": similarity_path,
            "protection_path": routing.protection_path,
        }
        error = self._rpc("pruneroute_set_routing", json.dumps(setting))["error"]
        if error is not None:
            raise EngineError(f"the engine refused the routing setting: {error}")

    def drain(self) -> Telemetry:
        """Telemetry since the last call, by the request ids that were sent in ``X-Request-Id``."""
        d = self._rpc("pruneroute_drain")
        images = {
            own_request_id(r): tuple(ImageTokens(b, a) for group in groups for b, a in group)
            for r, groups in d["images"].items()
            if all(group is not None for group in groups)
        }
        routing = {own_request_id(r): RoutingCounts(**c) for r, c in d["requests"].items()}
        try:
            steps = base64.b64decode(d["steps"], validate=True) if d["steps"] else None
        except binascii.Error as e:
            raise EngineError(f"the engine's step telemetry is damaged: {e}") from e
        return Telemetry(images, routing, steps, d["lost"])

    def reset_caches(self) -> None:
        """Empty the prefix, processor and encoder caches. No request may be running.

        Raises:
            EngineError: the server has no such endpoint, or did not do it.
        """
        for cache in _CACHES:
            self._post(f"/reset_{cache}_cache", b"")

    def _rpc(self, method: str, *args: str) -> dict[str, Any]:
        body = json.dumps({"method": method, "args": args}).encode()
        answer = self._post("/collective_rpc", body)
        try:
            # Every rank of the model answers; they hold the same settings, and rank 0 counts for all.
            first: dict[str, Any] = json.loads(answer)["results"][0]
            return dict(first)
        except (ValueError, KeyError, IndexError, TypeError) as e:
            raise EngineError(
                f"{self._url} did not answer {method} as PruneRoute's plugin does; start the server "
                "with the plugin and --worker-extension-cls, or take engine.plugin=false"
            ) from e

    def _post(self, path: str, body: bytes) -> bytes:
        try:
            return call(self._url + path, body, timeout_s=self._timeout_s, headers=self._headers)
        except HttpFailure as e:
            if e.status == 404:
                raise EngineError(
                    f"{self._url}{path}: no such endpoint; the server must run with "
                    "VLLM_SERVER_DEV_MODE=1 (on a loopback address only)"
                ) from e
            raise EngineError(f"{self._url}{path}: {e}") from e


def own_request_id(engine_id: str) -> str:
    """The id that we sent, from the one that the engine made of it.

    vLLM puts the endpoint's name before ``X-Request-Id`` and, in newer releases, eight random hex
    digits behind it.
    """
    found = re.fullmatch(r"(?:chatcmpl-)?(.+?)(?:-[0-9a-f]{8})?", engine_id)
    return found[1] if found else engine_id
