"""The routing lever inside vLLM: every layer's router is wrapped, and one state steers them all.

The wrapper sits on `_compute_routing`: logical expert ids, before routes are captured and before
expert-parallel load balancing maps them, so that both see what really runs. K, rho, the policy and the
matrices live in tensors that stay where they are; rewriting them changes captured CUDA graphs too. What
happens to a layer's routes is one operator, `kernels.sere.fused`.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.calibration.quantiles import quantile_thresholds
from harness.engine.plugin.setting import RoutingSetting
from harness.engine.plugin.telemetry import StepLog
from kernels.sere import fused
from kernels.sere.reference import DECODE

logger = logging.getLogger("vllm.pruneroute")


@dataclass(frozen=True)
class RoutedLayer:
    """One mixture-of-experts layer as its router declares it.

    Attributes:
        sigmoid: whether its scores are sigmoids of its logits; else their softmax.
        bias: [experts], added to sigmoids for ranking; None without.
        opaque: why nobody else can choose by its scores; None if they can.
    """

    index: int
    experts: int
    top_k: int
    sigmoid: bool = False
    bias: Tensor | None = None
    opaque: str | None = None


class RoutingLever:
    """State of the lever in one worker process.

    Attributes:
        layers: the wrapped layers, by their index in the model.
        refusal: why routes cannot be changed; `None` if they can.
        max_rows: most rows of a step, padding included.
        log: step log, once the first step made the device known.
        setting: what it is set to.
    """

    def __init__(self) -> None:
        self.layers: dict[int, RoutedLayer] = {}
        self.refusal: str | None = None
        self.log: StepLog | None = None
        self.max_rows = 0
        self.setting = RoutingSetting()

    # -- set-up ----------------------------------------------------------------------------------

    def wrap(self, runner: Any) -> None:
        """Wrap the router of a freshly built MoE layer (vLLM's `MoERunner`)."""
        found = re.search(r"layers\.(\d+)\.", runner.layer_name)
        config = runner.moe_config
        experts = getattr(config, "num_logical_experts", None) or config.num_experts
        top_k = config.experts_per_token
        if found is None or int(found[1]) in self.layers:
            self.refusal = f"layer {runner.layer_name!r} has no index of its own"
            return
        if getattr(runner, "is_monolithic", False):
            self.refusal = (
                f"layer {runner.layer_name!r} routes inside its kernel, where no route can be "
                "changed; start with --moe-backend triton in engine.extra_args"
            )
            return
        if self.layers and next(iter(self.layers.values())).experts != experts:
            self.refusal = "layers with different numbers of experts"
            return
        if experts > fused.MAX_EXPERTS or top_k > fused.MAX_SLOTS:
            self.refusal = (
                f"layer {runner.layer_name!r} has {experts} experts and {top_k} for a token; routes can "
                f"be changed up to {fused.MAX_EXPERTS} and {fused.MAX_SLOTS}"
            )
            return
        index = int(found[1])
        router = runner.router
        self.layers[index] = RoutedLayer(
            index,
            experts,
            top_k,
            sigmoid=getattr(router, "scoring_func", None) == "sigmoid",
            bias=getattr(router, "e_score_correction_bias", None),
            opaque=why_opaque(router),
        )
        compute = router._compute_routing

        def compute_routing(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, ids = compute(*args, **kwargs)
            logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
            return self.reroute(index, weights, ids, logits)

        router._compute_routing = compute_routing

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""
        return next(iter(self.layers.values())).experts

    @property
    def top_k(self) -> int:
        """Routed experts of a token."""
        return next(iter(self.layers.values())).top_k

    @torch.inference_mode(False)
    def _allocate(self, device: torch.device) -> None:
        """Make the tensors that graphs will be captured with, on the first step (vLLM's profiling).

        Ordinary tensors, though a step runs in inference mode: they are rewritten between steps too.
        """
        n, e = len(self.layers), self.experts
        self._rank = {index: i for i, index in enumerate(sorted(self.layers))}
        self.log = StepLog(n, device, self.max_rows)
        self.similarity = torch.eye(e, device=device).repeat(n, 1, 1)
        self.protection = torch.zeros(n, e, dtype=torch.uint8, device=device)
        self.threshold = torch.ones(n, device=device)
        self.neighbours = fused.neighbours(self.similarity)
        self.reach = torch.empty(n, e, dtype=torch.int16, device=device)
        self._renew()
        self.bias = torch.zeros(n, e, device=device)
        self._blank = torch.zeros(self.max_rows, e, dtype=torch.bfloat16, device=device)
        for index, layer in self.layers.items():
            if layer.bias is not None:
                self.bias[self._rank[index]].copy_(layer.bias.detach())
        self.calls = torch.zeros(n, dtype=torch.int64, device=device)

    def prepare(self, device: torch.device) -> None:
        """Make the lever's tensors if no step has yet."""
        if self.log is None:
            self._allocate(device)

    # -- live settings ---------------------------------------------------------------------------

    def check(self, setting: RoutingSetting) -> None:
        """Refuse what `set` cannot take, and change nothing.

        Raises:
            ValueError: a value is of the wrong type or out of range, or the model's routers rule the
                policy out.
        """
        self._require()
        setting.check()
        if setting.policy in fused.RESELECTING:
            for layer in self.layers.values():
                if layer.opaque is not None:
                    raise ValueError(f"policy {setting.policy}: layer {layer.index} {layer.opaque}")

    def set(self, setting: RoutingSetting) -> None:
        """Change the lever for the next step; a quantile is one of the matrices as they are now.

        Raises:
            ValueError: as `check` does.
        """
        self.check(setting)
        if setting.similarity_quantile is None:
            self.threshold.fill_(setting.similarity_threshold)
        else:
            quantile = setting.similarity_quantile
            self.threshold.copy_(quantile_thresholds(self.similarity, quantile))
        self._renew()
        self.setting = setting

    def _renew(self) -> None:
        """Have the next step go by the thresholds and the protection as they are now."""
        self.reach.copy_(fused.reach(self.similarity, self.threshold, self.protection))
        if self.reach.is_cuda:
            torch.cuda.synchronize(self.reach.device)  # as `fused.reroute` asks

    def set_matrices(self, similarity: Tensor | None, protected: Tensor | None) -> None:
        """Replace the matrices in place; `None` resets to identity, and to nothing protected.

        Args:
            similarity: [layers, E, E] float.
            protected: [layers, E], nonzero where protected.

        Raises:
            ValueError: the shape is not the model's.
        """
        self._require()
        n, e = len(self.layers), self.experts
        new_s = torch.eye(e).repeat(n, 1, 1) if similarity is None else similarity
        new_p = torch.zeros(n, e) if protected is None else protected != 0
        for name, tensor, shape in (
            ("similarity", new_s, (n, e, e)),
            ("protection", new_p, (n, e)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} {tuple(tensor.shape)}: this model needs {shape}")
        self.similarity.copy_(new_s)
        self.protection.copy_(new_p)
        self.neighbours.copy_(fused.neighbours(self.similarity))
        self._renew()

    def _require(self) -> None:
        if self.refusal or not self.layers:
            raise ValueError(self.refusal or "the model has no mixture-of-experts layer")
        if self.log is None:
            raise ValueError("the engine has not run a step yet")

    # -- every step ------------------------------------------------------------------------------

    def begin(self, decode_requests: tuple[str, ...], kinds: np.ndarray) -> None:
        """Tell the device of the step that is about to run.

        Args:
            decode_requests: those that decode.
            kinds: [rows] uint8.

        Raises:
            RuntimeError: more rows than were planned for.
        """
        assert self.log is not None
        rows = int(np.count_nonzero(kinds == DECODE))
        numbers = self.setting.numbers(rows, self.top_k, self.experts)
        self.log.begin(decode_requests, kinds, numbers)

    def reroute(
        self, layer: int, weights: Tensor, ids: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A layer's routes under the current setting.

        Args:
            layer: its index in the model.
            weights, ids: [rows, slots], the router's.
            logits: [rows, experts], that it made them of.

        Returns:
            weights and ids of the same shapes and types.
        """
        if self.log is None:
            self._allocate(ids.device)
        assert self.log is not None
        if len(self.log.row_kind) < len(ids):
            raise RuntimeError(f"a step of {len(ids)} rows; {self.max_rows} were planned for")
        # Some kernels ask for unsigned ids; the bits are the same.
        rank = self._rank[layer]
        if logits.shape != (len(ids), self.experts) or logits.dtype not in fused.LOGIT_TYPES:
            self.layers[layer] = replace(
                self.layers[layer], opaque="gives its router no logits of its experts"
            )
            logits = self._blank[: len(ids)]
        signed = ids.view(torch.int32) if ids.dtype == torch.uint32 else ids
        new_ids, new_weights = fused.reroute(
            signed, weights.float(), self.log.row_kind, self.neighbours, self.reach,
            self.log.settings,
            self.log.counters, self.log.slot, self.calls, logits, self.bias[rank], rank,
            self.layers[layer].sigmoid,
        )  # fmt: skip
        return new_weights.to(weights.dtype), new_ids.view(ids.dtype)


def why_opaque(router: Any) -> str | None:
    """Why experts cannot be chosen anew by a router's scores; None if they can."""
    if getattr(router, "custom_routing_function", None) is not None:
        return "routes by a function of its own"
    grouped = getattr(router, "use_grouped_topk", type(router).__name__ == "GroupedTopKRouter")
    if grouped and (getattr(router, "num_expert_group", None) or 1) > 1:
        return "chooses within groups of experts"
    scoring = getattr(router, "scoring_func", None)
    if scoring not in ("softmax", "sigmoid"):
        return f"scores by {scoring!r}"
    if scoring == "softmax" and getattr(router, "e_score_correction_bias", None) is not None:
        return "adds a bias to softmax scores"
    return None


LEVER = RoutingLever()


def install() -> None:
    """Have every `MoERunner` of this process wrap its router. Idempotent."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    if getattr(MoERunner.__init__, "wraps_for_pruneroute", False):
        return
    construct = MoERunner.__init__

    def construct_and_wrap(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        # Padding can take a step past max_num_batched_tokens.
        scheduler = get_current_vllm_config().scheduler_config
        LEVER.max_rows = scheduler.max_num_batched_tokens + 1024
        LEVER.wrap(self)

    construct_and_wrap.wraps_for_pruneroute = True  # type: ignore[attr-defined]
    MoERunner.__init__ = construct_and_wrap
