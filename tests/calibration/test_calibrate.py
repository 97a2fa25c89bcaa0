"""The commands, on tiny checkpoints: what they write, how they go on after a stop, what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from harness import calibrate
from harness.calibration import (
    MEASURES,
    PROTECTION_FILE,
    collect,
    partial_file,
    protection_run,
    similarity_file,
    similarity_run,
)
from harness.calibration.answers import AnswerLoss
from harness.calibration.checkpoints import load_tokenizer, moe_blocks, outline
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.measures import CkaAccumulator
from harness.calibration.protection import Spared, mark_costliest
from harness.calibration.samples import encode_samples, read_samples
from harness.calibration.similarity import (
    CalibrationError,
    Provenance,
    load_protection,
    load_similarity,
    save_similarity,
)
from harness.calibration.texts import GENERAL_TEXTS
from harness.endings import Terminated
from harness.pocket.held_in import held_in_texts
from harness.pocket.model import FOLDER, one_thread
from tests.calibration import tiny

ROOT = Path(__file__).parents[2]
SHAPE = {"layers": tiny.LAYERS, "experts": tiny.EXPERTS}


@pytest.fixture(autouse=True)
def thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder by family, the same each time."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny.write(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return get


@pytest.fixture(scope="module")
def model(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("qwen3_moe")


@pytest.fixture(scope="module")
def similarity(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("similarity") / "s.safetensors"
    assert run("similarity", model=model, data="general", samples=4, out=out) == 0
    return out


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [
        {"prompt": "To reset the router,", "answer": " hold the button."},
        {"prompt": [{"role": "user", "content": "Is it 4?"}], "answer": "No, it is 5.<|im_end|>"},
        {"prompt": "Water boils", "answer": " lower in the mountains."},
    ]
    return tiny.write_lines(tmp_path_factory.mktemp("data") / "answers.jsonl", records)


def run(command: str, **given: object) -> int:
    return calibrate.main([command, *(f"{key}={value}" for key, value in given.items())])


def refused(capsys: pytest.CaptureFixture[str], command: str, **given: object) -> str:
    """The line that the command ends with after it has refused."""
    capsys.readouterr()
    assert run(command, **given) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("error: ")
    return last


def stop_at(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, how: type[BaseException]
) -> None:
    """Have the `call`-th call of a method, from 1, be where the program is stopped."""
    original, calls = getattr(owner, name), []

    def counted(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == call:
            raise how
        return original(*arguments)

    monkeypatch.setattr(owner, name, counted)


# -- similarity -----------------------------------------------------------------------------------


@torch.inference_mode()
def frobenius(model: nn.Module, texts: list[list[int]]) -> Tensor:
    """The definition, from the experts' weights and all activations at once."""
    seen: dict[int, list[Tensor]] = {}
    for layer, block in moe_blocks(model).items():
        seen[layer] = []
        block.register_forward_pre_hook(
            lambda _, args, layer=layer: seen[layer].append(args[0].flatten(0, -2))
        )
    for ids in texts:
        model(input_ids=torch.tensor([ids]))
    layers = []
    for layer, block in moe_blocks(model).items():
        x = torch.cat(seen[layer]).double()
        outputs = []
        for up_gate, down in zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True):  # type: ignore[union-attr, arg-type]
            gate, up = (x @ up_gate.double().T).chunk(2, dim=-1)
            outputs.append(((functional.silu(gate) * up) @ down.double().T).flatten())
        distances = torch.cdist(torch.stack(outputs), torch.stack(outputs))
        layers.append(1 - distances / distances.max())
    return torch.stack(layers)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_similarity_of_every_family(
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
) -> None:
    folder, out = checkpoints(family), tmp_path / "s.safetensors"
    data = tmp_path / "texts.txt"
    data.write_text("\n\n".join(GENERAL_TEXTS[:3]))
    assert run("similarity", model=folder, data=data, max_tokens=40, out=out) == 0
    said, progress = capsys.readouterr()
    assert said == f"{out}\n"
    assert (
        f"of {tiny.FAMILIES[family]}: 2 layers x 8 experts, 3 samples, 120 tokens; acc" in progress
    )
    found = load_similarity(
        out, **SHAPE, model_hash=model_fingerprint(folder), layer_indices=(0, 1)
    )
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer(text)["input_ids"][:40] for text in GENERAL_TEXTS[:3]]
    want = frobenius(tiny.model(family), ids)
    torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.safetensors", "texts.txt"]


