"""``python -m harness.pocket.evaluation.rerouting``: what re-routing costs, setting by setting.

Held-out notes are answered with the training network, teacher-forced, and rows that a server decodes have
their experts re-routed as in a server: requests are grouped into batches, each request starts at a moment
of its own, and what the rows of one moment read decides where they may go. What is compared is the loss of
the answers (nats a token, less what it is with nothing moved) at the distinct experts that a token's step
reads.

Studies:
    measure: similarity by each measure, and by lot.
    threshold: one rho for all layers against a quantile of each layer's similarities.
    protection: marks by what moving costs, by load and by lot.
    batch: the same settings at other batch sizes.
    auto: a K that follows the batch size or the age of an answer, against fixed ones.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from harness.calibration import MEASURES, similarity_file
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.protection import mark_costliest
from harness.calibration.quantiles import quantile_thresholds
from harness.calibration.similarity import load_similarity
from harness.endings import ended
from harness.pocket import sheets
from harness.pocket.answers import (
    Moments,
    Tail,
    attend,
    blocks,
    moments,
    reroute,
    tail_of,
    used_experts,
)
from harness.pocket.model import ensure
from harness.pocket.network import Network, expert_weights
from harness.pocket.protect import costs_of, held_in_batches, load_network
from harness.pocket.recipe import Recipe
from harness.pocket.world.batch import draw
from harness.pocket.world.draw import HELD_OUT, Draws
from harness.pocket.world.text import Codec
from kernels.sere.reference import by_batch

ITEMS = 32
"""Requests of a draw, all of one arrangement."""
BATCH = 8
BATCHES = (1, 2, 4, 8, 16, 32)
LOTS = 5
"""Draws of protection by lot."""


@dataclass(frozen=True)
class Setting:
    """How rows are re-routed.

    Attributes:
        primary_experts: K, of all rows, or of each step by how many rows it decodes (index 0: none).
        threshold: [layers], rho.
        protected: [layers, E] bool.
        first_tokens: rows so young have `young_experts` primaries instead.
        young_experts: K of young rows.
    """

    primary_experts: int | tuple[int, ...]
    threshold: Tensor
    protected: Tensor
    first_tokens: int = 0
    young_experts: int = 0


@dataclass(frozen=True)
class Result:
    """What one setting gave.

    Attributes:
        loss: [requests] float64, summed over an answer's decoded tokens.
        tokens: [requests] decoded tokens.
        right: [requests] bool, every token the likeliest.
        rows: rows that a decoded token's step decodes, mean.
        before, after: distinct experts of such a step in a layer, mean.
    """

    loss: Tensor
    tokens: Tensor
    right: Tensor
    rows: float
    before: float
    after: float

    def per_token(self) -> float:
        """Loss of a token [nats]."""
        return float(self.loss.sum() / self.tokens.sum())


class Study:
    """Answers of held-out notes, ready to be asked again and again."""

    def __init__(self, network: Network, similarity: Tensor, draws: int, seed: int) -> None:
        codec, rng = Codec(sheets.load()), random.Random(seed)
        lots = Draws(torch.Generator().manual_seed(seed))
        self.similarity = similarity
        self.network = network
        self._tails = [
            tail_of(network, draw(codec, lots, rng, "rag", ITEMS, HELD_OUT)) for _ in range(draws)
        ]

    def setting(self, k: int, rho: float | Tensor) -> Setting:
        """K and one rho for all layers, or one for each; nothing protected."""
        layers, experts, _ = self.similarity.shape
        threshold = torch.as_tensor(rho, dtype=torch.float32).expand(layers)
        return Setting(k, threshold, torch.zeros(layers, experts, dtype=torch.bool))

    @torch.inference_mode()
    def ask(
        self, setting: Setting | None, batch: int = BATCH, similarity: Tensor | None = None
    ) -> Result:
        """Answer everything, in batches of so many requests; by other matrices if they are given."""
        matrices = self.similarity if similarity is None else similarity
        parts = [
            self._answer(tail, moments(tail, batch, i), setting, matrices)
            for i, tail in enumerate(self._tails)
        ]
        loss, tokens, right = (torch.cat([p[i] for p in parts]) for i in range(3))
        rows, before, after = (
            float(torch.cat([p[i].double() for p in parts]).mean()) for i in range(3, 6)
        )
        return Result(loss, tokens, right, rows, before, after)

    def _answer(
        self, tail: Tail, when: Moments, setting: Setting | None, matrices: Tensor
    ) -> tuple[Tensor, ...]:
        x, counts = tail.states[0], []
        rows = torch.bincount(when.of[when.of >= 0], minlength=when.count)
        for number, block in enumerate(blocks(self.network)):
            if number:
                x = x + attend(block, x, tail, tail.past[number])
            seen = block.post_attention_layernorm(x[tail.used])
            slots = block.mlp.top_k
            weights = expert_weights(block.mlp.gate(seen), slots)
            own = setting or self.setting(slots, 0.0)
            weights, before, after = reroute(
                weights, when, primaries(own, when, rows), matrices[number],
                float(own.threshold[number]), own.protected[number], slots,
            )  # fmt: skip
            counts.append(torch.stack([before, after]))
            y = torch.zeros_like(x)
            y[tail.used] = used_experts(block.mlp.experts, seen, weights)
            x = x + y
        logits = self.network.lm_head(self.network.model.language_model.norm(x[tail.used]))
        target = tail.target[tail.used]
        losses = functional.cross_entropy(logits, target, reduction="none").double()
        item = torch.arange(len(tail.used))[:, None].expand_as(tail.used)[tail.used]
        decoded = (when.of >= 0).double()
        sums = torch.zeros(2, len(tail.used), dtype=torch.float64)
        sums[0].index_add_(0, item, losses * decoded)
        sums[1].index_add_(0, item, decoded)
        wrong = torch.zeros(len(tail.used)).index_add_(
            0, item, (logits.argmax(-1) != target).float()
        )
        before, after = torch.stack(counts).double().mean(0)
        steps = when.of[when.of >= 0]
        return sums[0], sums[1], wrong == 0, rows[steps], before[steps], after[steps]


def primaries(setting: Setting, when: Moments, rows: Tensor) -> Tensor:
    """K of each row, int64 [rows used]; `rows` are how many each step decodes."""
    k = setting.primary_experts
    if isinstance(k, int):
        of = torch.full_like(when.of, k)
    else:
        of = torch.tensor(k)[rows[when.of.clamp(min=0)]]
    if setting.first_tokens:
        of = of.masked_fill(when.age <= setting.first_tokens, setting.young_experts)
    return of


# -- studies -----------------------------------------------------------------------------------------


Row = dict[str, object]


def row(study: str, name: str, result: Result, plain: Result) -> Row:
    """A line of the table; the interval is that of the mean over requests, 1.96 standard errors."""
    tokens = float(result.tokens.sum())
    less = result.loss - plain.loss
    error = 1.96 * float(less.std()) * len(less) ** 0.5 / tokens
    return {
        "study": study,
        "setting": name,
        "rows": round(result.rows, 2),
        "experts_before": round(result.before, 3),
        "experts_after": round(result.after, 3),
        "loss_increase": round(float(less.sum()) / tokens, 5),
        "plus_minus": round(error, 5),
        "right": round(float(result.right.double().mean()), 4),
    }


def measure(study: Study, folder: Path, plain: Result) -> Iterator[Row]:
    """Where slots go: by each measure of similarity, and by lot, rho = 0."""
    shape = study.similarity.shape
    matrices = {m: matrix(folder, m) for m in MEASURES}
    for lot in range(LOTS):
        g = torch.Generator().manual_seed(lot)
        matrices[f"by lot {lot}"] = torch.rand(shape, generator=g)
    for name, similarity in matrices.items():
        for k in (1, 2, 3):
            found = study.ask(study.setting(k, 0.0), similarity=similarity)
            yield row("measure", f"{name}, K={k}", found, plain)


def matrix(folder: Path, measure: str) -> Tensor:
    """Similarity of the bundled model's experts, [layers, E, E]."""
    r = Recipe()
    return load_similarity(
        folder / similarity_file(measure), layers=r.layers, experts=r.experts,
        model_hash=model_fingerprint(folder),
    )  # fmt: skip


