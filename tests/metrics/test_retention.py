"""What images keep: means over images and over tokens, and how sure they are."""

from __future__ import annotations

import pytest

from metrics.retention import Request, by_image, by_token

REQUESTS: list[Request] = [[(100, 50), (10, 10)], [(40, 10)], [], [(200, 100)]]


def test_a_large_image_counts_once_or_by_its_tokens() -> None:
    assert by_image(REQUESTS).value == pytest.approx((0.5 + 1 + 0.25 + 0.5) / 4)
    assert by_token(REQUESTS).value == pytest.approx(170 / 350)


def test_the_interval_is_of_requests_not_of_images() -> None:
    """A hundred images of one request are still one request."""
    alike: list[Request] = [[(10, 5)], [(10, 6)], [(10, 4)], [(10, 5)], [(10, 7)], [(10, 3)]]
    repeated = [[*r] * 100 for r in alike]
    once, often = by_image(alike), by_image(repeated)
    assert (once.value, once.low, once.high) == pytest.approx((often.value, often.low, often.high))
    assert once.low < once.value < once.high


@pytest.mark.parametrize("requests", [[], [[]], [[(0, 0)]]])
def test_nothing_to_measure_is_said(requests: list[Request]) -> None:
    for measure in (by_image, by_token):
        with pytest.raises(ValueError, match="retention needs images"):
            measure(requests)
