"""The short cuts of the pocket model's answer loss change nothing, and the marks get written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from harness.calibration import PROTECTION_FILE
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.protection import Spared, mark_costliest
from harness.calibration.similarity import load_protection
from harness.pocket import cache, protect
from harness.pocket.answers import IMAGE_PAD
from harness.pocket.model import FOLDER
from harness.pocket.network import MixtureOfExperts, Network, expert_weights, positions_of
from harness.pocket.protect import AnswerLoss, held_in_batches, load_network
from harness.pocket.recipe import Recipe
from harness.pocket.special import token_id
from harness.pocket.world.batch import Minibatch
from harness.pocket.world.draw import MERGED
from kernels.sere import reference


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Few items, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protect, "BATCHES", {"ocr": (2, 8), "cc": (1, 8), "rag": (1, 8)})
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def network() -> Network:
    """The bundled one made to have secondary experts that count: flat routers, unlike experts."""
    found = load_network(FOLDER)
    own = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in found.model.language_model.layers:
            block.mlp.gate.weight.mul_(0.2)
            down = block.mlp.experts.down_proj
            down += 4 * down.std() * torch.randn(down.shape, generator=own)
    return found


def first_answers(batch: Minibatch) -> torch.Tensor:
    return batch.answer & ((batch.tokens == token_id("<|im_start|>")).cumsum(1) <= 2)


@torch.inference_mode()
def whole(
    network: Network,
    batches: dict[str, list[Minibatch]],
    similarity: torch.Tensor,
    spared: Spared | None,
) -> float:
    """The same loss from whole conversations, with every layer's own forward replaced."""
    means = []
    for found in batches.values():
        total, count = 0.0, 0
        for number, batch in enumerate(found):
            answer = first_answers(batch)
            height, width = batch.pixels.shape[2:]
            grid = (height // MERGED, width // MERGED)
            positions = positions_of(batch.tokens, IMAGE_PAD, grid)
            vision = network.encode(batch.pixels.float() / 127.5 - 1)
            steps = steps_of(answer, number)
            with pytest.MonkeyPatch.context() as patch:
                for layer, block in enumerate(network.model.language_model.layers):
                    expert = spared.expert if spared and spared.layer == layer else None
                    replaced = moved(block.mlp, similarity[layer], steps, expert)
                    patch.setattr(block.mlp, "forward", replaced)
                hidden = network(vision, batch.tokens, positions).hidden
            logits = network.lm_head(hidden)[:, :-1].flatten(0, 1)
            target = batch.tokens.where(answer, -100)[:, 1:].flatten()
            total += float(functional.cross_entropy(logits, target, reduction="sum"))
            count += int((target >= 0).sum())
        means.append(total / count)
    return sum(means) / len(means)


def steps_of(answer: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Rows, of all that a batch of conversations has, that decode together: as `moments` says."""
    items, width = answer.shape
    rows = int(answer.sum(1).max()) + 1
    start = torch.randint(rows, (items,), generator=torch.Generator().manual_seed(seed)).tolist()
    found: dict[tuple[int, int], list[int]] = {}
    for item in range(items):
        # The row before says the first token and is prefilled; the last token is said and never read.
        for age, at in enumerate(answer[item].nonzero()[:-1, 0].tolist(), 1):
            step = (item // protect.BATCH, (start[item] + age) % rows)
            found.setdefault(step, []).append(item * width + at)
    return [torch.tensor(rows) for rows in found.values()]


def moved(
    block: MixtureOfExperts, similarity: torch.Tensor, steps: list[torch.Tensor], spared: int | None
):  # type: ignore[no-untyped-def]
    protected = torch.zeros(len(similarity), dtype=torch.bool)
    if spared is not None:
        protected[spared] = True

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, 1)
        logits = block.gate(rows)
        weights = expert_weights(logits, block.top_k)
        for own in steps:
            shares, ids = weights[own].topk(block.top_k)
            kinds = torch.full((len(own),), reference.DECODE)
            new = reference.sere(
                ids, shares, kinds, similarity, protected, protect.PRIMARY_EXPERTS, 0.0
            )
            weights[own] = torch.zeros_like(weights[own]).scatter_add(1, new, shares)
        return block.experts(rows, weights).view(x.shape), logits.view(*x.shape[:-1], -1)

    return forward


def test_loss_is_that_of_whole_conversations(network: Network) -> None:
    batches = held_in_batches(1)
    r = Recipe()
    similarity = torch.rand(
        r.layers, r.experts, r.experts, generator=torch.Generator().manual_seed(3)
    )
    loss = AnswerLoss(network, batches, similarity)
    everything = loss(None)
    assert everything == pytest.approx(whole(network, batches, similarity, None), rel=1e-4)
    changes = []
    for spared in (Spared(0, 3), Spared(1, 20), Spared(2, 7), Spared(3, 5)):
        expected = whole(network, batches, similarity, spared)
        assert loss(spared) - everything == pytest.approx(expected - everything, rel=0.01, abs=2e-5)
        changes.append(abs(expected - everything))
    assert max(changes) > 1e-3, changes
    assert loss(None) == everything


def test_batches_are_the_same_each_time() -> None:
    assert protect._hash(held_in_batches(0)) == protect._hash(held_in_batches(0))
    assert protect._hash(held_in_batches(0)) != protect._hash(held_in_batches(1))


def test_marks_are_written_beside_and_nothing_else_changes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    (folder / PROTECTION_FILE).unlink(missing_ok=True)
    before = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    increases = protect.protect(folder, count=3)
    r = Recipe()
    assert increases.shape == (r.layers, r.experts)
    marks = load_protection(
        folder / PROTECTION_FILE,
        layers=r.layers,
        experts=r.experts,
        model_hash=model_fingerprint(folder),
    )
    assert torch.equal(marks, mark_costliest(increases, 3))
    after = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    new = {Path(PROTECTION_FILE), Path(cache.MANIFEST)}
    assert after.keys() == before.keys() | new
    assert all(after[name] == before[name] for name in before.keys() - new)
    assert cache.is_whole(folder)
