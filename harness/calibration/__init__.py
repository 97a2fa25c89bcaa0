"""Similarity and protection matrices, from samples to a small file."""

from pathlib import Path

MEASURES = ("frobenius", "cosine", "cka")
"""Names of the similarities, see `harness.calibration.measures`; the first is the default."""

SIMILARITY_FILE = "pruneroute/sere_similarity.safetensors"
"""Where a checkpoint's similarity matrices lie, from its folder. Not beside the weights: where there is
no index, vLLM takes every safetensors file there for weights."""

PROTECTION_FILE = "pruneroute/sere_protection.safetensors"
"""Where the marks of its protected experts lie, from its folder."""


def similarity_file(measure: str) -> str:
    """Where the matrices of one measure lie, from the checkpoint's folder.

    Raises:
        ValueError: there is no such measure.
    """
    if measure not in MEASURES:
        raise ValueError(f"measure {measure!r}: takes one of {', '.join(MEASURES)}")
    if measure == MEASURES[0]:
        return SIMILARITY_FILE
    return SIMILARITY_FILE.replace(".safetensors", f"_{measure}.safetensors")


def partial_file(out: Path) -> Path:
    """Where what has been summed up lies until `out` can be written: beside it."""
    return out.with_name(f"{out.name.removesuffix('.safetensors')}.partial.safetensors")
