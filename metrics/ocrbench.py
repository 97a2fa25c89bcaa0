"""OCRBench's rule: 1 if an accepted answer is contained in the model's, else 0. Higher is better.

Both sides are lower-cased and stripped, and newlines become spaces; inner spaces are left as they
are. Handwritten formulas (HME100k) are the exception: all spaces go, and case counts. No LaTeX is
normalised. Each question is a point; the benchmark's score is the sum over its 1,000.

Source: Liu et al., "OCRBench: on the hidden mystery of OCR in large multimodal models", 2023, and
its published evaluation script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

FORMULA_DATASET = "HME100k"
FORMULA_CATEGORY = "Handwritten Mathematical Expression Recognition"


def ocrbench(answer: str, references: Iterable[str], *, formula: bool = False) -> float:
    """1.0 if any accepted reference is contained in `answer`, else 0.0.

    Args:
        answer: what the model said.
        references: accepted answers; one that is empty after stripping, which any answer would
            contain, is passed over.
        formula: whether the question is one of HME100k's (see `is_formula`).
    """
    form: Callable[[str], str] = _formula_form if formula else _text_form
    said = form(answer)
    return float(any(ref in said for ref in map(form, references) if ref))


def is_formula(dataset_name: str | None, category: str = "") -> bool:
    """Whether the formula rule applies.

    By the source data set's name, as the published script has it; by category where no name is
    known.
    """
    if dataset_name:
        return dataset_name == FORMULA_DATASET
    return category == FORMULA_CATEGORY


def _text_form(text: str) -> str:
    return text.lower().strip().replace("\n", " ")


def _formula_form(text: str) -> str:
    return text.strip().replace("\n", " ").replace(" ", "")
