"""Which metrics judge a sample's answer: scorer name → function, and a record with its scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from harness.datasets.sample import Sample
from harness.load.record import RequestRecord
from metrics.choice import correct
from metrics.citation_format import citation_format
from metrics.citations import image_ids, without_citations
from metrics.edit_distance import edit_similarity, sequence_similarity
from metrics.kendall import kendall
from metrics.ocrbench import is_formula, ocrbench
from metrics.rouge1 import rouge1
from metrics.text import words

Scorer = Callable[[Sample, str], Mapping[str, float]]


def score_ocrbench(sample: Sample, answer: str) -> Mapping[str, float]:
    """OCRBench's point, and three graded views of the same answer, each by its best reference.

    Returns:
        ``ocrbench`` (0 or 1), ``rouge1``, ``edit_similarity`` (both 0..1), and ``kendall`` (0..1)
        of the order of words, unless fewer than two words are shared with every reference.
    """
    formula = is_formula(sample.metadata.get("dataset_name"), sample.category)
    said = words(answer)
    order = [k for ref in sample.references if (k := kendall(said, words(ref))) is not None]
    scores = {
        "ocrbench": ocrbench(answer, sample.references, formula=formula),
        "rouge1": max(rouge1(answer, ref) for ref in sample.references),
        "edit_similarity": max(edit_similarity(answer, ref) for ref in sample.references),
    }
    return scores | {"kendall": max(order)} if order else scores


def score_ccbench(sample: Sample, answer: str) -> Mapping[str, float]:
    """CCBench's point for one row: ``ccbench``, 1 if the answer names the right option, else 0."""
    options = sample.metadata["options"]
    return {"ccbench": max(correct(answer, options, ref) for ref in sample.references)}


def score_rag_igbench(sample: Sample, answer: str) -> Mapping[str, float]:
    """Text, choice and order of images, and form of a RAG-IGBench answer, each by its best reference.

    Returns:
        ``rouge1`` of the text without citations, ``image_edit`` of the sequences of image ids (both
        0..1), ``citation_format`` (0 or 1), and ``kendall`` (0..1) of the order of images, unless
        fewer than two are shared with every reference.
    """
    said, ids = without_citations(answer), image_ids(answer)
    golds = [image_ids(ref) for ref in sample.references]
    order = [k for gold in golds if (k := kendall(ids, gold)) is not None]
    scores = {
        "rouge1": max(rouge1(said, without_citations(ref)) for ref in sample.references),
        "image_edit": max(sequence_similarity(ids, gold) for gold in golds),
        "citation_format": citation_format(answer, len(sample.images)),
    }
    return scores | {"kendall": max(order)} if order else scores


SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {
        "ocrbench": score_ocrbench,
        "ccbench": score_ccbench,
        "rag_igbench": score_rag_igbench,
    }
)


def score(record: RequestRecord, sample: Sample) -> RequestRecord:
    """The record with the scores of its answer.

    A request that failed scores 0 in every metric that a perfect answer to its sample would have.

    Raises:
        ValueError: the record answers another sample, or the sample names a scorer that is not
            here.
    """
    if record.sample_id != sample.id:
        raise ValueError(f"record of sample {record.sample_id!r} scored against {sample.id!r}")
    if sample.scorer not in SCORERS:
        raise ValueError(
            f"sample {sample.id!r}: scorer {sample.scorer!r}; known: {', '.join(SCORERS)}"
        )
    scorer = SCORERS[sample.scorer]
    if record.good:
        scores = scorer(sample, record.text)
    else:
        perfect = max(sample.references, key=lambda ref: len(set(words(ref))))
        scores = dict.fromkeys(scorer(sample, perfect), 0.0)
    return dataclasses.replace(record, scores=MappingProxyType(dict(scores)))
