"""How alike a layer's experts are: three measures, each summed up over chunks of tokens.

A_j [tokens, hidden] is what expert j makes of *every* token's hidden state, whether or not it was
routed there and without its routing weight; a_j(t) is its row t. SERE (arXiv 2602.07616) compares
experts by one of these, all 1 on the diagonal and in [0, 1]:

* **frobenius** Sim_ij = 1 - d_ij / max_ab d_ab with d_ij = ||A_i - A_j||_F. 1 is the same function
  on this data, 0 the farthest pair of the layer. The scale is the layer's own: one far-out expert
  pushes all other pairs towards 1, and a threshold means different things in different layers and
  models.
* **cosine** Sim_ij = (1 + mean over t of cos(a_i(t), a_j(t))) / 2. Blind to how large outputs are; 0.5
  is unrelated, and so is an output of zeros to anything.
* **cka** Linear centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414, section 3), which
  for centred columns is ||A_j' A_i||_F^2 / (||A_i' A_i||_F ||A_j' A_j||_F). What is computed is its
  minibatch form (Nguyen et al. 2021, arXiv 2010.15327, section on minibatch CKA), see
  `CkaAccumulator`: the plain form needs [hidden, hidden] for each pair of experts, and nears 1 for
  unrelated experts where tokens are few. With many tokens both give the same. Blind to scale,
  rotation and offset of outputs: experts that it calls alike tell tokens apart alike, and need not
  be fit to stand in for one another.

Everything is a Gram matrix, [experts, experts] in double precision, of vectors made of the outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from harness.calibration.similarity import CalibrationError

CKA_ROWS = 512
"""Tokens of a minibatch of `CkaAccumulator`."""


class GramAccumulator(ABC):
    """Inner products between experts, summed over chunks of tokens.

    Chunks may be cut anywhere: the result is that of all tokens at once, to rounding.

    Attributes:
        tokens: how many have been taken in.
    """

    fewest: ClassVar[int] = 1
    """Tokens without which there is no result."""

    multiple: ClassVar[int] = 1
    """Chunks of a multiple of this many tokens leave nothing waiting within."""

    def __init__(self, experts: int) -> None:
        self.tokens = 0
        self._gram = torch.zeros(experts, experts, dtype=torch.float64)

    def add(self, outputs: Tensor) -> None:
        """Take in a chunk: [experts, tokens, hidden], floating point, any device.

        Raises:
            ValueError: another shape.
        """
        if outputs.ndim != 3 or outputs.shape[0] != self._gram.shape[0]:
            raise ValueError(
                f"outputs: expected [{self._gram.shape[0]}, tokens, hidden], "
                f"got {list(outputs.shape)}"
            )
        self._take(outputs.detach())
        self.tokens += outputs.shape[1]

    def similarity(self) -> Tensor:
        """Of what has been taken in: float32 [experts, experts] in [0, 1], symmetric, diagonal 1.

        Raises:
            CalibrationError: that was too little.
        """
        if self.tokens < self.fewest:
            raise CalibrationError(
                f"{self.tokens} tokens for calibration: give text of at least {self.fewest}"
            )
        return self._similarity().clamp(0, 1).fill_diagonal_(1).float()

    def state(self) -> dict[str, Tensor]:
        """All that has been taken in, on the CPU; `restore` makes of it what this one is now."""
        return {"gram": self._gram.clone(), "tokens": torch.tensor(self.tokens)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the `state` of another one with as many experts.

        Raises:
            CalibrationError: it is no such state.
        """
        gram, tokens = state.get("gram"), state.get("tokens")
        if gram is None or tokens is None or gram.shape != self._gram.shape:
            raise CalibrationError(f"no sums of {len(self._gram)} experts: {sorted(state)}")
        self._gram = gram.clone()
        self.tokens = int(tokens)

    @classmethod
    def work_bytes(cls, experts: int, tokens: int, hidden: int) -> int:
        """Most bytes that taking in a chunk of this many tokens needs, the float32 chunk included."""
        return 20 * experts * tokens * hidden

    @abstractmethod
    def _take(self, outputs: Tensor) -> None: ...

    @abstractmethod
    def _similarity(self) -> Tensor:
        """float64 [experts, experts], symmetric; outside [0, 1] and off on the diagonal is fine."""


def _gram(vectors: Tensor) -> Tensor:
    """Inner products of float64 [experts, n]: [experts, experts] on the CPU, exactly symmetric."""
    product = (vectors @ vectors.T).cpu()
    return (product + product.T) / 2


class FrobeniusAccumulator(GramAccumulator):
    """Squared distances. Memory is one chunk and one [experts, experts].

    d2_ij = |a_i|^2 + |a_j|^2 - 2 <a_i, a_j> cancels most digits for experts that are nearly alike,
    hence double precision; the outputs' mean over experts, which no distance contains, is taken off
    first for the same reason.
    """

    def _take(self, outputs: Tensor) -> None:
        flat = outputs.flatten(1).double()
        self._gram += _gram(flat - flat.mean(0, keepdim=True))

    def distances(self) -> Tensor:
        """Frobenius distances d_ij >= 0: float64 [experts, experts], symmetric, zero diagonal."""
        squared = self._gram.diagonal()
        d2 = squared[:, None] + squared[None, :] - 2 * self._gram
        return d2.clamp_min(0).fill_diagonal_(0).sqrt()

    def _similarity(self) -> Tensor:
        return frobenius_similarity(self.distances())