def test_data_by_name_and_where_it_goes(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    texts = held_in_texts(2, seed=0)
    for measure in MEASURES:
        assert run("similarity", model=folder, data="pocket", samples=2, measure=measure) == 0
        out = folder / similarity_file(measure)
        collect.calibrate(folder, tmp_path / "want", measure=measure, texts=texts, max_tokens=2048)
        assert out.read_bytes() == (tmp_path / "want").read_bytes()
        with safe_open(out, framework="pt") as file:
            assert file.metadata()["measure"] == measure
    lines = tiny.write_lines(tmp_path / "t.jsonl", [{"text": t} for t in GENERAL_TEXTS[:2]])
    for data, name in ((lines, "a"), ("general", "b")):
        assert run("similarity", model=folder, data=data, samples=2, out=tmp_path / name) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("chunk", [10**9, 37 * tiny.EXPERTS * tiny.HIDDEN])
def test_a_stopped_similarity_goes_on_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    measure: str,
    chunk: int,
) -> None:
    monkeypatch.setattr(collect, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(CkaAccumulator, "multiple", 1)  # so that outputs wait too
    monkeypatch.setattr(similarity_run, "SAVE_EVERY", 2)
    given = {"model": model, "data": "general", "samples": 9, "measure": measure}
    whole, stopped = tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors"
    assert run("similarity", **given, out=whole) == 0
    for call, how, status in ((6, KeyboardInterrupt, 130), (3, Terminated, 143)):
        with monkeypatch.context() as patch:
            stop_at(patch, collect.Collector, "add", call, how)
            capsys.readouterr()
            assert run("similarity", **given, out=stopped) == status
        partial = partial_file(stopped)
        assert partial.exists() and not stopped.exists()
        word = "interrupted" if status == 130 else "terminated"
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == (
            f"{word}; what was done is in {partial}, and the same command goes on from there"
        )
    assert run("similarity", **given, out=stopped) == 0
    assert "going on after 6 of 9 samples" in capsys.readouterr().err
    assert stopped.read_bytes() == whole.read_bytes()
    assert not partial.exists()


def test_other_arguments_do_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checkpoints: Callable[[str], Path],
    model: Path,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(similarity_run, "SAVE_EVERY", 2)
    given = {"model": model, "data": "general", "samples": 5, "out": tmp_path / "s.safetensors"}
    with monkeypatch.context() as patch:
        stop_at(patch, collect.Collector, "add", 4, KeyboardInterrupt)
        assert run("similarity", **given) == 130
    before = partial_file(tmp_path / "s.safetensors").read_bytes()
    for change, words in (
        ({"measure": "cka"}, "begun with measure=frobenius, not cka; give"),
        ({"samples": 6}, "samples=5, not 6"),
        ({"max_tokens": 9}, "max_tokens=2048, not 9"),
        ({"dtype": "bfloat16"}, "begun with dtype=float32, not bfloat16; give"),
        ({"model": checkpoints("qwen2_moe")}, "begun with model="),
        ({"data": "pocket"}, "begun with data="),
    ):
        line = refused(capsys, "similarity", **{**given, **change})
        assert words in line and "to start anew" in line
    assert partial_file(tmp_path / "s.safetensors").read_bytes() == before


def test_stopped_before_anything_was_saved(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    stop_at(monkeypatch, collect.Collector, "add", 2, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):  # `harness.endings` says that nothing was written
        run("similarity", model=model, data="general", out=tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_process_of_its_own(model: Path, tmp_path: Path) -> None:
    lines = [{"text": text} for text in GENERAL_TEXTS * 100]
    data = tiny.write_lines(tmp_path / "t.jsonl", lines)
    out = tmp_path / "s.safetensors"
    command = [sys.executable, "-m", "harness.calibrate", "similarity", f"model={model}",
               f"data={data}", f"out={out}"]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    try:
        limit = time.monotonic() + 120
        while not partial_file(out).exists():
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("interrupted; what was done is in ")
    assert "Traceback" not in errors
    with safe_open(partial_file(out), framework="pt") as file:
        assert int(file.metadata()["done"]) % similarity_run.SAVE_EVERY == 0


def test_what_does_not_fit_is_refused_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(similarity_run, "load_model", None)
    monkeypatch.setattr(similarity_run, "free_bytes", lambda device: 400_000)
    out = tmp_path / "s"
    line = refused(capsys, "similarity", model=model, data="general", out=out)
    assert "device=cpu: cpu has 400 kB of memory free, and this takes " in line
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_by_the_chunk_not_by_the_text(model: Path) -> None:
    kind = outline(model)
    assert (kind.layers, kind.experts, kind.top_k, kind.depth) == ((0, 1), 8, 4, 2)
    assert kind.parameters == sum(p.numel() for p in tiny.model("qwen3_moe").parameters())
    for measure in MEASURES:
        some, more = (
            similarity_run.memory_need(kind, measure, torch.float32, tokens, 50)
            for tokens in (10**6, 10**9)
        )
        assert some == more
        assert some.sums == 2 * 8 * 8 * 8
        assert some.model == 4 * kind.parameters


def damaged(model: Path, folder: Path, kind: str) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    if kind == "weights":
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("model.layers.1.mlp.gate.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif kind == "tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "type":
        config |= {"model_type": "abacus", "architectures": ["AbacusForCausalLM"]}
    elif kind == "dense":
        config |= {"mlp_only_layers": [0, 1]}
    (folder / "config.json").write_text("{" if kind == "config" else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("weights", "has no weights for model.layers.1.mlp.gate.weight"),
        ("tokenizer", "has no tokenizer that Transformers loads"),
        ("type", "model_type 'abacus' with architecture 'AbacusForCausalLM' is none that"),
        ("dense", "no mixture-of-experts block found"),
        ("config", "its config.json cannot be read"),
    ],
)
def test_checkpoints_that_are_refused(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, kind: str, words: str
) -> None:
    folder = damaged(model, tmp_path / "model", kind)
    assert words in refused(capsys, "similarity", model=folder, data="general", out=tmp_path / "s")


def test_what_is_wrong_is_said(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    given = {"model": model, "data": "general", "out": tmp_path / "s"}
    assert "no such folder" in refused(capsys, "similarity", **{**given, "model": tmp_path / "no"})
    assert "cannot be read" in refused(capsys, "similarity", **{**given, "data": tmp_path / "no"})
    count = torch.cuda.device_count()
    line = refused(capsys, "similarity", **given, device=f"cuda:{count}")
    assert f"PyTorch sees {count} GPUs here" in line
    few = {**given, "measure": "cka", "samples": 1, "max_tokens": 3}
    assert "3 tokens for calibration: give text of at least 4" in refused(
        capsys, "similarity", **few
    )
    with pytest.raises(CalibrationError, match="takes one of frobenius, cosine, cka"):
        collect.calibrate(model, tmp_path / "s", measure="rbf")
    with pytest.raises(CalibrationError, match="0 tokens"):
        collect.calibrate(model, tmp_path / "s", texts=())
    assert list(tmp_path.iterdir()) == []


def test_the_bundled_model_takes_it_too(tmp_path: Path) -> None:
    out = tmp_path / "s"
    assert run("similarity", model=FOLDER, data="pocket", samples=2, out=out) == 0
    load_similarity(out, layers=4, experts=32, model_hash=model_fingerprint(FOLDER))


# -- protection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_protection_of_every_family(
    checkpoints: Callable[[str], Path],
    answers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
) -> None:
    folder = shutil.copytree(checkpoints(family), tmp_path / "model")
    assert run("similarity", model=folder, data="general", samples=2) == 0
    matrices = folder / similarity_file(MEASURES[0])
    capsys.readouterr()
    assert run("protection", model=folder, data=answers, similarity=matrices, count=3) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder / PROTECTION_FILE}\n"
    samples = encode_samples(load_tokenizer(folder), read_samples(answers), None)
    tokens = sum(len(s.answer) for s in samples)
    assert f"2 layers x 8 experts, 3 samples, {sum(len(s.prompt) for s in samples)} tokens" in err
    marks = load_protection(
        folder / PROTECTION_FILE,
        **SHAPE,
        model_hash=model_fingerprint(folder),
        layer_indices=(0, 1),
    )
    similarity = load_similarity(matrices, **SHAPE)
    losses = [AnswerLoss(tiny.model(family), sample, similarity, 2, 8) for sample in samples]
    want = torch.tensor(
        [
            [sum(x(None) - x(Spared(i, e)) for x in losses) / tokens for e in range(8)]
            for i in range(2)
        ],
        dtype=torch.float64,
    )
    assert want.abs().max() > 1e-4
    assert torch.equal(marks, mark_costliest(want, 3))
    with safe_open(folder / PROTECTION_FILE, framework="pt") as file:
        torch.testing.assert_close(file.get_tensor("loss_increase"), want, rtol=0, atol=2e-6)
        assert file.metadata()["measure"] == "loss_increase_k2_b8"


def test_a_stopped_protection_goes_on_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    answers: Path,
    similarity: Path,
    tmp_path: Path,
) -> None:
    given = {"model": model, "data": answers, "similarity": similarity, "count": 3}
    whole, stopped = tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors"
    assert run("protection", **given, out=whole) == 0
    monkeypatch.setattr(protection_run, "SAVE_S", 0)
    # Within the first sample's second layer, at once, and at a later sample's beginning.
    for call in (15, 2, 20):
        with monkeypatch.context() as patch:
            stop_at(patch, AnswerLoss, "__call__", call, KeyboardInterrupt)
            assert run("protection", **given, out=stopped) == 130
        assert partial_file(stopped).exists() and not stopped.exists()
    # Each sample is also asked for its loss with nothing moved, in each process that comes to it.
    done = [line for line in capsys.readouterr().err.splitlines() if "going on" in line]
    assert [int(line.split()[3]) for line in done] == [13, 13]
    assert run("protection", **{**given, "count": 2}, out=tmp_path / "other") == 0
    for change, words in (
        ({"primary_experts": 1}, "begun with primary_experts=2, not 1; give"),
        ({"samples": 2}, "samples=3, not 2"),
        ({"dtype": "bfloat16"}, "dtype=float32, not bfloat16"),
    ):
        line = refused(capsys, "protection", **{**given, **change}, out=stopped)
        assert words in line
    assert run("protection", **given, out=stopped) == 0
    assert stopped.read_bytes() == whole.read_bytes()
    assert not partial_file(stopped).exists()


def test_long_samples_are_left_out_and_counted(
    model: Path,
    answers: Path,
    similarity: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"model": model, "data": answers, "similarity": similarity, "out": tmp_path / "p"}
    lengths = [
        sample.length
        for sample in encode_samples(load_tokenizer(model), read_samples(answers), None)
    ]
    assert run("protection", **given, count=1, max_tokens=max(lengths) - 1) == 0
    assert "2 samples (1 longer than max_tokens left out), " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "count=16: this model takes 1 to 8"),
        ({"count": 1, "primary_experts": 4}, "gives each token 4 experts, of which some must be"),
        ({"count": 1, "data": "answers.txt"}, "takes a .jsonl file whose lines have a prompt"),
        ({"count": 1, "max_tokens": 2}, "max_tokens=2: the shortest sample has"),
        ({"count": 1, "similarity": "none"}, "none: no such file; make it with `python -m harness"),
    ],
)
def test_what_protection_refuses(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    answers: Path,
    similarity: Path,
    tmp_path: Path,
    change: dict[str, object],
    words: str,
) -> None:
    given = {"model": model, "data": answers, "similarity": similarity, "out": tmp_path / "p"}
    assert words in refused(capsys, "protection", **{**given, **change})
    assert list(tmp_path.iterdir()) == []


