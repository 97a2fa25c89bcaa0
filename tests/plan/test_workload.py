"""Two data sets in one pool: images behind a request's own, and nothing else of it changed."""

from __future__ import annotations

import pytest

from harness.datasets.sample import Image, Message, Sample, Text
from harness.workload import mixed


def picture(name: str) -> Image:
    return Image(name.encode(), "image/png", name)


def sample(*messages: Message) -> Sample:
    return Sample("s", messages, ("yes",), "exact")


def test_images_follow_the_last_of_the_requests_own() -> None:
    first = Message("user", (picture("a"), Text("and"), picture("b"), Text("what?")))
    asked = sample(Message("system", (Text("be brief"),)), first, Message("user", (Text("now"),)))
    others = [picture(n) for n in "xyz"]
    one, two = mixed([asked, asked], others, 2)
    assert [i.name for i in one.images] == ["a", "b", "x", "y"]
    assert [i.name for i in two.images] == ["a", "b", "z", "x"]
    assert one.messages[1].parts[-1] == Text("what?")
    assert one.messages[0] == asked.messages[0] and one.messages[2] == asked.messages[2]
    assert one.references == asked.references


def test_what_cannot_be_mixed_is_said() -> None:
    text_only = sample(Message("user", (Text("what?"),)))
    with pytest.raises(ValueError, match="sample s has no images of its own"):
        mixed([text_only], [picture("x")], 1)
    with pytest.raises(ValueError, match="the second data set has no images"):
        mixed([sample(Message("user", (picture("a"),)))], [], 1)
