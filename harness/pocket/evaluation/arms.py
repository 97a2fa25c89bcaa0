"""Which arms are asked which tasks, and the settings of each pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.help import conf_folder, groups
from harness.pocket.items import BOTH
from harness.pocket.world.ocr import FINE, LARGE
from harness.settings import Settings

CONCURRENCY = 16
"""Requests kept in flight, whatever is measured: what SERE does depends on the batch."""
SEED = 11
"""Draws the sets. Not that of the sweeps' default workload, nor of the tests."""


@dataclass(frozen=True)
class Task:
    """One held-out set.

    Attributes:
        name: in the table.
        task, band: as for `harness.pocket.generate.SetSpec`.
        workload: file of ``conf/workload`` that says how it is asked.
    """

    name: str
    task: str
    band: str
    workload: str


OCR_LARGE = Task("ocr_large", "ocr", LARGE, "pocket_ocr")
OCR_FINE = Task("ocr_fine", "ocr", FINE, "pocket_ocr")
CC = Task("cc", "cc", BOTH, "pocket_cc")
RAG = Task("rag", "rag", BOTH, "pocket_rag")
TASKS = (OCR_LARGE, OCR_FINE, CC, RAG)

FULL = "full"
"""The arm that both others are measured against: every token kept, routing off."""
RATIOS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
QUICK_RATIOS = (0.5, 0.2)
POLICIES = ("visionzip", "random")
RHOS = (0.3, 0.0)


@dataclass(frozen=True)
class Arm:
    """One setting of both levers.

    Attributes:
        name: in the table; unique.
        part: ``base``, ``vision`` or ``routing``.
        tasks: what is asked under it.
        vision, routing: settings that differ from everything kept and routing off.
    """

    name: str
    part: str
    tasks: tuple[Task, ...]
    vision: Mapping[str, Any] = field(default_factory=dict)
    routing: Mapping[str, Any] = field(default_factory=dict)


def vision_arm(policy: str, ratio: float) -> str:
    """Name of an arm that prunes."""
    return f"{policy} {ratio:g}"


def topk_arm(k: int) -> str:
    """Name of an arm that drops secondary experts."""
    return f"top-{k}"


def sere_arm(k: int, rho: float, *, protected: bool = False) -> str:
    """Name of an arm that re-routes them."""
    return f"SERE K={k} ρ={rho:g}{', protected' if protected else ''}"


def arms(*, quick: bool, protection: Path | None) -> Iterator[Arm]:
    """All arms, what the others are compared with first.

    Args:
        quick: about a third of them.
        protection: marks of the protected experts, if there are any.
    """
    yield Arm(FULL, "base", TASKS)
    for ratio in QUICK_RATIOS if quick else RATIOS:
        for policy in POLICIES:
            setting = {"retain_ratio": ratio, "policy": policy}
            yield Arm(vision_arm(policy, ratio), "vision", (OCR_LARGE, OCR_FINE, CC), setting)
    for name, setting in _routings(quick, protection):
        yield Arm(name, "routing", (OCR_FINE, RAG), routing=setting)


def _routings(quick: bool, protection: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    yield topk_arm(2), {"policy": "topk", "primary_experts": 2, "renormalize": True}
    for rho in RHOS:
        yield sere_arm(2, rho), _sere(2, rho)
    if quick:
        return
    if protection is not None:
        # Where everything may move there is most to protect.
        protected = _sere(2, 0.0) | {"protection_path": str(protection)}
        yield sere_arm(2, 0.0, protected=True), protected
    yield sere_arm(1, 0.0), _sere(1, 0.0)


def _sere(k: int, rho: float) -> dict[str, Any]:
    return {"policy": "sere", "primary_experts": k, "similarity_threshold": rho}


def settings_of(
    arm: Arm, task: Task, *, n: int, model: Path | None, data: Path, dtype: str = "bfloat16"
) -> Settings:
    """The settings of one cell: the defaults of `conf/`, a closed load, and the arm's levers.

    Args:
        arm: both levers.
        task: what is asked.
        n: how many questions, each once.
        model: the checkpoint; `None` for the bundled one.
        data: the set's file.
        dtype: that the engine computes in.

    Raises:
        harness.settings.SettingsError: they contradict each other.
    """
    conf = conf_folder()
    choices = {g.name: g.choices[0] for g in groups(conf)}
    choices |= {"workload": task.workload, "load": "closed"}
    tree: dict[str, Any] = {
        group: OmegaConf.to_container(OmegaConf.load(conf / group / f"{choice}.yaml"))
        for group, choice in choices.items()
    }
    tree["engine"] |= {"dtype": dtype}
    tree["model"] |= {"path": None if model is None else str(model)}
    if model is not None:
        tree["model"]["name"] = model.name
    tree["workload"] |= {
        "name": task.name,
        "path": str(data),
        "samples": n,
        "images_per_request": 1,
        "seed": SEED,
    }
    tree["load"] |= {"concurrency": CONCURRENCY, "requests": n, "warmup_requests": 0}
    tree["vision"] |= {"retain_ratio": 1.0, **arm.vision}
    tree["routing"] |= {"policy": "off", "primary_experts": None, **arm.routing}
    tree["report"] |= {"name": "pocket", "title": "Pocket world"}
    return Settings.from_tree(tree)