def frobenius_similarity(distances: Tensor) -> Tensor:
    """1 - d / max d, with 1 on the diagonal.

    Args:
        distances: [experts, experts], >= 0, symmetric. If all are 0 the experts are one, and so is
            every entry.

    Returns:
        The same shape and type, in [0, 1].
    """
    largest = distances.max()
    if largest == 0:
        return torch.ones_like(distances)
    return (1 - distances / largest).clamp(0, 1).fill_diagonal_(1)


class CosineAccumulator(GramAccumulator):
    """Cosines of rows, summed over tokens. Memory is one chunk and one [experts, experts].

    The sum over tokens of <u_i(t), u_j(t)>, u being rows of length 1 (or of zeros), is one inner product.
    """

    def _take(self, outputs: Tensor) -> None:
        rows = torch.nn.functional.normalize(outputs.double(), dim=-1, eps=1e-30)
        self._gram += _gram(rows.flatten(1))

    def _similarity(self) -> Tensor:
        return (1 + self._gram / self.tokens) / 2


class CkaAccumulator(GramAccumulator):
    """Minibatch linear CKA, from the unbiased estimate of HSIC.

    For n tokens and K_i = A_i A_i' without its diagonal, after Song et al. (JMLR 13, 2012),

        HSIC_ij = ( tr(K_i K_j) + 1'K_i 1 1'K_j 1 / ((n-1)(n-2)) - 2 1'K_i K_j 1 / (n-2) ) / (n (n-3))

    and Sim_ij is the mean of HSIC_ij over minibatches of `CKA_ROWS` tokens, over the root of those of
    HSIC_ii and HSIC_jj. The bracket is <U_i, U_j>, where U is K centred as Székely and Rizzo (2014, arXiv
    1310.2926) do it and zero on the diagonal: so Sim is a cosine, at most 1. Below 0, which chance does
    to unrelated experts, it counts as 0; so does whatever an expert that makes the same of all tokens
    is compared with.

    A last, smaller minibatch counts by its tokens, one of under four not at all. Tokens of one text
    are no independent draws, so a minibatch should hold several texts.

    Memory is 4 * experts * n * hidden bytes for tokens that wait, and 20 * experts * n^2 while they
    are summed, n = `CKA_ROWS`.
    """

    fewest = 4
    multiple = CKA_ROWS

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self._waiting: list[Tensor] = []

    def state(self) -> dict[str, Tensor]:
        """As of any measure, with what waits for a minibatch to be full."""
        waiting = {"rest": self._waiting[0].cpu()} if self._waiting else {}
        return super().state() | waiting

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """As of any measure."""
        super().restore(state)
        self._waiting = [state["rest"]] if "rest" in state else []

    @classmethod
    def work_bytes(cls, experts: int, tokens: int, hidden: int) -> int:
        """Most bytes that taking in a chunk of this many tokens needs, the float32 chunk included."""
        rows = min(tokens, CKA_ROWS)
        return 4 * experts * (2 * tokens * hidden + rows * hidden) + 20 * experts * rows * rows

    def _take(self, outputs: Tensor) -> None:
        held = [rest.to(outputs.device) for rest in self._waiting]
        waiting = torch.cat([*held, outputs.float()], dim=1)
        *full, rest = waiting.split(CKA_ROWS, dim=1)
        if rest.shape[1] == CKA_ROWS:
            full, rest = [*full, rest], rest[:, :0]
        for minibatch in full:
            self._gram += self._hsic(minibatch)
        self._waiting = [rest.clone()]

    def _similarity(self) -> Tensor:
        total = self._gram
        for rest in self._waiting:
            if rest.shape[1] >= self.fewest:
                total = total + self._hsic(rest)
        size = total.diagonal().clamp_min(0).sqrt()
        scale = size[:, None] * size[None, :]
        return torch.where(scale > 0, total / scale, 0.0)

    @staticmethod
    def _hsic(outputs: Tensor) -> Tensor:
        """HSIC of one minibatch, float32 [experts, n, hidden], times n: float64 [experts, experts]."""
        n = outputs.shape[1]
        centred = outputs - outputs.mean(1, keepdim=True)  # changes no U, and spares digits
        kernel = (centred @ centred.mT).double()
        kernel.diagonal(dim1=1, dim2=2).zero_()
        rows = kernel.sum(2) / (n - 2)
        whole = rows.sum(1) / (n - 1)
        kernel += whole[:, None, None] - rows[:, :, None] - rows[:, None, :]
        kernel.diagonal(dim1=1, dim2=2).zero_()
        return _gram(kernel.flatten(1)) / (n - 3)


ACCUMULATORS: dict[str, type[GramAccumulator]] = {
    "frobenius": FrobeniusAccumulator,
    "cosine": CosineAccumulator,
    "cka": CkaAccumulator,
}
"""By name, in the order of `harness.calibration.MEASURES`."""
