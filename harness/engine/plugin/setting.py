"""What the routing lever is set to, and what that comes to in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels.sere import fused
from kernels.sere.fused import POLICIES
from kernels.sere.reference import by_batch

AUTO = "auto"


@dataclass(frozen=True)
class RoutingSetting:
    """One setting of the lever, as `conf/routing` describes each.

    Attributes:
        policy: one of `kernels.sere.fused.POLICIES`.
        primary_experts: K >= 1; None for all; `AUTO` for one that follows the batch, see
            `kernels.sere.reference.by_batch`.
        similarity_threshold: rho, 0 to 1.
        renormalize: of plain top-K.
        budget: experts that a step may read, of policies that have one.
        seed: of the draw of `random_remap`.
        similarity_quantile: rho by layer, 0 to 1; None for the same in all.
        floor_batch: rows that decode in a step, below which nothing moves.
        auto_experts: of `AUTO`, K of a request that decodes alone, a number >= 1.
    """

    policy: str = "off"
    primary_experts: int | str | None = None
    similarity_threshold: float = 0.5
    renormalize: bool = True
    budget: int | None = None
    seed: int = 0
    similarity_quantile: float | None = None
    floor_batch: int = 0
    auto_experts: float = 5.0

    def check(self) -> None:
        """Raises ValueError for a value of the wrong type or out of range."""
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}: one of {', '.join(POLICIES)}")
        budgeted = self.policy in fused.BUDGETED
        if not _whole(self.budget, 1) and (budgeted or self.budget is not None):
            raise ValueError(f"budget {self.budget!r}: a whole number of at least 1")
        if not _whole(self.seed, 0) or self.seed >= 2**31:
            raise ValueError(f"seed {self.seed!r}: a whole number from 0 to 2^31 - 1")
        k = self.primary_experts
        if k is not None and k != AUTO and not _whole(k, 1):
            raise ValueError(f"primary_experts {k!r}: a whole number of at least 1, or {AUTO}")
        if not _number(self.auto_experts) or not 1 <= self.auto_experts < math.inf:
            raise ValueError(f"auto_experts {self.auto_experts!r}: a number of at least 1")
        if not _whole(self.floor_batch, 0):
            raise ValueError(f"floor_batch {self.floor_batch!r}: a whole number of at least 0")
        if not _share(self.similarity_threshold):
            raise ValueError(
                f"similarity_threshold {self.similarity_threshold!r}: a number in [0, 1]"
            )
        if self.similarity_quantile is not None and not _share(self.similarity_quantile):
            raise ValueError(
                f"similarity_quantile {self.similarity_quantile!r}: a number in [0, 1]"
            )
        if not isinstance(self.renormalize, bool):
            raise ValueError(f"renormalize {self.renormalize!r}: true or false")

    def numbers(self, decode_rows: int, top_k: int, experts: int) -> tuple[int, ...]:
        """What a step is told, as `kernels.sere.fused.SETTINGS` has it.

        Args:
            decode_rows: rows that the step decodes.
            top_k: experts of a token.
            experts: of a layer.
        """
        # More than there are is as many as there are, and fits into 32 bits.
        k = self.primary_experts or top_k
        k = by_batch(self.auto_experts, decode_rows) if isinstance(k, str) else k
        k = min(k, top_k)
        if decode_rows < self.floor_batch:
            k = top_k
        policy = self.policy if k < top_k else "off"
        budget = min(self.budget or 0, experts)
        return (POLICIES.index(policy), k, int(self.renormalize), budget, self.seed)


def _whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _share(value: object) -> bool:
    return _number(value) and 0 <= value <= 1  # type: ignore[operator]
