"""Training, in miniature: it learns, it resumes, and its optimiser does what it says."""

from __future__ import annotations

import dataclasses
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from harness.pocket import train
from harness.pocket.evaluation import routing
from harness.pocket.losses import steepness_loss
from harness.pocket.optimizer import Muon, is_hidden_matrix, orthogonal
from harness.pocket.world.batch import draw
from harness.pocket.world.draw import HELD_OUT

SMALL = train.Options(steps=100, ocr=8, cc=8, rag=8, rag_from=0.05, lr=1e-3)


@pytest.fixture(autouse=True)
def one_minibatch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "DRAWN_AT_ONCE", 1)


def test_orthogonal_evens_out_singular_values() -> None:
    g = torch.Generator().manual_seed(0)
    for shape in ((4, 48, 96), (96, 48)):
        x = torch.randn(shape, generator=g) @ torch.diag(torch.logspace(-1, 1, shape[-1]))
        s = torch.linalg.svdvals(orthogonal(x))
        assert s.min() > 0.3 and s.max() < 1.4


def test_muon_descends() -> None:
    torch.manual_seed(0)
    target, w = torch.randn(32, 32), nn.Parameter(torch.zeros(32, 32))
    optimizer = Muon([w], lr=0.05)
    losses = []
    for _ in range(60):
        loss = (w - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


def test_which_parameters_muon_takes() -> None:
    matrix, stack, vector = (nn.Parameter(torch.zeros(s)) for s in ((4, 4), (2, 4, 4), (4,)))
    assert is_hidden_matrix("model.visual.blocks.0.attn.qkv.weight", matrix)
    assert is_hidden_matrix("model.language_model.layers.0.mlp.experts.down_proj", stack)
    assert not is_hidden_matrix("lm_head.weight", matrix)
    assert not is_hidden_matrix("model.language_model.layers.0.mlp.gate.weight", matrix)
    assert not is_hidden_matrix("x.bias", vector)


def test_steepness_is_zero_when_all_experts_count_alike() -> None:
    valid = torch.ones(1, 3, dtype=torch.bool)
    flat = torch.full((2, 1, 3, 16), -9.0)
    flat[..., :8] = 1.0
    assert float(steepness_loss(flat, valid, 8)) == pytest.approx(0, abs=1e-5)
    steep = flat.clone().requires_grad_()
    with torch.no_grad():
        steep[..., 0] = 30.0
    loss = steepness_loss(steep, valid, 8)
    assert float(loss) == pytest.approx(2.0794, abs=1e-3)  # ln 8
    loss.backward()
    assert steep.grad is not None


def test_a_restored_trainer_goes_on_as_if_nothing_had_happened() -> None:
    device = torch.device("cpu")
    one = train.Trainer(SMALL, device, 0, 1)
    first = one.train_step()
    assert "rag said" not in first  # joins in later
    saved = one.state()
    other = train.Trainer(SMALL, device, 0, 1)
    other.restore(saved)
    assert other.step == 1
    one._seed(1)
    a, b = one.train_step(), other.train_step()
    assert a.keys() == b.keys()
    assert all(float(a[k]) == pytest.approx(float(b[k]), rel=1e-4) for k in a)


@pytest.mark.timeout(1200)  # eight whole steps: minutes, where a processor only emulates bfloat16
def test_a_few_steps_on_one_batch_learn_it() -> None:
    trainer = train.Trainer(SMALL, torch.device("cpu"), 0, 1)
    batch = trainer._next("ocr")
    said = []
    for _ in range(8):
        loss, parts = trainer.losses(batch, 0.1)
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in trainer.optimizers:
            optimizer.step()
        said.append(float(parts["said"]))
    assert said[-1] < 0.7 * said[0]


def test_exact_counts_answers_without_a_mistake() -> None:
    trainer = train.Trainer(SMALL, torch.device("cpu"), 0, 1)
    found = trainer.exact(1, 8)
    assert any(k.startswith("ocr ") for k in found) and any(k.startswith("rag ") for k in found)
    assert all(0 <= v <= 1 for v in found.values())
    assert found["rag how-to" if "rag how-to" in found else "rag how-to_zh"] == 0


def test_families_stay_alike() -> None:
    options = dataclasses.replace(SMALL, pull=0.02)
    trainer = train.Trainer(options, torch.device("cpu"), 0, 1)
    trainer.step = 60  # past the warm-up
    p, family = trainer.families[0]
    with torch.no_grad():
        p.copy_(torch.randn_like(p))
    before = p[family == 0].std(0).mean()
    means = [p[family == f].mean(0) for f in range(8)]
    for _ in range(100):
        trainer._pull_families()
    assert p[family == 0].std(0).mean() < 0.8 * before
    assert all(torch.allclose(p[family == f].mean(0), means[f], atol=1e-5) for f in range(8))


def test_scattered_experts_keep_their_familys_mean() -> None:
    weights = train.Trainer(SMALL, torch.device("cpu"), 0, 1).network.state_dict()
    weights = {k: v.clone() for k, v in weights.items()}
    found = []
    for scatter in (1.0, 3.0):
        options = dataclasses.replace(SMALL, scatter=scatter, seed=0)
        trainer = train.Trainer(options, torch.device("cpu"), 0, 1)
        trainer.start_from(weights)
        gate = "model.language_model.layers.0.mlp.gate.weight"
        assert torch.equal(trainer.average[gate], weights[gate])
        found.append(trainer)
    (a, family), (b, _) = (t.families[0] for t in found)
    for f in range(8):
        own = a[family == f] - a[family == f].mean(0)
        torch.testing.assert_close(b[family == f] - b[family == f].mean(0), 3 * own)
        torch.testing.assert_close(b[family == f].mean(0), a[family == f].mean(0))


def test_the_command_saves_what_it_can_go_on_from(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "harness.pocket.train", str(tmp_path), "--minutes", "0", "--no-compile",
        "--ocr", "8", "--cc", "8", "--rag", "8", "--exact-items", "0",
    ]  # fmt: skip
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / train.CHECKPOINT, weights_only=True)["step"] == 2
    weights = load_file(tmp_path / train.WEIGHTS)
    assert all(t.dtype == torch.bfloat16 for t in weights.values())
    assert 2 * sum(t.numel() for t in weights.values()) < 20_000_000


