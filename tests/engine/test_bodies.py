"""Request bodies: what is in them, and that images travel untouched."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from harness.datasets.sample import Image, Message, Sample, Text
from harness.engine.bodies import encode

PICTURE = bytes(range(256))
SAMPLE = Sample(
    id="s",
    messages=(
        Message("system", (Text("Read."),)),
        Message(
            "user",
            (
                Text("first 字"),
                Image(PICTURE, "image/png", "a.png"),
                Text("second"),
                Image(b"\xff\xd8", "image/jpeg", "b.jpg"),
            ),
        ),
    ),
    references=("x",),
    scorer="ocrbench",
)


def body(**more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"model": "m", "max_tokens": 16, "temperature": 0.0} | more
    tree: dict[str, Any] = json.loads(encode(SAMPLE, **settings))
    return tree


def test_the_conversation_keeps_its_order() -> None:
    system, user = body()["messages"]
    assert system == {"role": "system", "content": "Read."}
    assert [p["type"] for p in user["content"]] == ["text", "image_url", "text", "image_url"]
    assert user["content"][0]["text"] == "first 字"


def test_images_travel_byte_for_byte() -> None:
    parts = body()["messages"][1]["content"]
    head, data = parts[1]["image_url"]["url"].split(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data, validate=True) == PICTURE
    assert parts[3]["image_url"]["url"].startswith("data:image/jpeg;base64,")


def test_it_streams_with_counts() -> None:
    tree = body()
    assert tree["stream"] is True
    assert tree["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (tree["model"], tree["max_tokens"], tree["temperature"]) == ("m", 16, 0.0)


def test_extensions_are_left_out_unless_asked_for() -> None:
    assert not {"ignore_eos", "seed", "mm_processor_kwargs"} & set(body())
    tree = body(ignore_eos=True, seed=0, mm_processor_kwargs={"retain_ratio": 0.5})
    assert tree["ignore_eos"] is True
    assert tree["seed"] == 0
    assert tree["mm_processor_kwargs"] == {"retain_ratio": 0.5}


def test_equal_questions_give_equal_bytes() -> None:
    settings: dict[str, Any] = {"model": "m", "max_tokens": 1, "temperature": 0.0}
    assert encode(SAMPLE, **settings) == encode(SAMPLE, **settings)


def test_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError):
        body(temperature=float("nan"))
