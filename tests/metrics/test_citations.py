"""Image citations: what is read, what is left, what is well formed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics.citation_format import citation_format
from metrics.citations import image_ids, without_citations, without_images
from metrics.edit_distance import sequence_similarity

ANYTHING = st.text(alphabet="![]()IMG#012 \n字<sup>DOC/", max_size=60)


def test_ids_come_in_order_with_repeats() -> None:
    answer = "see ![the door](IMG#3), then ![](IMG#12)\n![门 [1]](IMG#3)"
    assert image_ids(answer) == [3, 12, 3]
    assert without_images(answer) == "see , then \n"
    assert image_ids("![x](IMG#01)") == [1]


@pytest.mark.parametrize(
    "tag",
    [
        *(
            "![x](img#1)",
            "![x](IMG# 1)",
            "![x] (IMG#1)",
            "[x](IMG#1)",
            "![x\ny](IMG#1)",
            "![x](IMG#)",
        ),
        *(
            "![x](IMG#１)",
            "![x](IMG#1234567890)",
            "![x](IMG#-1)",
            "(IMG#1)",
            "![x](IMG#1",
            "![x(IMG#1)",
        ),
    ],
)
def test_what_is_no_tag_looks_broken(tag: str) -> None:
    assert image_ids(tag) == []
    assert citation_format(f"![a](IMG#1) {tag}", 3) == 0


def test_a_picture_link_before_a_tag_is_not_swallowed() -> None:
    answer = "![a](http://x/y.png) text ![b](IMG#2)"
    assert image_ids(answer) == [2]
    assert without_images(answer) == "![a](http://x/y.png) text "
    assert citation_format(answer, 2) == 0


def test_documents_leave_the_text_too() -> None:
    answer = "a<sup>[1](DOC#1)</sup> b![c](IMG#1)<sup>[2](DOC#2)</sup>"
    assert without_citations(answer) == "a b"
    assert citation_format(answer, 1) == 1


@pytest.mark.parametrize(
    ("answer", "images", "valid"),
    [
        ("![a](IMG#1) ![b](IMG#3)", 3, 1),
        ("![b](IMG#3)![a](IMG#1)", 3, 1),
        ("see [this](http://x) ![a](IMG#1)", 1, 1),
        ("![a](IMG#4)", 3, 0),
        ("![a](IMG#0)", 3, 0),
        ("![a](IMG#01)", 3, 0),
        ("![a](IMG#1) ![b](IMG#1)", 3, 0),
        ("![a](IMG#1) and IMG#2", 3, 0),
        ("![a](IMG#1) [b](2)", 3, 0),
        ("no picture", 3, 0),
        ("", 3, 0),
        ("![a](IMG#1)", 0, 0),
    ],
)
def test_format(answer: str, images: int, valid: int) -> None:
    assert citation_format(answer, images) == valid


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        # The check table of the published evaluator, column "ED".
        ([1, 2, 3], [1, 2, 3], 1),
        ([3, 2, 1], [1, 2, 3], 1 / 3),
        ([1, 3, 2], [1, 2, 3], 1 / 3),
        ([1, 2, 9], [1, 2, 3], 2 / 3),
        ([1, 3], [1, 2, 3], 2 / 3),
        ([1, 2], [1], 1 / 2),
        ([1, 2, 3], [1], 1 / 3),
        ([5, 6], [1, 2], 0),
        ([], [1], 0),
        ([12, 10], [1, 2, 10], 1 / 3),  # ids are items, not digits
        ([], [], 1),
    ],
)
def test_image_edit(answer: list[int], gold: list[int], expected: float) -> None:
    assert sequence_similarity(answer, gold) == pytest.approx(expected)


@given(ANYTHING)
def test_any_text(answer: str) -> None:
    assert citation_format(answer, 3) in (0, 1)
    if citation_format(answer, 3):
        assert len(set(image_ids(answer))) == len(image_ids(answer)) > 0
    assert len(without_citations(answer)) <= len(answer)


def test_long_texts_are_read_in_no_time() -> None:
    for piece in ("![", "![a](", "![]", "<sup>[", "<sup>[1](", "(", "! ", "]("):
        assert citation_format(piece * 50_000, 3) == 0
        without_citations(piece * 50_000)