def threshold(study: Study, plain: Result) -> Iterator[Row]:
    """Absolute thresholds and quantiles, K = 1."""
    for k in (1, 2):
        for i in range(11):
            rho = study.setting(k, i / 10)
            yield row("threshold", f"K={k} rho {i / 10}", study.ask(rho), plain)
        for i in range(11):
            own = study.setting(k, quantile_thresholds(study.similarity, i / 10))
            yield row("threshold", f"K={k} quantile {i / 10}", study.ask(own), plain)


def protection(study: Study, plain: Result, costs: Tensor, load: Tensor) -> Iterator[Row]:
    """As many protected experts, chosen in three ways, K = 1 and rho = 0."""
    base = study.setting(1, 0.0)
    yield row("protection", "none", study.ask(base), plain)
    layers, experts = costs.shape
    for count in (2, 4, 8, 12):
        for name, by in (("cost", costs), ("load", load)):
            marked = replace(base, protected=mark_costliest(by, count).bool())
            yield row("protection", f"{count} by {name}", study.ask(marked), plain)
        for lot in range(LOTS):
            by = torch.rand(layers, experts, generator=torch.Generator().manual_seed(lot))
            marked = replace(base, protected=mark_costliest(by, count).bool())
            yield row("protection", f"{count} by lot {lot}", study.ask(marked), plain)


