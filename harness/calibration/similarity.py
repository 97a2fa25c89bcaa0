"""The small files that carry a layer's expert similarity and protection marks to the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.calibration.files import write_tensors

FORMAT_VERSION = "1"
SIMILARITY_KEY = "similarity"
PROTECTION_KEY = "protection"
INCREASES_KEY = "loss_increase"

CALIBRATE = "`python -m harness.calibrate similarity model=… data=…`"
PROTECT = "`python -m harness.calibrate protection model=… data=… similarity=…`"


class CalibrationError(ValueError):
    """A calibration cannot be made, or its file not be used; the message names the cause and the cure."""


@dataclass(frozen=True)
class Provenance:
    """What a calibration was made from.

    Attributes:
        measure: how it was made: one of `harness.calibration.MEASURES`, or what chose the marks.
        model_sha256: `harness.calibration.fingerprint.model_fingerprint` of the checkpoint.
        data_sha256: hash of the data that was run through it.
        layer_indices: the model's layer number of each row of the tensor, ascending.
    """

    measure: str
    model_sha256: str
    data_sha256: str
    layer_indices: tuple[int, ...]


def save_similarity(path: Path, similarity: Tensor, provenance: Provenance) -> None:
    """Write `similarity` (float32 [layers, E, E]) and its provenance as one safetensors file.

    Raises:
        ValueError: a shape does not fit.
    """
    if similarity.ndim != 3 or similarity.shape[1] != similarity.shape[2]:
        raise ValueError(f"similarity: expected [layers, E, E], got {list(similarity.shape)}")
    _write(path, {SIMILARITY_KEY: similarity.float()}, provenance)


def load_similarity(
    path: Path,
    *,
    layers: int,
    experts: int,
    model_hash: str | None = None,
    layer_indices: Sequence[int] | None = None,
) -> Tensor:
    """Read and check similarity matrices.

    Args:
        path: what `save_similarity` wrote.
        layers: mixture-of-experts layers of the model at hand.
        experts: experts of a layer.
        model_hash: the checkpoint's fingerprint; None to accept a calibration of any model.
        layer_indices: the model's numbers of those layers; None to accept any.

    Returns:
        float32 [layers, experts, experts] in [0, 1], on the CPU.

    Raises:
        CalibrationError: missing or unreadable file, other shape, other model, a layer too few or
            another one, NaN, values outside [0, 1], or a layer that is the identity (which says that
            no expert resembles any other: what an uncalibrated buffer holds, and under which
            re-routing silently does nothing).
    """
    sim, metadata = _read(path, SIMILARITY_KEY, CALIBRATE)
    cure = f"calibrate this model again: {CALIBRATE}"
    _check_shape(path, sim, (layers, experts, experts), cure)
    _check_model(path, metadata, model_hash, cure)
    if not torch.is_floating_point(sim):
        raise CalibrationError(f"{path}: similarity is {sim.dtype}, not floating point; {cure}")
    sim = sim.float()
    for layer, matrix in enumerate(sim):
        if matrix.isnan().any():
            raise CalibrationError(
                f"{path}: layer {layer} holds NaN (the model overflowed?); calibrate again in a "
                "wider type: dtype=float32"
            )
        low, high = float(matrix.min()), float(matrix.max())
        if low < 0 or high > 1:
            raise CalibrationError(
                f"{path}: layer {layer} has values in [{low:g}, {high:g}], outside [0, 1]; map the "
                "measure to [0, 1], 1 meaning alike"
            )
        if experts > 1 and torch.equal(matrix, torch.eye(experts)):
            raise CalibrationError(
                f"{path}: layer {layer} is the identity matrix, so nothing was calibrated and "
                f"nothing would ever be re-routed; {cure}"
            )
    _check_layers(path, metadata, layers, layer_indices, cure)
    return sim


def save_protection(
    path: Path, protection: Tensor, provenance: Provenance, increases: Tensor | None = None
) -> None:
    """Write `protection` (uint8 [layers, E]; 1 marks an expert never re-routed away from).

    Args:
        path: over what is there.
        protection: only 0 and 1.
        provenance: what it was made from.
        increases: float64 [layers, E], what moving away from each expert costs; stored beside the marks
            under `INCREASES_KEY`, so that another number of experts can be marked without measuring
            again (`harness.calibration.protection.mark_costliest`).

    Raises:
        ValueError: a shape or a value does not fit.
    """
    if protection.ndim != 2:
        raise ValueError(f"protection: expected [layers, E], got {list(protection.shape)}")
    if not ((protection == 0) | (protection == 1)).all():
        raise ValueError("protection: expected only 0 and 1")
    if increases is not None and increases.shape != protection.shape:
        raise ValueError(f"increases: {list(increases.shape)} for {list(protection.shape)} experts")
    further = {} if increases is None else {INCREASES_KEY: increases.double()}
    _write(path, {PROTECTION_KEY: protection.to(torch.uint8)} | further, provenance)


def load_protection(
    path: Path,
    *,
    layers: int,
    experts: int,
    model_hash: str | None = None,
    layer_indices: Sequence[int] | None = None,
) -> Tensor:
    """Read and check a protection matrix; arguments as for `load_similarity`.

    Returns:
        uint8 [layers, experts] of 0 and 1, on the CPU.

    Raises:
        CalibrationError: missing or unreadable file, other shape, model, layers, or other values.
    """
    protection, metadata = _read(path, PROTECTION_KEY, PROTECT)
    cure = f"write it for this model: {PROTECT}"
    _check_shape(path, protection, (layers, experts), cure)
    _check_model(path, metadata, model_hash, cure)
    if not ((protection == 0) | (protection == 1)).all():
        raise CalibrationError(f"{path}: protection has values other than 0 and 1; {cure}")
    _check_layers(path, metadata, layers, layer_indices, cure)
    return protection.to(torch.uint8)


def _check_shape(path: Path, tensor: Tensor, shape: tuple[int, ...], cure: str) -> None:
    found = tuple(tensor.shape)
    if found == shape:
        return
    lacks = found[1:] == shape[1:] and found[0] < shape[0]
    why = "layers are missing, or it belongs" if lacks else "it belongs"
    raise CalibrationError(
        f"{path}: shape {list(found)}, but this model needs {list(shape)}; {why} to another model: "
        f"{cure}"
    )


def _check_model(path: Path, metadata: dict[str, str], model_hash: str | None, cure: str) -> None:
    made_for = metadata.get("model_sha256", "")
    if model_hash is not None and made_for != model_hash:
        raise CalibrationError(
            f"{path}: made for model {made_for[:12] or '(not recorded)'}, but this one is "
            f"{model_hash[:12]}; {cure}"
        )


def _check_layers(
    path: Path,
    metadata: dict[str, str],
    layers: int,
    layer_indices: Sequence[int] | None,
    cure: str,
) -> None:
    """Whether the file says of each matrix which layer it is of, each layer once and in order."""
    said = metadata.get("layer_indices", "")
    try:
        theirs = json.loads(said)
        valid = all(type(n) is int for n in theirs) and theirs == sorted(set(theirs))
    except (ValueError, TypeError):
        valid = False
    if not valid or len(theirs) != layers:
        raise CalibrationError(
            f"{path}: names the layers {said or '(none)'} for its {layers} matrices; {cure}"
        )
    if layer_indices is not None and theirs != list(layer_indices):
        missing = sorted(set(layer_indices) - set(theirs))
        raise CalibrationError(
            f"{path}: is of layers {theirs}; layers {missing} of this model are missing; {cure}"
        )


def _write(path: Path, tensors: dict[str, Tensor], provenance: Provenance) -> None:
    layers = len(next(iter(tensors.values())))
    if len(provenance.layer_indices) != layers:
        raise ValueError(f"layer_indices: {len(provenance.layer_indices)} for {layers} layers")
    metadata = {
        "format_version": FORMAT_VERSION,
        "measure": provenance.measure,
        "model_sha256": provenance.model_sha256,
        "data_sha256": provenance.data_sha256,
        "layer_indices": json.dumps(list(provenance.layer_indices)),
    }
    write_tensors(path, tensors, metadata)


def _read(path: Path, key: str, cure: str) -> tuple[Tensor, dict[str, str]]:
    if not path.is_file():
        raise CalibrationError(f"{path}: no such file; make it with {cure}, or correct the path")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            keys: Sequence[str] = list(file.keys())
            tensor = file.get_tensor(key) if key in keys else None
    except SafetensorError as error:
        raise CalibrationError(
            f"{path}: not a safetensors file ({error}); write it again: {cure}"
        ) from error
    if tensor is None:
        if "partial_version" in metadata:
            raise CalibrationError(
                f"{path}: holds partial sums; start the command that began it again, and it goes on"
            )
        raise CalibrationError(f"{path}: holds {list(keys)}, not {key!r}; give the right file")
    version = metadata.get("format_version")
    if version != FORMAT_VERSION:
        raise CalibrationError(
            f"{path}: format version {version}, this release reads {FORMAT_VERSION}; write it "
            f"again: {cure}"
        )
    return tensor, metadata
