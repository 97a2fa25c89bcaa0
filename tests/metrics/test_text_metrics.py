"""Text metrics against values worked out by hand, and what must hold for any text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics.edit_distance import edit_similarity
from metrics.kendall import kendall
from metrics.ocrbench import is_formula, ocrbench
from metrics.rouge1 import rouge1
from metrics.text import words

TEXT = st.text(alphabet="abc A字文.か\n 1", max_size=20)


def test_words_of_many_scripts() -> None:
    assert words("The cat's 3.5 KM!") == ["the", "cat", "s", "3", "5", "km"]
    assert words("你好 world世界") == ["你", "好", "world", "世", "界"]
    assert words("カタ かな") == ["カ", "タ", "か", "な"]
    assert words("한국어 문장") == ["한국어", "문장"]
    assert words("ＡＢＣ１２３") == ["abc123"]
    assert words("snake_case —— …") == ["snake", "case"]


def test_ocrbench_contains_an_answer() -> None:
    assert ocrbench("It says CENTRE.", ["centre"]) == 1
    assert ocrbench("Centre", ["the centre"]) == 0
    assert ocrbench("no", ["yes", "NO"]) == 1
    assert ocrbench("", ["a"]) == 0
    assert ocrbench(" a\nb ", ["A b\n"]) == 1
    assert ocrbench("a  b", ["a b"]) == 0  # inner spaces stay as they are
    assert ocrbench("anything", ["", "  "]) == 0


def test_ocrbench_formulas_ignore_spaces_and_heed_case() -> None:
    assert ocrbench("$$ x ^ {2} $$", ["x^{2}"], formula=True) == 1
    assert ocrbench("X^{2}", ["x^{2}"], formula=True) == 0
    assert ocrbench("x^2", ["x^{2}"], formula=True) == 0
    assert ocrbench("a\nb", ["ab"], formula=True) == 1
    assert ocrbench("a b", ["ab"]) == 0


def test_what_is_a_formula() -> None:
    category = "Handwritten Mathematical Expression Recognition"
    assert is_formula("HME100k")
    assert is_formula(None, category)
    assert not is_formula("IIIT5K", category)
    assert not is_formula(None)


def test_rouge1_by_hand() -> None:
    # overlap 2 (the, cat), 3 words said, 6 meant: P 2/3, R 2/6, F1 4/9
    assert rouge1("the cat barks", "the cat sat on the mat") == pytest.approx(4 / 9)
    assert rouge1("the the the", "the cat") == pytest.approx(2 / 5)  # counts are clipped
    assert rouge1("你好吗", "你好") == pytest.approx(4 / 5)
    assert (rouge1("", "a"), rouge1("a", ""), rouge1("", "")) == (0.0, 0.0, 1.0)


def test_edit_similarity_by_hand() -> None:
    assert edit_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert edit_similarity(" abc\n", "abc") == 1
    assert edit_similarity("", "abc") == 0
    assert edit_similarity("", "") == 1
    assert edit_similarity("Abc", "abc") == pytest.approx(2 / 3)


def test_kendall_by_hand() -> None:
    assert kendall([1, 2, 3], [1, 2, 3]) == 1
    assert kendall([3, 2, 1], [1, 2, 3]) == 0
    assert kendall([1, 3, 2], [1, 2, 3]) == pytest.approx(2 / 3)
    assert kendall([1, 2, 9], [1, 2, 3]) == 1  # strangers do not matter
    assert kendall([1, 3], [1, 2, 3]) == 1
    assert kendall([2, 1, 2], [1, 2, 1]) == 0  # first occurrences only
    assert kendall([1, 1], [1]) is None
    assert kendall([], [1, 2]) is None


@given(st.permutations(range(8)))
def test_kendall_is_the_mapped_tau(order: list[int]) -> None:
    pairs = list(itertools.combinations(range(8), 2))
    tau = sum(1 if order[i] < order[j] else -1 for i, j in pairs) / len(pairs)
    assert kendall(order, range(8)) == pytest.approx((tau + 1) / 2)
    assert kendall(order[::-1], range(8)) == pytest.approx(1 - (tau + 1) / 2)


@given(TEXT, TEXT)
def test_ranges_symmetry_and_the_perfect_answer(a: str, b: str) -> None:
    for metric in (rouge1, edit_similarity):
        assert 0 <= metric(a, b) <= 1
        assert metric(a, b) == pytest.approx(metric(b, a))
        assert metric(a, a) == 1
    for formula in (False, True):
        assert ocrbench(b + a + b, [a], formula=formula) in (0, 1)
        if a.strip():
            assert ocrbench(a, [a], formula=formula) == 1