def test_hidden_tokens_are_as_good_as_gone() -> None:
    """Answers with tokens hidden are those with the tokens cut out, and no others change."""
    trainer = train.Trainer(SMALL, torch.device("cpu"), 0, 1)
    network, batch = trainer.network, trainer._next("cc")
    hidden = train.some_blank(batch, trainer.draws)
    hidden[0] = False
    hidden[1, :5] = True
    assert hidden[2:].any()
    height, width = batch.pixels.shape[2:]
    positions = train.positions_of(batch.tokens, train.IMAGE_PAD, (height // 32, width // 32))
    with torch.no_grad():
        vision = network.encode(batch.pixels.float() / 127.5 - 1)
        seen, moved, rows = train.hide(batch, positions, vision, hidden)
        out = network(rows, seen.tokens, moved).hidden
        whole = network(vision, batch.tokens, positions).hidden
        torch.testing.assert_close(out[0], whole[0])
        for i in (1, 2):
            keep = torch.ones_like(batch.valid[i])
            keep[batch.tokens[i] == train.IMAGE_PAD] = ~hidden[i]
            cut = train.Vision(
                vision.merged[i, ~hidden[i]][None],
                tuple(t[i, ~hidden[i]][None] for t in vision.taps),
                vision.patches,
            )
            alone = network(cut, batch.tokens[i, keep][None], positions[:, i, keep][:, None])
            n = int((batch.valid[i] & keep).sum())
            torch.testing.assert_close(out[i, :n], alone.hidden[0, :n], atol=1e-4, rtol=1e-3)
            assert int(seen.valid[i].sum()) == n
            assert torch.equal(seen.tokens[i][seen.answer[i]], batch.tokens[i][batch.answer[i]])


def test_decoding_owes_nothing_to_what_is_not_changed() -> None:
    """The probe of routing: with the experts as they are, answers are those of the network."""
    trainer = train.Trainer(SMALL, torch.device("cpu"), 0, 1)
    batch = draw(trainer.codec, trainer.draws, random.Random(0), "ocr", 16, HELD_OUT)
    network = trainer.network
    before = routing.right(network, batch, None)
    with routing.decoding_with(network, routing.no_experts, batch.answer.flatten()):
        block = network.model.language_model.layers[0].mlp
        y, _ = block(torch.randn(*batch.tokens.shape, 192))
        changed = y.abs().sum(-1) > 0
    assert torch.equal(changed, ~batch.answer)
    assert torch.equal(routing.right(network, batch, None), before)
    assert routing.own_share(network, 0, 8) == pytest.approx([0.3 * (0.75**0.5)] * 4, rel=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("--exact-items -1", "--exact-items -1"),
        ("--exact-every 0", "--exact-every 0"),
        ("--optimizer foo", "invalid choice"),
        ("--lr nan", "--lr nan"),
        ("--lr -1", "--lr -1"),
        ("--average 2", "--average 2"),
        ("--families 5", "divisor of 32"),
        ("--families -1", "--families -1"),
        ("--seed 99999999999999999999", "--seed"),
        ("--minutes -1", "--minutes"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, match: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        train.parse([str(tmp_path / "new"), *options.split()])
    assert ended.value.code == 2
    assert match in capsys.readouterr().err


def test_a_place_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        train.parse([str(tmp_path / "file" / "x")])
    assert "no folder can be made there" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps({"step": 1})])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / train.CHECKPOINT).write_bytes(content)
    trainer = SimpleNamespace(device="cpu", restore=lambda state: state["options"])
    with pytest.raises(ValueError, match=r"checkpoint\.pt"):
        train._load(trainer, tmp_path, None)  # type: ignore[arg-type]
