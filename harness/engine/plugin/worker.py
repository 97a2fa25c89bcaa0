"""The methods that vLLM's workers gain (`--worker-extension-cls`), for `POST /collective_rpc`.

Arguments come as strings: that endpoint passes no others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.engine.plugin import routing, steps, telemetry
from harness.engine.plugin.routing import LEVER
from harness.engine.plugin.setting import RoutingSetting
from harness.engine.plugin.telemetry import VISION

# vLLM resolves this module in each worker before it builds the model, and in no other process: the
# one place from which layers can be wrapped without importing them everywhere.
routing.install()
steps.install()

PROTOCOL = 5
"""Raised whenever a method, or a setting that travels with a request, changes its meaning."""


class LeverWorker:
    """Mixed into vLLM's worker class. Names carry a prefix: the class is shared with vLLM."""

    def pruneroute_describe(self) -> dict[str, Any]:
        """What is hooked, and counters that move when a hook runs."""
        calls = LEVER.calls.tolist() if LEVER.log is not None else []
        layers = sorted(LEVER.layers)
        return {
            "protocol": PROTOCOL,
            "model_class": type(self.model_runner.get_model()).__name__,  # type: ignore[attr-defined]
            "vision": {"hooked": VISION.hooked, "groups_encoded": VISION.groups_encoded},
            "routing": {
                "refusal": LEVER.refusal,
                "layers": layers,
                "experts": LEVER.experts if layers else 0,
                "top_k": LEVER.top_k if layers else 0,
                "calls": calls,
            },
        }

    def pruneroute_set_routing(self, setting: str) -> dict[str, Any]:
        """Set the policy, its numbers and, if given, the matrices. `setting`: a JSON object.

        Keys: ``policy``, ``primary_experts``, ``similarity_threshold``, ``similarity_quantile``,
        ``renormalize``, ``budget``, ``seed``, ``floor_batch``, ``auto_experts``, and the paths
        ``similarity_path`` and ``protection_path`` (`null` resets).
        """
        from harness.calibration.similarity import load_protection, load_similarity

        s = json.loads(setting)
        if not LEVER.layers or LEVER.refusal:
            return {"error": LEVER.refusal or "the model has no mixture-of-experts layer"}
        layers, experts = len(LEVER.layers), LEVER.experts
        paths = ("similarity_path", "protection_path")
        wanted = RoutingSetting(**{k: v for k, v in s.items() if k not in paths})
        try:
            similarity = (
                load_similarity(Path(s["similarity_path"]), layers=layers, experts=experts)
                if s["similarity_path"]
                else None
            )
            protection = (
                load_protection(Path(s["protection_path"]), layers=layers, experts=experts)
                if s["protection_path"]
                else None
            )
            LEVER.check(wanted)  # a setting is taken whole or not at all
            LEVER.set_matrices(similarity, protection)
            LEVER.set(wanted)
        except (OSError, ValueError) as e:
            return {"error": str(e)}
        return {"error": None}

    def pruneroute_drain(self) -> dict[str, Any]:
        """Telemetry since the last call: ``requests``, ``images``, ``steps`` (.npz in base64), ``lost``."""
        images = {
            request: [VISION.find(key) for key in keys]
            for request, keys in steps.REQUEST_GROUPS.items()
        }
        steps.REQUEST_GROUPS.clear()
        if LEVER.log is None:
            return {"requests": {}, "images": images, "steps": None, "lost": 0}
        log, counts, lost = LEVER.log.drain()
        return {
            "requests": telemetry.per_request(log, counts),
            "images": images,
            "steps": telemetry.pack_steps(log, counts),
            "lost": lost,
        }
