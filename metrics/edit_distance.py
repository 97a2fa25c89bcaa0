"""Edit similarity of two texts: 1 − Levenshtein distance / length of the longer. Higher is better.

Range 0..1: 1 is equal, 0 shares nothing. Insertions, deletions and substitutions cost 1 each, per
Unicode code point; case and inner spaces count, outer white space does not.

Source: Levenshtein, 1966, divided by the longer length as in the ANLS of DocVQA (Biten et al.,
2019), but without ANLS's threshold.
"""

from __future__ import annotations

from rapidfuzz.distance import Levenshtein


def edit_similarity(answer: str, reference: str) -> float:
    """Normalised similarity, outer white space aside; two empty texts are equal (1.0)."""
    return Levenshtein.normalized_similarity(answer.strip(), reference.strip())