def batch(study: Study, k_s: Sequence[int] = (1, 2, 3, 4, 5)) -> Iterator[Row]:
    """The same settings at other batch sizes."""
    for size in BATCHES:
        plain = study.ask(None, size)
        for k in k_s:
            name = f"K={k}, batches of {size}"
            yield row("batch", name, study.ask(study.setting(k, 0.0), size), plain)


def auto(study: Study) -> Iterator[Row]:
    """Over all batch sizes alike: fixed K; K by batch size; K by an answer's age."""
    plain = {size: study.ask(None, size) for size in BATCHES}
    most, slots = max(BATCHES), Recipe().experts_per_token

    def over_sizes(name: str, setting: Setting) -> Row:
        found = [study.ask(setting, size) for size in BATCHES]
        together = [
            Result(
                torch.cat([r.loss for r in results]), torch.cat([r.tokens for r in results]),
                torch.cat([r.right for r in results]),
                *(sum(getattr(r, c) for r in results) / len(results) for c in ("rows", "before", "after")),
            )
            for results in (found, list(plain.values()))
        ]  # fmt: skip
        return row("auto", name, *together)

    base = study.setting(1, 0.0)
    for k in range(1, 7):
        yield over_sizes(f"K={k}", replace(base, primary_experts=k))
    for alone in (2, 3, 4, 5, 6, 7, 8, 10, 12):
        by = tuple(min(slots, by_batch(alone, n)) for n in range(most + 1))
        yield over_sizes(f"auto {alone}", replace(base, primary_experts=by))
    for budget in (4, 8, 12, 16, 24, 32):
        by = tuple(max(1, min(slots, budget // max(1, n))) for n in range(most + 1))
        yield over_sizes(f"K={budget}/rows", replace(base, primary_experts=by))
    for floor in (2, 4, 8):
        for k in (1, 2):
            by = tuple(slots if n < floor else k for n in range(most + 1))
            yield over_sizes(f"K={k}, aside below {floor} rows", replace(base, primary_experts=by))
    for first in (2, 4, 8):
        yield over_sizes(
            f"K=1, {slots} for the first {first} tokens",
            replace(base, first_tokens=first, young_experts=slots),
        )


def loads(study: Study) -> Tensor:
    """How often each expert is picked on the training split, [layers, E] float64."""
    network = study.network
    found = []
    tails = [tail_of(network, b) for b in held_in_batches(seed=0)["rag"]]
    for number, block in enumerate(blocks(network)):
        total = torch.zeros(study.similarity.shape[-1], dtype=torch.float64)
        for tail in tails:
            seen = block.post_attention_layernorm(tail.states[number][tail.used])
            total += (expert_weights(block.mlp.gate(seen), block.mlp.top_k) > 0).sum(0)
        found.append(total)
    return torch.stack(found)


def main() -> int:
    """Print and write the table; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.pocket.evaluation.rerouting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ("measure", "threshold", "protection", "batch", "auto")
    parser.add_argument("--studies", nargs="+", choices=names, default=list(names))
    parser.add_argument("--measure", choices=MEASURES, default=MEASURES[0])
    parser.add_argument("--draws", type=int, default=6, help=f"of {ITEMS} requests each (6)")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--out", type=Path, help="a CSV file")
    args = parser.parse_args()
    if args.draws < 1:
        parser.error(f"--draws {args.draws}: takes a whole number >= 1")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed}: takes a whole number from 0 on")
    if args.out is not None and args.out.is_dir():
        parser.error(f"--out {args.out}: is a folder; takes a file")
    folder = ensure()
    similarity = matrix(folder, args.measure)
    network = load_network(folder)
    study = Study(network, similarity, args.draws, args.seed)
    plain = study.ask(None)

    def marks() -> Iterator[Row]:
        with torch.inference_mode():
            costs = costs_of(network, similarity, primary_experts=1)
            load = loads(study)
        yield from protection(study, plain, costs, load)

    table: list[Row] = []
    for name in args.studies:
        studies: dict[str, Callable[[], Iterator[Row]]] = {
            "measure": lambda: measure(study, folder, plain),
            "threshold": lambda: threshold(study, plain),
            "protection": marks,
            "batch": lambda: batch(study),
            "auto": lambda: auto(study),
        }
        for line in studies[name]():
            table.append(line)
            print(*(f"{k} {v}" for k, v in line.items()), sep="  ", flush=True)
            if args.out is not None:
                write(table, args.out)
    return 0


def write(table: Sequence[Row], out: Path) -> None:
    """As CSV, in a folder that is made if need be."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    sys.exit(ended(main))
