"""Everything that must be in place before an engine starts: model, data, matrices; checked and hashed."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from harness.calibration import SIMILARITY_FILE
from harness.engine.checkpoint import Checkpoint, read_checkpoint
from harness.engine.command import vllm_version
from harness.plan import Cell, canonical_routing, make_cells
from harness.settings import Settings, SettingsError, WorkloadSettings
from harness.workload import Workload, load_workload


@dataclass(frozen=True)
class Prepared:
    """What a sweep runs on.

    Attributes:
        cells: named, without repeats, in the order in which they run.
        checkpoints: by `model.path` setting; `None` for a model behind a remote engine.
        workloads: by workload settings.
        similarity: path of the matrices for each cell id that re-routes; absent for others.
        hashes: name → content hash, for the plan.
    """

    cells: tuple[Cell, ...]
    checkpoints: Mapping[str | None, Checkpoint | None]
    workloads: Mapping[WorkloadSettings, Workload]
    similarity: Mapping[str, str]
    hashes: Mapping[str, str]

    def checkpoint(self, cell: Cell) -> Checkpoint | None:
        """The model of a cell."""
        return self.checkpoints[cell.settings.model.path]

    def top_k(self, settings: Settings) -> int | None:
        """Experts per token of the model that `settings` name; `None` if none or not known."""
        return _top_k(self.checkpoints[settings.model.path])


def prepare(
    settings: Sequence[Settings],
    loaded: Mapping[WorkloadSettings, Workload] = MappingProxyType({}),
) -> Prepared:
    """Read and check all that the settings name, build what is bundled, and make the plan of cells.

    Args:
        settings: one for each cell.
        loaded: workloads that need no reading, such as those put together in another way.

    Raises:
        SettingsError: settings and model or data do not go together; one line for each finding.
        ValueError: a model, data set or matrix file is missing or damaged; the message says which.
    """
    checkpoints: dict[str | None, Checkpoint | None] = {}
    workloads = dict(loaded)
    findings: list[str] = []
    for s in settings:
        if s.model.path not in checkpoints:
            checkpoints[s.model.path] = _checkpoint(s)
        if s.workload not in workloads:
            warmups = max(x.load.warmup_requests for x in settings if x.workload == s.workload)
            workloads[s.workload] = load_workload(s.workload, warmups)
        findings += _unfit(s, checkpoints[s.model.path], workloads[s.workload])
    if findings:
        raise SettingsError("\n".join(dict.fromkeys(findings)))

    def top_k(s: Settings) -> int | None:
        return _top_k(checkpoints[s.model.path])

    def fingerprints(s: Settings) -> dict[str, str]:
        checkpoint = checkpoints[s.model.path]
        prints = {
            "model": _model_hash(checkpoint.path) if checkpoint else str(s.engine.url),
            "workload": workloads[s.workload].sha256,
            "vllm": vllm_version() or "absent" if checkpoint else "remote",
            "pruneroute": importlib.metadata.version("pruneroute"),
        }
        routing = canonical_routing(s.routing, top_k(s))
        if routing.policy == "sere":
            path = similarity_path(s, checkpoint)
            prints["similarity"] = _matrix_hash("similarity", path, checkpoint)
        if routing.policy != "off" and routing.protection_path:
            prints["protection"] = _matrix_hash("protection", routing.protection_path, checkpoint)
        return prints

    cells = make_cells(settings, top_k=top_k, fingerprints=fingerprints)
    return Prepared(
        cells=cells,
        checkpoints=checkpoints,
        workloads=workloads,
        similarity={
            c.id: similarity_path(c.settings, checkpoints[c.settings.model.path])
            for c in cells
            if c.settings.routing.policy == "sere"
        },
        hashes={k: v for c in cells for k, v in fingerprints(c.settings).items()},
    )


def similarity_path(s: Settings, checkpoint: Checkpoint | None) -> str:
    """The matrices that a cell re-routes by: those named, or those beside the model.

    Raises:
        SettingsError: there are none.
    """
    named = s.routing.similarity_path
    if named is not None:
        return str(Path(named).resolve()) if checkpoint else named
    if checkpoint is None:
        raise SettingsError(
            "routing.similarity_path=None: engine=remote takes a path on the server's own disk"
        )
    beside = checkpoint.path / SIMILARITY_FILE
    if not beside.is_file():
        raise SettingsError(
            f"routing.similarity_path=None: there is no {beside}; make it with "
            f"`python -m harness.calibrate similarity model={checkpoint.path} data=FILE`, or take "
            "routing.policy=topk"
        )
    return str(beside)


def _top_k(checkpoint: Checkpoint | None) -> int | None:
    return checkpoint.top_k if checkpoint else None


def _checkpoint(s: Settings) -> Checkpoint | None:
    if s.engine.kind == "remote":
        return None
    if s.model.path is not None:
        return read_checkpoint(Path(s.model.path).resolve())
    from harness.pocket.model import ensure

    return read_checkpoint(ensure())


def _unfit(s: Settings, checkpoint: Checkpoint | None, workload: Workload) -> list[str]:
    """Settings that the model or the data cannot have."""
    findings = []
    needs_images = max(len(x.images) for x in (*workload.samples, *workload.warmups))
    if needs_images > s.engine.images_per_request and s.engine.kind != "remote":
        findings.append(
            f"engine.images_per_request={s.engine.images_per_request}: the workload has samples "
            f"with {needs_images} images; takes a whole number >= {needs_images}"
        )
    if checkpoint is None:
        return findings
    if needs_images and not checkpoint.has_vision:
        findings.append(
            f"model.path={checkpoint.path}: {checkpoint.architecture} takes no images, and the "
            "workload has some"
        )
    layer, depth = s.vision.layer, checkpoint.vision_layers
    if depth is not None and not -depth <= layer < depth:
        findings.append(
            f"vision.layer={layer}: the vision encoder has {depth} layers; takes -{depth} to {depth - 1}"
        )
    elif s.vision.prunes and s.vision.policy == "visionzip" and not checkpoint.scores_in(layer):
        findings.append(
            f"vision.layer={layer}: that layer of the vision encoder attends within windows; takes "
            f"one of {', '.join(map(str, checkpoint.whole_image_layers or ()))}"
        )
    k = s.routing.primary_experts
    if k is not None and s.routing.policy != "off":
        if checkpoint.top_k is None:
            findings.append(
                f"routing.primary_experts={k}: {checkpoint.architecture} has no experts; takes null"
            )
        elif isinstance(k, int) and k > checkpoint.top_k:
            findings.append(
                f"routing.primary_experts={k}: this model gives each token {checkpoint.top_k} "
                f"experts; takes 1 to {checkpoint.top_k}, or null"
            )
    return findings


@functools.cache
def _model_hash(folder: Path) -> str:
    from harness.calibration.fingerprint import model_fingerprint

    return model_fingerprint(folder)


@functools.cache
def _matrix_hash(kind: str, path: str, checkpoint: Checkpoint | None) -> str:
    """Hash of a matrix file, after the check that the engine makes, so that it cannot fail there."""
    if checkpoint is None or checkpoint.experts is None:
        return path
    from harness.calibration.similarity import load_protection, load_similarity

    load = {"similarity": load_similarity, "protection": load_protection}[kind]
    load(
        Path(path),
        layers=checkpoint.moe_layers,
        experts=checkpoint.experts,
        model_hash=_model_hash(checkpoint.path),
    )
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
