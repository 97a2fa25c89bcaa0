"""Edit similarity of two sequences: 1 − Levenshtein distance / longer length. Higher is better.

Range 0..1: 1 is equal, 0 shares nothing. Insertions, deletions and substitutions cost 1 each. For
texts the items are Unicode code points; case and inner spaces count, outer white space does not.

Source: Levenshtein, 1966, divided by the longer length as in the ANLS of DocVQA (Biten et al.,
2019), but without ANLS's threshold. Over the ids of cited images in order of appearance it is the
Edit Distance of RAG-IGBench (2025, equation 1), a similarity in spite of its name; where neither
side cites an image, the paper's quotient is undefined and this is 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rapidfuzz.distance import Levenshtein


def edit_similarity(answer: str, reference: str) -> float:
    """Normalised similarity, outer white space aside; two empty texts are equal (1.0)."""
    return Levenshtein.normalized_similarity(answer.strip(), reference.strip())


def sequence_similarity(answer: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """The same over the items of any two sequences of one type; two empty ones are equal (1.0)."""
    # As lists: rapidfuzz would take a text for its code points, and 97 for "a".
    return Levenshtein.normalized_similarity(list(answer), list(reference))
