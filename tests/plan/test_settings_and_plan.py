"""Settings are checked as a whole; cells are named by all that can change them, and by nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.help import conf_folder, groups, help_text
from harness.plan import canonical_routing, engine_of, make_cells
from harness.settings import Settings, SettingsError


def tree(**changes: Any) -> dict[str, Any]:
    conf = conf_folder()
    out = {
        g.name: yaml.safe_load((conf / g.name / f"{g.choices[0]}.yaml").read_text())
        for g in groups(conf)
    }
    for key, value in changes.items():
        group, name = key.split("__")
        out[group][name] = value
    return out


def cells(*trees: dict[str, Any], top_k: int | None = 8, prints: dict[str, str] | None = None):
    return make_cells(
        [Settings.from_tree(t) for t in trees],
        top_k=lambda s: top_k,
        fingerprints=lambda s: prints or {},
    )


def test_every_default_file_is_valid_with_the_other_defaults() -> None:
    conf = conf_folder()
    for group in groups(conf):
        for choice in group.choices:
            t = tree()
            t[group.name] = yaml.safe_load((conf / group.name / f"{choice}.yaml").read_text())
            if choice == "remote":
                t["engine"]["url"] = "http://127.0.0.1:1"
            Settings.from_tree(t)


def test_every_setting_has_a_comment() -> None:
    for group in groups(conf_folder()):
        file = conf_folder() / group.name / f"{group.choices[0]}.yaml"
        keys = {f"{group.name}.{k}" for k in yaml.safe_load(file.read_text())}
        assert {s.key for s in group.settings} == keys
        assert all(s.about for s in group.settings)


def test_help_names_every_setting() -> None:
    text = help_text()
    for group in groups(conf_folder()):
        for s in group.settings:
            assert f"{s.key}=" in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("vision__retain_ratio", 0, "vision.retain_ratio=0: takes a number in (0, 1]"),
        ("vision__retain_ratio", float("nan"), "vision.retain_ratio=nan: takes a number in (0, 1]"),
        ("vision__retain_ratio", "half", "vision.retain_ratio='half': takes a number in (0, 1]"),
        ("vision__policy", "best", "vision.policy='best': takes one of none, visionzip"),
        ("vision__layer", 1.5, "vision.layer=1.5: takes a whole number"),
        ("routing__policy", "sear", "routing.policy='sear': takes one of off, topk, sere"),
        (
            "routing__primary_experts",
            0,
            "routing.primary_experts=0: takes a whole number >= 1, or auto, or null",
        ),
        ("routing__similarity_threshold", 1.1, "takes a number in [0, 1]"),
        ("load__qps", -1, "load.qps=-1: takes a number > 0, or null"),
        ("load__qps", True, "load.qps=True: takes a number > 0, or null"),
        ("load__qps", None, "load.qps=None: load.arrival=poisson takes a number > 0"),
        ("load__concurrency", 4, "only load.arrival=closed limits it"),
        ("engine__url", "http://x", "only engine=remote has one"),
        ("engine__block_size", 48, "takes a multiple of 32"),
        ("engine__extra_args", "--flag", "takes a list of texts"),
        ("workload__max_tokens", 5000, "takes a whole number < engine.max_model_len (4096)"),
        ("workload__format", "coco", "takes one of ocrbench"),
        (
            "workload__format",
            "ccbench",
            "only drawn items of workload.format=ocrbench have a choice",
        ),
    ],
)
def test_a_wrong_value_names_its_key_and_what_it_takes(key: str, value: Any, words: str) -> None:
    with pytest.raises(SettingsError) as error:
        Settings.from_tree(tree(**{key: value}))
    assert words in str(error.value)


def test_all_findings_come_at_once_and_strangers_get_a_suggestion() -> None:
    t = tree(vision__retain_ratio=2, load__requests=0)
    t["routing"]["primary_expert"] = 2
    del t["model"]["name"]
    with pytest.raises(SettingsError) as error:
        Settings.from_tree(t)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert "routing.primary_expert: no such setting; did you mean routing.primary_experts?" in lines
    assert "model.name: missing" in lines


def test_a_bare_off_is_the_word() -> None:
    assert Settings.from_tree(tree(routing__policy=False)).routing.policy == "off"


def test_levers_without_the_plugin_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"vision.retain_ratio=0.5: needs the plugin"):
        Settings.from_tree(tree(engine__plugin=False, vision__retain_ratio=0.5))
    with pytest.raises(SettingsError, match=r"routing.primary_experts=2: needs the plugin"):
        Settings.from_tree(tree(engine__plugin=False, routing__primary_experts=2))


@pytest.mark.parametrize(
    ("policy", "k"), [("off", 2), ("sere", None), ("sere", 8), ("topk", 9), ("off", None)]
)
def test_every_way_of_saying_off_is_one_cell(policy: str, k: int | None) -> None:
    off, other = cells(tree(), tree(routing__policy=policy, routing__primary_experts=k)), None
    assert len(off) == 1
    other = canonical_routing(off[0].settings.routing, 8)
    assert (other.policy, other.primary_experts) == ("off", None)


def test_off_ignores_the_settings_of_policies_that_do_not_run() -> None:
    assert (
        len(cells(tree(), tree(routing__similarity_threshold=0.1, routing__renormalize=False))) == 1
    )


def test_vision_settings_that_nothing_reads_do_not_matter() -> None:
    def pruned(**changes: Any) -> dict[str, Any]:
        return tree(vision__retain_ratio=0.5, **changes)

    assert len(cells(tree(), tree(vision__policy="random", vision__layer=2))) == 1
    assert len(cells(pruned(), pruned(vision__policy="random"))) == 2
    assert len(cells(pruned(), pruned(vision__layer=2))) == 2
    for changes in ({"layer": 2}, {"budget": "raw"}, {"merge": "contextual"}):
        other = {f"vision__{k}": v for k, v in changes.items()}
        assert len(cells(pruned(), pruned(**other))) == 2
        assert len(cells(tree(), tree(**other))) == 1
        for policy in ("random", "grid", "downscale", "none"):
            control = {"vision__policy": policy}
            assert len(cells(pruned(**control), pruned(**control, **other))) == 1
    share = {"vision__contextual_share": 0.3}
    merge = {"vision__merge": "contextual"}
    assert len(cells(pruned(), pruned(**share))) == 1
    assert len(cells(pruned(**merge), pruned(**merge, **share))) == 2
    none = {"vision__policy": "none"}
    assert len(cells(tree(**none), pruned(**none))) == 1


def test_ids_change_with_what_can_change_a_result() -> None:
    base = cells(tree())[0].id
    for key, value in {
        "vision__retain_ratio": 0.5,
        "load__seed": 1,
        "workload__max_tokens": 8,
        "engine__dtype": "float32",
        "routing__primary_experts": 2,
    }.items():
        assert cells(tree(**{key: value}))[0].id != base, key
    assert cells(tree(), prints={"model": "abc"})[0].id != base


def test_ids_do_not_change_with_what_cannot() -> None:
    base = cells(tree())[0].id
    for key, value in {
        "report__title": "Other",
        "report__folder": "elsewhere",
        "engine__start_timeout_s": 9.0,
        "model__path": "/somewhere/else",
        "workload__path": "/data.json",
    }.items():
        assert cells(tree(**{key: value}))[0].id == base, key


def test_cells_share_engines_and_arms_of_a_load_run_back_to_back() -> None:
    trees = [
        tree(engine__plugin=plugin, load__qps=qps, vision__retain_ratio=ratio)
        for ratio in (1.0, 0.5)
        for plugin in (True, False)
        for qps in (2.0, 4.0)
        if plugin or ratio == 1.0
    ]
    plan = cells(*copy.deepcopy(trees))
    assert [engine_of(c)[0].plugin for c in plan] == [True] * 4 + [False] * 2
    assert [(c.settings.load.qps, c.settings.vision.retain_ratio) for c in plan[:4]] == [
        (2.0, 1.0),
        (2.0, 0.5),
        (4.0, 1.0),
        (4.0, 0.5),
    ]


def test_the_plan_does_not_depend_on_the_machine(tmp_path: Path) -> None:
    assert cells(tree())[0].id == cells(tree(report__folder=str(tmp_path)))[0].id
