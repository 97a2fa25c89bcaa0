"""Scores of records: by the sample's scorer, and zero for what failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.datasets.sample import Image, Message, Sample, Text
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


CHOICE = replace(
    SAMPLE,
    references=("B",),
    scorer="ccbench",
    metadata={"options": {"A": "apple", "B": "pear"}, "answer": "B"},
)


def test_a_choice_is_right_or_wrong() -> None:
    assert scores(CHOICE, text="选B") == {"ccbench": 1.0}
    assert scores(CHOICE, text="Pear.") == {"ccbench": 1.0}
    assert scores(CHOICE, text="A or B") == {"ccbench": 0.0}
    assert scores(CHOICE, error="HTTP 500") == {"ccbench": 0.0}


SHOWING = replace(
    SAMPLE,
    messages=(Message("user", (Image(b"", "image/png", "x"),) * 3),),
    references=("turn the key ![key](IMG#1) push ![door](IMG#3)",),
    scorer="rag_igbench",
)


def test_an_answer_that_shows_pictures() -> None:
    (gold,) = SHOWING.references
    perfect = {"rouge1": 1.0, "image_edit": 1.0, "citation_format": 1.0, "kendall": 1.0}
    assert scores(SHOWING, text=gold) == perfect
    other_alt = gold.replace("[key]", "[a long thin thing]") + "<sup>[1](DOC#1)</sup>"
    assert scores(SHOWING, text=other_alt) == perfect
    turned = "turn the key ![door](IMG#3) push ![key](IMG#1)"
    assert scores(SHOWING, text=turned) == perfect | {"image_edit": 0.0, "kendall": 0.0}
    one = "turn the key push ![door](IMG#3)"
    assert scores(SHOWING, text=one) == {"rouge1": 1.0, "image_edit": 0.5, "citation_format": 1.0}
    assert scores(SHOWING, text=gold.replace("#3", "#4"))["citation_format"] == 0
    assert scores(SHOWING, error="HTTP 500") == dict.fromkeys(perfect, 0.0)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="'s-1' scored against 'other'"):
        score(RECORD, replace(SAMPLE, id="other"))
    with pytest.raises(ValueError, match="scorer 'taste'; known: ocrbench"):
        score(RECORD, replace(SAMPLE, scorer="taste"))
    assert "ocrbench" in SCORERS
