"""How the Triton kernels cut their work; a setting changes time, and scores only in last bits."""

from __future__ import annotations

from dataclasses import dataclass

# Head widths, each split into widths that a tensor's side may have: (head_dim, first, rest).
# Padding 72, 80 or 96 to 128 would multiply 1.8, 1.6 or 1.3 times as much.
WIDTHS = {64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 128: (128, 0)}


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class Tuning:
    """One way to run `kernels.visionzip.column_sums.head_scores`.

    Attributes:
        block_q: queries a step; a power of two, at least 16 for each warp.
        block_k: keys a program; a power of two, at least 16. A query is read once for each such
            block, so that a larger one spares the L2 cache.
        warps: warps a program: 1, 2, 4 or 8. Hopper's wide matrix instruction takes four.
        stages: steps whose queries are on their way while one is worked on; 1 or more.
        fold: adds up the queries that one thread holds before it keeps them. Fewer registers and
            the same additions, so that more programs share a processor.
        peel: takes the last, partial step out of the loop, so that the loop needs no masks.
        polynomial: 0, or 2 or 4 for one in so many exponentials by a polynomial, which takes load
            off the special-function unit (an idea of FlashAttention 4).
        descriptor: queries come by tensor descriptor (TMA) and not by thread-wise copies.
        persistent: 0, or programs for each multiprocessor that take one block after another.
        registers: 0, or the most that a thread may use, so that more programs share a processor.
        heads_first: neighbouring programs take the same keys of several heads, and not several
            key blocks of one head.

    Raises:
        ValueError: a value out of range.
    """

    block_q: int = 64
    block_k: int = 128
    warps: int = 4
    stages: int = 2
    fold: bool = True
    peel: bool = True
    polynomial: int = 0
    descriptor: bool = False
    persistent: int = 0
    registers: int = 0
    heads_first: bool = False

    def __post_init__(self) -> None:
        if self.warps not in (1, 2, 4, 8):
            raise ValueError(f"warps {self.warps} is not 1, 2, 4 or 8")
        if not _power_of_two(self.block_q) or self.block_q < 16 * self.warps:
            raise ValueError(
                f"block_q {self.block_q} is no power of two of at least 16 · {self.warps} warps"
            )
        if not _power_of_two(self.block_k) or self.block_k < 16:
            raise ValueError(f"block_k {self.block_k} is no power of two of at least 16")
        if self.stages < 1:
            raise ValueError(f"stages {self.stages} is not positive")
        if self.polynomial not in (0, 2, 4):
            raise ValueError(f"polynomial {self.polynomial} is not 0, 2 or 4")
        if self.persistent < 0:
            raise ValueError(f"persistent {self.persistent} is negative")
        if self.registers and not 32 <= self.registers <= 255:
            raise ValueError(f"registers {self.registers} is neither 0 nor from 32 to 255")


# The same for every batch, so that an image's bits never depend on what it is scored with. Compiled
# for Hopper: 128 registers, four programs a multiprocessor (three at 128 wide), so that the
# matrix products of one run under the exponentials of the others.
DEFAULT = Tuning(heads_first=True, stages=3)

# What the benchmark times, by name.
TUNINGS: dict[str, Tuning] = {
    "default": DEFAULT,
    "plain": Tuning(),
    "stages_3": Tuning(stages=3),
    "stages_4": Tuning(stages=4),
    "keys_64": Tuning(block_k=64),
    "keys_256": Tuning(block_k=256),
    "keys_256_stages_3": Tuning(block_k=256, stages=3),
    "queries_128": Tuning(block_q=128),
    "warps_8": Tuning(block_q=128, warps=8),
    "warps_8_keys_256": Tuning(block_q=128, block_k=256, warps=8),
    "polynomial_4": Tuning(polynomial=4),
    "polynomial_2": Tuning(polynomial=2, registers=128),
    "polynomial_4_keys_256": Tuning(block_k=256, polynomial=4),
    "descriptor": Tuning(descriptor=True, registers=128),
    "descriptor_stages_3": Tuning(descriptor=True, registers=128, stages=3),
    "descriptor_keys_256": Tuning(block_k=256, descriptor=True),
    "persistent": Tuning(persistent=4, registers=128),
    "heads_first": Tuning(heads_first=True),
    "heads_first_polynomial_4": Tuning(heads_first=True, stages=3, polynomial=4),
    "masked": Tuning(peel=False),
    "unfolded": Tuning(fold=False),
}
