"""Odd and broken images: each is answered as what it shows, or refused; the server lives on."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from tests.engine.requests_under_test import Answer, Endpoint, Refused, ask, picture

pytestmark = pytest.mark.engine

TOKENS = 6
UPRIGHT = picture(5, 224, 128)


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def asking(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What does it say?"}]}]


def answer(server: Endpoint, *urls: str, ratio: float = 0.5, tokens: int = TOKENS) -> Answer:
    return ask(server, asking(*urls), tokens, retain_ratio=ratio)


def sixteen_bits(image: Image.Image) -> bytes:
    grey = image.convert("L")
    return saved(grey.convert("I").point(lambda v: v * 257).convert("I;16"))


def turned(image: Image.Image) -> bytes:
    """Stored lying on its side, with an EXIF note to turn it up again."""
    exif = Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = 6
    return saved(image.transpose(Image.Transpose.ROTATE_90), exif=exif)


def animated(image: Image.Image) -> bytes:
    frames = [Image.new("RGB", image.size, c) for c in ("red", "blue")]
    return saved(
        image.quantize(256, dither=Image.Dither.NONE), "GIF", save_all=True, append_images=frames
    )


def palette(image: Image.Image) -> Image.Image:
    return image.quantize(256, dither=Image.Dither.NONE)


@pytest.mark.parametrize(
    ("stored", "shows"),
    [
        (turned(UPRIGHT), UPRIGHT),
        (saved(palette(UPRIGHT)), palette(UPRIGHT).convert("RGB")),
        (animated(UPRIGHT), palette(UPRIGHT).convert("RGB")),
        (sixteen_bits(UPRIGHT), UPRIGHT.convert("L").convert("RGB")),
        (saved(UPRIGHT.convert("L")), UPRIGHT.convert("L").convert("RGB")),
        (saved(UPRIGHT.convert("1")), UPRIGHT.convert("1").convert("RGB")),
        (saved(UPRIGHT.convert("RGBA")), UPRIGHT),
        (saved(UPRIGHT.convert("LA")), UPRIGHT.convert("L").convert("RGB")),
    ],
    ids=["exif", "palette", "animated", "16-bit", "grey", "1-bit", "alpha", "grey-alpha"],
)
def test_however_it_is_stored_the_answer_is_that_to_what_it_shows(
    plugin_server: Endpoint, stored: bytes, shows: Image.Image
) -> None:
    got = answer(plugin_server, url(stored))
    want = answer(plugin_server, url(saved(shows)))
    assert got.prompt_tokens == want.prompt_tokens
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)


def test_cmyk_is_answered_as_its_colours(plugin_server: Endpoint) -> None:
    stored = saved(UPRIGHT.convert("CMYK"), "JPEG", quality=95)
    shows = saved(Image.open(io.BytesIO(stored)).convert("RGB"))
    got, want = answer(plugin_server, url(stored, "image/jpeg")), answer(plugin_server, url(shows))
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (3000, 20), (20, 3000), (5000, 5000)], ids=str)
@pytest.mark.parametrize("policy", ["visionzip", "downscale"])
def test_sizes_at_the_edge_are_answered(
    plugin_server: Endpoint, size: tuple[int, int], policy: str
) -> None:
    data = url(saved(Image.new("RGB", size, (200, 30, 30))))
    got = ask(plugin_server, asking(data), 2, retain_ratio=0.5, policy=policy)
    assert len(got.ids) == 2


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("urls", "reason"),
    [
        ([url(saved(Image.new("RGB", (10_000, 20))))], "aspect ratio"),
        ([url(cut(saved(UPRIGHT)))], "image"),
        ([url(cut(saved(UPRIGHT, "JPEG")), "image/jpeg")], "image"),
        ([url(b"no picture at all")], "image"),
        ([url(b"")], "image"),
        (["data:image/png;base64,@@@"], ""),
        ([url(saved(UPRIGHT))] * 13, "12"),
    ],
    ids=["too-long", "cut-png", "cut-jpeg", "text", "empty", "no-base64", "too-many"],
)
@pytest.mark.parametrize("policy", ["visionzip", "downscale"])
def test_what_cannot_be_answered_is_refused_with_a_reason(
    plugin_server: Endpoint, urls: list[str], reason: str, policy: str
) -> None:
    before = answer(plugin_server, url(saved(UPRIGHT)))
    with pytest.raises(Refused, match=f"(?i){reason}") as refused:
        ask(plugin_server, asking(*urls), 2, retain_ratio=0.5, policy=policy)
    assert refused.value.status == 400
    after = answer(plugin_server, url(saved(UPRIGHT)))
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


def test_a_request_without_images_may_name_the_lever(plugin_server: Endpoint) -> None:
    messages = [{"role": "user", "content": "hello"}]
    got = ask(plugin_server, messages, TOKENS, retain_ratio=0.2, policy="grid")
    assert got.ids == ask(plugin_server, messages, TOKENS).ids


def test_a_prompt_that_is_too_long_gets_vllms_own_error(plugin_server: Endpoint) -> None:
    """Counted as it is after pruning: what pruning makes fit is answered."""
    long = "word " * 60_000
    messages = asking(url(saved(UPRIGHT)))
    messages[0]["content"].append({"type": "text", "text": long})
    with pytest.raises(Refused, match=r"(?i)context length|max_model_len|maximum") as refused:
        ask(plugin_server, messages, 2, retain_ratio=0.5)
    assert refused.value.status == 400
    assert len(answer(plugin_server, url(saved(UPRIGHT)), tokens=2).ids) == 2
