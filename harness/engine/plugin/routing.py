"""The routing lever inside vLLM: every layer's router is wrapped, and one state steers them all.

The wrapper sits on `_compute_routing`: logical expert ids, before routes are captured and before
expert-parallel load balancing maps them, so that both see what really runs. K, rho, the policy and the
matrices live in tensors that stay where they are; rewriting them changes captured CUDA graphs too.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.engine.plugin.telemetry import StepLog
from kernels.sere import reference

logger = logging.getLogger("vllm.pruneroute")

POLICIES = ("off", "topk", "sere")


@dataclass(frozen=True)
class RoutedLayer:
    """One mixture-of-experts layer as its router declares it."""

    index: int
    experts: int
    top_k: int


class RoutingLever:
    """State of the lever in one worker process.

    Attributes:
        layers: the wrapped layers, by their index in the model.
        refusal: why routes cannot be changed; `None` if they can.
        max_rows: most rows of a step, padding included.
        log: step log, once the first step made the device known.
    """

    def __init__(self) -> None:
        self.layers: dict[int, RoutedLayer] = {}
        self.refusal: str | None = None
        self.log: StepLog | None = None
        self.max_rows = 0
        self._policy = "off"

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
        index = int(found[1])
        self.layers[index] = RoutedLayer(index, experts, top_k)
        router = runner.router
        compute = router._compute_routing

        def compute_routing(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, ids = compute(*args, **kwargs)
            return self.reroute(index, weights, ids)

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
        self.log = StepLog(n, device)
        # Rows are padding until a step says otherwise.
        self.row_kind = torch.zeros(self.max_rows, dtype=torch.uint8, device=device)
        self.similarity = torch.eye(e, device=device).repeat(n, 1, 1)
        self.protected = torch.zeros(n, e, dtype=torch.bool, device=device)
        self.policy = torch.zeros(1, dtype=torch.int64, device=device)
        self.primary = torch.full((1,), self.top_k, dtype=torch.int64, device=device)
        self.threshold = torch.ones(1, device=device)
        self.renormalize = torch.ones(1, dtype=torch.bool, device=device)
        self.calls = torch.zeros(n, dtype=torch.int64, device=device)

    def prepare(self, device: torch.device) -> None:
        """Make the lever's tensors if no step has yet."""
        if self.log is None:
            self._allocate(device)

    # -- live settings ---------------------------------------------------------------------------

    def check(
        self, policy: str, primary_experts: int | None, threshold: float, renormalize: bool
    ) -> None:
        """Refuse what `set` cannot take, and change nothing.

        Raises:
            ValueError: no such policy, or a value of the wrong type or out of range.
        """
        self._require()
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r}: one of {', '.join(POLICIES)}")
        k = primary_experts
        if k is not None and (type(k) is not int or k < 1):
            raise ValueError(f"primary_experts {k!r}: a whole number of at least 1")
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not number or not 0 <= threshold <= 1:
            raise ValueError(f"similarity_threshold {threshold!r}: a number in [0, 1]")
        if not isinstance(renormalize, bool):
            raise ValueError(f"renormalize {renormalize!r}: true or false")

    def set(
        self, policy: str, primary_experts: int | None, threshold: float, renormalize: bool
    ) -> None:
        """Change the lever for the next step.

        Raises:
            ValueError: as `check` does.
        """
        self.check(policy, primary_experts, threshold, renormalize)
        k = self.top_k if primary_experts is None else primary_experts
        self._policy = policy if k < self.top_k else "off"
        self.policy.fill_(POLICIES.index(self._policy))
        self.primary.fill_(k)
        self.threshold.fill_(threshold)
        self.renormalize.fill_(renormalize)

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
        new_p = torch.zeros(n, e, dtype=torch.bool) if protected is None else protected.bool()
        for name, tensor, shape in (
            ("similarity", new_s, (n, e, e)),
            ("protection", new_p, (n, e)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} {tuple(tensor.shape)}: this model needs {shape}")
        self.similarity.copy_(new_s)
        self.protected.copy_(new_p)

    def _require(self) -> None:
        if self.refusal or not self.layers:
            raise ValueError(self.refusal or "the model has no mixture-of-experts layer")
        if self.log is None:
            raise ValueError("the engine has not run a step yet")

    # -- every step ------------------------------------------------------------------------------

    def reroute(self, layer: int, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's routes under the current setting. weights, ids: [rows, slots]; shapes stay."""
        if self.log is None:
            self._allocate(ids.device)
        rank = self._rank[layer]
        self.calls[rank] += 1
        kind = self.row_kind[: ids.shape[0]]
        if kind.shape[0] < ids.shape[0]:
            raise RuntimeError(f"a step of {ids.shape[0]} rows; {self.max_rows} were planned for")
        new_weights, new_ids = self._apply(rank, weights, ids, kind)
        decode = (kind == reference.DECODE).unsqueeze(1)
        before = reference.expert_set(ids, decode, self.experts).sum()
        after = reference.expert_set(new_ids, decode, self.experts).sum()
        moved = (new_ids != ids).sum()
        assert self.log is not None
        self.log.write(rank, torch.stack([before, after, moved]).to(torch.int32))
        return new_weights, new_ids

    def _apply(
        self, rank: int, weights: Tensor, ids: Tensor, kind: Tensor
    ) -> tuple[Tensor, Tensor]:
        # On a CPU nothing is captured, so that Python may choose.
        choose = self._apply_chosen if ids.device.type == "cpu" else self._apply_all
        return choose(rank, weights, ids, kind)

    def _apply_chosen(
        self, rank: int, weights: Tensor, ids: Tensor, kind: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute what the policy asks for."""
        if self._policy == "sere":
            return weights, self._sere(rank, weights, ids, kind)
        if self._policy == "topk":
            new_ids, new_weights = reference.topk(
                ids, weights, kind, self.primary, self.renormalize
            )
            return new_weights, new_ids
        return weights, ids

    def _apply_all(
        self, rank: int, weights: Tensor, ids: Tensor, kind: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same with the policy read on the device: a captured graph holds every policy."""
        moved = self._sere(rank, weights, ids, kind)
        cut_ids, cut_weights = reference.topk(ids, weights, kind, self.primary, self.renormalize)
        is_sere, is_topk = self.policy == 2, self.policy == 1
        new_ids = torch.where(is_sere, moved, torch.where(is_topk, cut_ids, ids))
        return torch.where(is_topk, cut_weights, weights), new_ids

    def _sere(self, rank: int, weights: Tensor, ids: Tensor, kind: Tensor) -> Tensor:
        return reference.sere(
            ids,
            weights,
            kind,
            self.similarity[rank],
            self.protected[rank],
            self.primary,
            self.threshold,
        )


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
