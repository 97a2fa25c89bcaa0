"""Random multimodal conversations, and a plain client for the servers that answer them."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from PIL import Image, ImageDraw, ImageFont

from harness.engine.levers import own_request_id

# Portrait, landscape, square, sizes that the processor must round, and one that it must shrink.
SIZES = (
    (128, 128),
    (64, 320),
    (320, 64),
    (192, 96),
    (96, 256),
    (200, 150),
    (90, 410),
    (64, 64),
    (600, 500),
)
TEXTS = (
    "Picture one: ",
    "和图片 ",
    "read this\n",
    "x",
    "… and then? ",
    "and the next one is larger: ",
)
QUESTIONS = ("What does it say?", "Which of them has digits?", "倒着念。", "Sum up in a few words.")


@dataclass(frozen=True)
class Conversation:
    """Chat messages in OpenAI's format, and their images in order."""

    messages: list[dict[str, Any]]
    images: list[Image.Image]


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Words in several sizes on a plain ground."""
    r = Random(f"picture {seed}")
    image = Image.new("RGB", (width, height), tuple(r.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        at = (r.randrange(max(1, width - 30)), r.randrange(max(1, height - 20)))
        word = "".join(r.choice("abcdefgh0123456789") for _ in range(5))
        font = ImageFont.load_default(r.choice([12, 20, 32]))
        draw.text(at, word, fill=tuple(r.randrange(256) for _ in range(3)), font=font)
    return image


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def conversation(
    seed: int,
    *,
    images_per_turn: Sequence[int] = (1, 2, 3, 5),
    turns: Sequence[int] = (1, 1, 2, 3),
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> Conversation:
    """A conversation drawn from a seed: at most eight images, some with text before or between."""
    r = Random(f"conversation {seed}")
    messages: list[dict[str, Any]] = []
    images: list[Image.Image] = []
    if r.random() < 0.3:
        messages.append({"role": "system", "content": "You read pictures."})
    for turn in range(r.choice(turns)):
        parts: list[dict[str, Any]] = []
        for _ in range(min(r.choice(images_per_turn), 8 - len(images))):
            if r.random() < 0.5:
                parts.append({"type": "text", "text": r.choice(TEXTS) * r.randrange(1, 4)})
            images.append(picture(1000 * seed + len(images), *r.choice(sizes)))
            parts.append({"type": "image_url", "image_url": {"url": data_url(images[-1])}})
        if r.random() < 0.8 or not parts:
            question = r.choice(QUESTIONS)
            parts.insert(r.choice([0, len(parts)]), {"type": "text", "text": question})
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": f"Answer {turn}, {r.randrange(100)}."})
    return Conversation(messages[:-1], images)


def text_only(seed: int) -> Conversation:
    """A conversation without images."""
    return conversation(seed, images_per_turn=(0,))


class Endpoint(Protocol):
    """Where a server is, and the name of its model."""

    @property
    def url(self) -> str: ...
    @property
    def model(self) -> str: ...


@dataclass(frozen=True)
class Answer:
    """What a server said.

    Attributes:
        ids: token ids of the answer.
        logprobs: of each of them.
        gaps: by how much each token's log-probability lies above the runner-up's.
        prompt_tokens: length of the prompt as the server counts it.
        cached_tokens: those of them that came out of the prefix cache.
        finish_reason: why it ended.
    """

    ids: list[int]
    logprobs: list[float]
    gaps: list[float]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str


class Refused(Exception):
    """The server answered with an error: its status and body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


def post(server: Endpoint, path: str, body: object, headers: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(
        server.url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as e:
        raise Refused(e.code, e.read().decode(errors="replace")) from e


def ask(
    server: Endpoint,
    messages: list[dict[str, Any]],
    tokens: int = 12,
    *,
    request_id: str | None = None,
    **vision: object,
) -> Answer:
    """One greedy answer. `vision`: settings of the vision lever, such as ``retain_ratio=0.5``.

    Raises:
        Refused: the server returned an error.
    """
    body: dict[str, Any] = {
        "model": server.model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,  # every answer has the same number of tokens to compare
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    if vision:
        body["mm_processor_kwargs"] = vision
    headers = {"X-Request-Id": request_id} if request_id else None
    reply = post(server, "/v1/chat/completions", body, headers)
    choice = reply["choices"][0]
    steps = choice["logprobs"]["content"]
    details = reply["usage"].get("prompt_tokens_details") or {}
    return Answer(
        ids=choice["token_ids"],
        logprobs=[s["logprob"] for s in steps],
        gaps=[s["top_logprobs"][0]["logprob"] - s["top_logprobs"][1]["logprob"] for s in steps],
        prompt_tokens=reply["usage"]["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
        finish_reason=choice["finish_reason"],
    )


def rpc(server: Endpoint, method: str, *args: str) -> dict[str, Any]:
    """Call a method of the plugin's worker extension."""
    reply = post(server, "/collective_rpc", {"method": method, "args": list(args)})
    result: dict[str, Any] = reply["results"][0]
    return result


def set_routing(
    server: Endpoint,
    policy: str = "off",
    primary_experts: int | str | None = None,
    similarity_threshold: float = 0.5,
    renormalize: bool = True,
    budget: int | None = None,
    seed: int = 0,
    similarity_quantile: float | None = None,
    floor_batch: int = 0,
    auto_experts: float = 5.0,
    similarity_path: str | None = None,
    protection_path: str | None = None,
) -> str | None:
    """Set the routing lever; returns the server's complaint, `None` if it has none."""
    setting = {
        "policy": policy,
        "primary_experts": primary_experts,
        "similarity_threshold": similarity_threshold,
        "renormalize": renormalize,
        "budget": budget,
        "seed": seed,
        "similarity_quantile": similarity_quantile,
        "floor_batch": floor_batch,
        "auto_experts": auto_experts,
        "similarity_path": similarity_path,
        "protection_path": protection_path,
    }
    error: str | None = rpc(server, "pruneroute_set_routing", json.dumps(setting))["error"]
    return error


def kept_images(server: Endpoint) -> dict[str, list[tuple[int, int]]]:
    """Vision tokens (before, after) of every image, by our request ids; since the last look."""
    images = rpc(server, "pruneroute_drain")["images"]
    return {
        own_request_id(engine_id): [(before, after) for group in groups for before, after in group]
        for engine_id, groups in images.items()
    }
