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
from harness.calibration.protection import Reroute, mark_costliest
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
def whole(network: Network, batches: dict[str, list[Minibatch]], reroute: Reroute | None) -> float:
    """The same loss from whole conversations, with the layer's own forward replaced."""
    means = []
    for found in batches.values():
        total, count = 0.0, 0
        for batch in found:
            answer = first_answers(batch)
            height, width = batch.pixels.shape[2:]
            grid = (height // MERGED, width // MERGED)
            positions = positions_of(batch.tokens, IMAGE_PAD, grid)
            vision = network.encode(batch.pixels.float() / 127.5 - 1)
            with pytest.MonkeyPatch.context() as patch:
                if reroute is not None:
                    block = network.model.language_model.layers[reroute.layer].mlp
                    patch.setattr(block, "forward", moved(block, reroute, answer.flatten()))
                hidden = network(vision, batch.tokens, positions).hidden
            logits = network.lm_head(hidden)[:, :-1].flatten(0, 1)
            target = batch.tokens.where(answer, -100)[:, 1:].flatten()
            total += float(functional.cross_entropy(logits, target, reduction="sum"))
            count += int((target >= 0).sum())
        means.append(total / count)
    return sum(means) / len(means)


def moved(block: MixtureOfExperts, reroute: Reroute, decoded: torch.Tensor):  # type: ignore[no-untyped-def]
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, 1)
        logits = block.gate(rows)
        weights = expert_weights(logits, block.top_k)
        for row, ids in enumerate(logits.topk(block.top_k).indices.tolist()):
            if decoded[row] and reroute.expert in ids[protect.PRIMARY_EXPERTS :]:
                weights[row, reroute.target] += weights[row, reroute.expert].clone()
                weights[row, reroute.expert] = 0
        return block.experts(rows, weights).view(x.shape), logits.view(*x.shape[:-1], -1)

    return forward


def test_loss_is_that_of_whole_conversations(network: Network) -> None:
    batches = held_in_batches(1)
    loss = AnswerLoss(network, batches)
    plain = loss(None)
    assert plain == pytest.approx(whole(network, batches, None), rel=1e-4)
    changes = []
    for reroute in (Reroute(0, 3, 9), Reroute(1, 20, 0), Reroute(2, 7, 31), Reroute(3, 5, 6)):
        expected = whole(network, batches, reroute)
        assert loss(reroute) - plain == pytest.approx(expected - plain, rel=0.01, abs=1e-5)
        changes.append(abs(expected - plain))
    assert max(changes) > 1e-3, changes
    assert loss(None) == plain


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
