"""The bundled checkpoint: of the published layout, loaded right by Transformers, calibrated, whole."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from harness.calibration import MEASURES, PROTECTION_FILE, similarity_file
from harness.calibration.fingerprint import model_fingerprint
from harness.calibration.similarity import load_protection, load_similarity
from harness.pocket import cache, model, protect
from harness.pocket.initial import init
from harness.pocket.model import FOLDER, ModelMissing, build, ensure
from harness.pocket.network import Network
from harness.pocket.recipe import Recipe, model_config

R = Recipe()


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Random weights, experts in families that hardly differ."""
    network = Network(R)
    init(network, seed, families=8, noise=0.2)
    return network.state_dict()


def make(folder: Path, seed: int) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "CALIBRATION_TEXTS", 6)
        build(folder, drawn(seed), card="# A draft\n")
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("pocket") / "model", 3)


@pytest.fixture(scope="module")
def tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    with safe_open(model_dir / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def hashes(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def test_same_weights_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again", 3)
    assert hashes(again) == hashes(model_dir)
    assert (again / "README.md").read_text() == "# A draft\n"
    assert cache.is_whole(again)


def test_stored_as_bfloat16(tensors: dict[str, torch.Tensor]) -> None:
    weights = drawn(3)
    assert set(tensors) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(tensors[name], weight.bfloat16())


def test_build_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "a b" / "thing"
    cache.write_folder(target, lambda d: (d / "f").write_text("one"))
    cache.write_folder(target, lambda d: (d / "g").write_text("two"))
    assert sorted(p.name for p in target.iterdir()) == ["g", cache.MANIFEST]
    assert [p.name for p in target.parent.iterdir()] == ["thing"]


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        (draft / "half").write_text("x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cache.write_folder(tmp_path / "thing", fail)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_noticed_and_mended(tmp_path: Path) -> None:
    writes = []

    def write(folder: Path) -> None:
        writes.append(folder)
        cache.write_folder(folder, lambda d: (d / "f").write_text("whole"))

    target = tmp_path / "thing"
    for damage in (lambda: None, (target / "f").unlink, lambda: (target / "f").write_text("wh")):
        damage()
        cache.ensure_folder(target, write)
        assert (target / "f").read_text() == "whole"
        cache.ensure_folder(target, write)
    assert len(writes) == 3


def test_drafts_of_a_killed_writer_are_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".thing.abc"
    left.mkdir()
    (left / "half").write_text("x")
    cache.ensure_folder(
        tmp_path / "thing", lambda f: cache.write_folder(f, lambda d: (d / "f").write_text("x"))
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [".thing.lock", "thing"]


def test_cache_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(cache.CacheError, match="name a place within a folder"):
        cache.write_folder(tmp_path / "file" / "thing", lambda draft: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(cache.CacheError, match="XDG_CACHE_HOME"):
        cache.ensure_folder(cache.root() / "thing", lambda folder: None)
    with pytest.raises(cache.CacheError, match="XDG_CACHE_HOME"):
        cache.write_folder(cache.root() / "thing", lambda draft: None)


def _count_writes(root: Path, start: float) -> None:
    import time

    def write(folder: Path) -> None:
        def fill(draft: Path) -> None:
            time.sleep(0.3)
            (draft / "f").write_text("whole")

        with (root / "writes").open("a") as log:
            log.write("1")
        cache.write_folder(folder, fill)

    time.sleep(max(0.0, start - time.time()))
    cache.ensure_folder(root / "thing", write)


def test_racing_processes_build_once(tmp_path: Path) -> None:
    import time

    context = multiprocessing.get_context("fork")
    start = time.time() + 0.2
    racers = [context.Process(target=_count_writes, args=(tmp_path, start)) for _ in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(30)
        assert racer.exitcode == 0
    assert (tmp_path / "writes").read_text() == "1"
    assert cache.is_whole(tmp_path / "thing")


def test_the_bundled_model_is_whole_and_calibrated() -> None:
    assert ensure() == FOLDER
    sizes = {"layers": R.layers, "experts": R.experts, "model_hash": model_fingerprint(FOLDER)}
    for measure in MEASURES:
        similarity = load_similarity(FOLDER / similarity_file(measure), **sizes)
        assert torch.equal(similarity, similarity.mT)
    marks = load_protection(FOLDER / PROTECTION_FILE, **sizes)
    assert marks.sum(1).tolist() == [protect.PROTECTED] * R.layers
    listed = json.loads((FOLDER / cache.MANIFEST).read_text())
    files = {p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*") if p.is_file()}
    assert set(listed) == files - {cache.MANIFEST}
    assert sum(listed[name] for name in listed if name.endswith("model.safetensors")) <= 20e6


def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_dir: Path
) -> None:
    damaged = shutil.copytree(model_dir, tmp_path / "damaged")
    monkeypatch.setattr(model, "FOLDER", damaged)
    assert ensure() == damaged
    (damaged / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelMissing, match=r"damaged: .*git restore"):
        ensure()
    shutil.rmtree(damaged)
    with pytest.raises(ModelMissing):
        ensure()


def test_prints_where_it_is() -> None:
    command = [sys.executable, "-m", "harness.pocket"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"{FOLDER}\n"


def test_importing_needs_no_torch() -> None:
    code = (
        "import sys, harness.pocket.model as m; m.ensure(); "
        "import harness.calibration.fingerprint; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_layout_is_the_published_one(tensors: dict[str, torch.Tensor], model_dir: Path) -> None:
    at = "model.language_model.layers.0"
    inner = R.moe_intermediate_size
    shapes = {
        f"{at}.mlp.experts.gate_up_proj": (R.experts, R.hidden_size, 2 * inner),
        f"{at}.mlp.experts.down_proj": (R.experts, inner, R.hidden_size),
        f"{at}.mlp.gate.weight": (R.experts, R.hidden_size),
        "model.visual.patch_embed.proj.weight": (R.vision_hidden_size, 3, 2, 16, 16),
        "lm_head.weight": (R.vocab_size, R.hidden_size),
    }
    assert {name: tuple(tensors[name].shape) for name in shapes} == shapes
    assert R.hidden_size not in (2 * inner, inner)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert sum(t.numel() for t in tensors.values()) < 10_000_000
    index = json.loads((model_dir / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == {"model.safetensors"}


def test_the_issue_gets_the_model_it_asked_for() -> None:
    config = model_config(R)
    text, vision = config["text_config"], config["vision_config"]
    assert config["architectures"] == ["Qwen3VLMoeForConditionalGeneration"]
    assert text["num_hidden_layers"] >= 4
    assert (text["num_experts"], text["num_experts_per_tok"]) == (32, 8)
    assert text["norm_topk_prob"]
    assert text["rope_scaling"]["mrope_interleaved"]
    assert sum(text["rope_scaling"]["mrope_section"]) == text["head_dim"] // 2
    assert text["max_position_embeddings"] == 32_768
    assert len(vision["deepstack_visual_indexes"]) == 2
    assert (vision["patch_size"], vision["spatial_merge_size"]) == (16, 2)


def test_transformers_loads_every_tensor_and_experts_the_right_way_round(
    model_dir: Path, tensors: dict[str, torch.Tensor]
) -> None:
    from transformers import Qwen3VLMoeForConditionalGeneration

    model, info = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        model_dir, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    block = model.model.language_model.layers[2].mlp
    at = "model.language_model.layers.2.mlp.experts"
    x = torch.randn(5, R.hidden_size, generator=torch.Generator().manual_seed(0))
    for expert in (0, 17):
        # By hand, from the file's own orientation: x @ W, gate half first.
        inner = x @ tensors[f"{at}.gate_up_proj"][expert].float()
        gate, up = inner.chunk(2, dim=-1)
        by_hand = (torch.nn.functional.silu(gate) * up) @ tensors[f"{at}.down_proj"][expert].float()
        ids = torch.full((5, 1), expert)
        torch.testing.assert_close(
            block.experts(x, ids, torch.ones(5, 1)), by_hand, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("measure", MEASURES)
def test_similarity_lies_beside_and_shows_the_families(model_dir: Path, measure: str) -> None:
    similarity = load_similarity(
        model_dir / similarity_file(measure),
        layers=R.layers,
        experts=R.experts,
        model_hash=model_fingerprint(model_dir),
    )
    own = torch.eye(R.experts, dtype=torch.bool)
    found = []
    for layer in similarity:
        alike = layer.masked_fill(own, 0).topk(R.experts // 8 - 1).indices  # the others of a family
        family = own.scatter(1, alike, True)
        assert torch.equal(family, family.T)
        assert torch.equal((family.int() @ family.int()).bool(), family)
        assert layer[family & ~own].min() > layer[~family].max() + 0.1
        found.append(family)
    # Families are scattered by layer, so an index mixed up between layers shows.
    assert not torch.equal(found[0], found[1])
