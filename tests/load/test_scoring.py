"""Scores of records: by the sample's scorer, and zero for what failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.datasets.sample import Message, Sample, Text
from harness.load.record import RequestRecord
from harness.scoring import SCORERS, score

SAMPLE = Sample(
    id="s-1",
    messages=(Message("user", (Text("what is written in the image?"),)),),
    references=("alpha beta gamma", "alpha gamma"),
    scorer="ocrbench",
)
RECORD = RequestRecord(
    request_id="r",
    sample_id="s-1",
    scheduled_s=0.0,
    text="It reads: alpha gamma beta",
    finish_reason="stop",
    output_tokens=6,
)


def scores(sample: Sample = SAMPLE, **changes: Any) -> dict[str, float]:
    return dict(score(replace(RECORD, **changes), sample).scores)


def test_each_metric_takes_its_best_reference() -> None:
    got = scores()
    assert got["ocrbench"] == 1
    assert got["rouge1"] == pytest.approx(2 * 3 / (5 + 3))
    assert got["kendall"] == 1  # by the second reference
    assert 0 < got["edit_similarity"] < 1


def test_a_perfect_answer() -> None:
    assert set(scores(text="alpha beta gamma").values()) == {1.0}


def test_the_order_of_a_word_is_no_score() -> None:
    assert "kendall" not in scores(text="alpha")
    assert "kendall" not in scores(replace(SAMPLE, references=("alpha",)), text="alpha")


@pytest.mark.parametrize("changes", [{"error": "HTTP 500"}, {"finish_reason": None}])
def test_a_failure_scores_zero_in_all_that_could_be_scored(changes: dict[str, Any]) -> None:
    zero = dict.fromkeys(("ocrbench", "rouge1", "edit_similarity", "kendall"), 0.0)
    assert scores(**changes) == zero
    del zero["kendall"]
    assert scores(replace(SAMPLE, references=("one",)), **changes) == zero


def test_formulas_are_known_by_data_set_or_category() -> None:
    formula = replace(SAMPLE, references=("x ^ {2}",), metadata={"dataset_name": "HME100k"})
    assert scores(formula, text="x^{2}")["ocrbench"] == 1
    assert scores(replace(formula, metadata={}), text="x^{2}")["ocrbench"] == 0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="'s-1' scored against 'other'"):
        score(RECORD, replace(SAMPLE, id="other"))
    with pytest.raises(ValueError, match="scorer 'taste'; known: ocrbench"):
        score(RECORD, replace(SAMPLE, scorer="taste"))
    assert "ocrbench" in SCORERS
