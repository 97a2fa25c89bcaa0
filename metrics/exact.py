"""Exact match: 1 if the whole answer is an accepted one, else 0. Higher is better.

Outer white space does not count; all else does. Stricter than OCRBench's rule (`metrics.ocrbench`),
which takes an answer that contains the reference, so that saying more never hurts there.
"""

from __future__ import annotations

from collections.abc import Iterable


def exact(answer: str, references: Iterable[str]) -> float:
    """1.0 if `answer` equals one of `references`, white space at both ends aside."""
    return float(answer.strip() in {ref.strip() for ref in references})