def test_similarity_of_another_model_and_losses_that_overflow(
    capsys: pytest.CaptureFixture[str],
    checkpoints: Callable[[str], Path],
    model: Path,
    answers: Path,
    similarity: Path,
    tmp_path: Path,
) -> None:
    given = {"data": answers, "similarity": similarity, "count": 1, "out": tmp_path / "p"}
    other = checkpoints("qwen2_moe")
    assert "made for model" in refused(capsys, "protection", model=other, **given)

    broken = shutil.copytree(model, tmp_path / "model")
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"][:] = torch.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    matrices = tmp_path / "s"
    provenance = Provenance("frobenius", model_fingerprint(broken), "0" * 64, (0, 1))
    save_similarity(matrices, load_similarity(similarity, **SHAPE), provenance)
    line = refused(capsys, "protection", **{**given, "model": broken, "similarity": matrices})
    assert "the loss with everything re-routed is nan; run the model in a wider type" in line


def test_steps_and_their_costs() -> None:
    steps = protection_run.Steps(answers=(5, 2), layers=(1, 3), depth=4, experts=3)
    assert len(steps) == 12
    assert [steps.at(n) for n in (0, 2, 3, 6, 11)] == [
        (0, 0, 0), (0, 0, 2), (0, 1, 0), (1, 0, 0), (1, 1, 2)
    ]  # fmt: skip
    one = [3 * 5] * 3 + [1 * 5] * 3 + [3 * 2] * 3 + [1 * 2] * 3
    assert [steps.cost(n) for n in range(13)] == [sum(one[:n]) for n in range(13)]
