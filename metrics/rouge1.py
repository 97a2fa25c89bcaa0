"""ROUGE-1 F1: overlap of words between answer and reference. Range 0..1, higher is better.

With clipped counts of equal words: precision = overlap / words of the answer, recall = overlap /
words of the reference, F1 their harmonic mean. Words are those of `metrics.text.words`, which also
splits Chinese and Japanese; no stemming, no stop words.

Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004. RAG-IGBench publishes
another variant (sets of jieba words without stop words); the two do not compare.
"""

from __future__ import annotations

from collections import Counter

from metrics.text import words


def rouge1(answer: str, reference: str) -> float:
    """F1 of word overlap; 1.0 if neither has a word, 0.0 if only one of them has none."""
    said, meant = Counter(words(answer)), Counter(words(reference))
    total = said.total() + meant.total()
    # 2PR / (P + R) with P = o / said and R = o / meant is 2o / (said + meant).
    return 2 * (said & meant).total() / total if total else 1.0
