"""Drawing of samples: shares, order, reproducibility."""

from __future__ import annotations

from collections import Counter

from harness.datasets.draw import distinct, stratified

ITEMS = [f"{kind}{i}" for kind, size in (("A", 50), ("B", 30), ("C", 20)) for i in range(size)]


def draw(samples: int, seed: int) -> tuple[str, ...]:
    return stratified(ITEMS, samples, seed, name=str, stratum=lambda item: item[0])


def test_drawing_is_stratified_reproducible_and_exact() -> None:
    drawn = draw(10, 1)
    assert Counter(item[0] for item in drawn) == {"A": 5, "B": 3, "C": 2}
    assert drawn == draw(10, 1)
    assert drawn != draw(10, 2)
    assert len({item[0] for item in drawn[:5]}) > 1  # strata are mixed, not in blocks
    for samples in range(len(ITEMS) + 1):
        drawn = draw(samples, 3)
        assert len(drawn) == len(set(drawn)) == samples


def test_the_draw_is_the_same_everywhere() -> None:
    # Published runs name their items by seed: the order must never change.
    assert draw(4, 7) == ("C18", "B21", "A32", "A27")


def test_repeated_names_are_told_apart() -> None:
    seen: Counter[str] = Counter()
    assert [distinct(name, seen) for name in "abaa"] == ["a", "b", "a#2", "a#3"]
