"""Which option an answer names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics.choice import choice, correct

OPTIONS = {"A": "天坛", "B": "故宫", "C": "长城", "D": "A very tall palace"}

LETTERS = [
    "B",
    "B.",
    "b",
    "(b)",
    "B）",
    "（B）",
    "Ｂ",
    "[B]",
    '"B"',
    "**B**",
    "B\n",
    "B。",
    "选项B",
    "Option B",
]
TEXTS = ["故宫", "故宫。", "“故宫”", " 故宫\n", "答案是故宫。", "Answer: 故宫"]
CHINESE = [
    *("答案是B。", "答案：B", "答案:B", "答案为 B", "答案选B", "正确答案是：B", "正确选项是B"),
    *("选B", "应选B。", "选择B", "本题选择B项", "我认为答案应该是（b）。"),
]
ENGLISH = [
    *("The answer is B because A is wrong", "Answer: (b)", "ANSWER: B", "The answer is: **B**"),
    *("It is (B).", "I choose option B", "The correct option is B.", "Not (A): the answer is B"),
    *(r"\boxed{B}", r"\boxed{\text{B}}", "the answer should be B"),
]
LINES = [
    *("B. 故宫", "B、故宫", "B: 故宫", "B 故宫", "**B.** 故宫", "b) 故宫", "(B) for the roof"),
    *("B. because of the roof", "A. 天坛\nB. 故宫\n答案是B"),
]
NONE = [
    *("", " ", "E", "答案是E", "I think so", "Bismarck", "answer", "B cell", "故宫 天坛"),
    *("这是故宫，不是天坛", "不选B", "不能选B", "答案不是B", "选项B是错的"),
    *("A very short palace", "The answer is A palace", "the answer is a palace"),
    *("B. 天坛", "(A) or (B)", "A B", "A,B", "A、B", "AB", "A和B", "A or B"),
    *("A. 天坛\nB. 故宫\nC. 长城", "选A？不，答案是B"),
]


@pytest.mark.parametrize("answer", LETTERS + TEXTS + CHINESE + ENGLISH + LINES)
def test_read_as_b(answer: str) -> None:
    assert choice(answer, OPTIONS) == "B"


@pytest.mark.parametrize("answer", NONE)
def test_never_a_guess(answer: str) -> None:
    assert choice(answer, OPTIONS) is None


def test_an_option_that_begins_with_an_article() -> None:
    assert choice("A very tall palace.", OPTIONS) == "D"
    assert choice("The answer is a very  tall palace", OPTIONS) == "D"
    assert choice("The answer is A because it is tall", OPTIONS) == "A"
    assert choice("The answer is A.", OPTIONS) == "A"


def test_letters_go_before_texts_and_equal_texts_name_nothing() -> None:
    assert choice("B", {"A": "B", "B": "A"}) == "B"
    assert choice("same", {"A": "same", "B": "Same"}) is None
    assert choice("3.5", {"A": "3", "B": "3.5"}) == "B"


def test_correct_is_one_or_zero() -> None:
    assert correct("选B", OPTIONS, "B") == 1.0
    assert correct("选A", OPTIONS, "B") == 0.0
    assert correct("no idea", OPTIONS, "B") == 0.0


@given(st.text(alphabet="ABCDEabc答案是选不(). ,:、\n故宫天坛*\\boxed{}", max_size=40))
def test_any_text_gives_an_option_or_none(answer: str) -> None:
    assert choice(answer, OPTIONS) in (None, *OPTIONS)


@given(st.text(max_size=200))
def test_no_text_breaks_it(answer: str) -> None:
    assert choice(answer, OPTIONS) in (None, *OPTIONS)


def test_long_texts_are_read_in_no_time() -> None:
    for piece in ("(", "答案是", "A,", "B ", "\\boxed{", "*", "The answer is "):
        choice(piece * 50_000, OPTIONS)
