"""`vision.policy`: random choice keeps as many tokens as VisionZip, others, and always the same."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
import torch
import yaml
from PIL import Image, ImageDraw, ImageFont

from harness.engine.checkpoint import read_checkpoint
from harness.engine.control import HttpFailure, call
from harness.engine.engine import Engine, running
from harness.engine.plugin.group import MERGES, POLICIES, VisionRequest, image_seed
from harness.help import conf_folder
from harness.pocket.model import ensure
from harness.settings import EngineSettings, VisionSettings
from kernels.visionzip.selection import BUDGETS

# -- identity and seeds -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"), [("policy", POLICIES), ("budget", BUDGETS), ("merge", MERGES)]
)
def test_the_plugin_and_the_settings_know_the_same_names(name: str, known: tuple[str]) -> None:
    hint = get_type_hints(VisionSettings, include_extras=True)[name]
    assert set(get_args(hint)[1].takes.removeprefix("one of ").split(", ")) == set(known)


def test_the_plugin_and_the_configuration_have_the_same_defaults() -> None:
    tree = yaml.safe_load((conf_folder() / "vision" / "visionzip.yaml").read_text())
    assert VisionRequest(**tree) == VisionRequest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_follows_from_content_and_shape(dtype: torch.dtype) -> None:
    pixels = torch.arange(24, dtype=dtype).view(4, 6)
    seed = image_seed(pixels, (1, 2, 2))
    assert 0 <= seed < 2**63
    assert seed == image_seed(pixels.t().contiguous().t(), [1, 2, 2])
    assert seed != image_seed(pixels, (1, 1, 4))
    other = pixels.clone()
    other[3, 5] += 1
    assert seed != image_seed(other, (1, 2, 2))


def test_a_seed_is_the_same_in_every_process() -> None:
    assert image_seed(torch.zeros(4, 6), (1, 2, 2)) == 1995182441539996449


# -- on a live server -------------------------------------------------------------------------------


def engine_settings(**changes: object) -> EngineSettings:
    tree = yaml.safe_load((conf_folder() / "engine" / "cpu.yaml").read_text())
    tree["extra_args"] = tuple(tree["extra_args"])
    return dataclasses.replace(EngineSettings(**tree), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """fp32, so that answers compare; with prefix caching, so that a shared item would show."""
    settings = engine_settings(dtype="float32", prefix_caching=True)
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with running(settings, read_checkpoint(ensure()), log, []) as engine:
        yield engine


def picture(words: str, size: tuple[int, int] = (256, 128)) -> str:
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for line in range(4):
        draw.text((8, 8 + 30 * line), f"{words} {line}", "black", ImageFont.load_default(20))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def blank(size: tuple[int, int]) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, "white").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(
    engine: Engine, name: str, pictures: list[str], **vision: object
) -> tuple[list[float], tuple[tuple[int, int], ...]]:
    """Log-probabilities of the first answer token's candidates, and (before, after) of each image."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": p}} for p in pictures
    ]
    body = {
        "model": engine.model,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "read"}]}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "mm_processor_kwargs": vision,
    }
    answer = json.loads(
        call(
            f"{engine.url}/v1/chat/completions",
            json.dumps(body).encode(),
            timeout_s=60,
            headers={"X-Request-Id": name},
        )
    )
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    images = engine.levers.drain().images[name]
    return [t["logprob"] for t in top], tuple((i.before, i.after) for i in images)


def near(a: list[float], b: list[float]) -> bool:
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-3


@pytest.mark.engine
def test_random_keeps_as_many_tokens_others_and_the_same_again(engine: Engine) -> None:
    one = picture("alpha")
    for ratio, due in ((0.5, 16), (0.2, 6)):
        zipped, counts = ask(engine, f"z{ratio}", [one], retain_ratio=ratio, policy="visionzip")
        drawn, drawn_counts = ask(engine, f"r{ratio}", [one], retain_ratio=ratio, policy="random")
        assert counts == drawn_counts == ((32, due),)
        assert not near(zipped, drawn), "the two policies answered from the same rows"
        # From the caches, and from scratch.
        again, _ = ask(engine, f"r{ratio}-2", [one], retain_ratio=ratio, policy="random")
        engine.levers.reset_caches()
        anew, _ = ask(engine, f"r{ratio}-3", [one], retain_ratio=ratio, policy="random")
        assert near(drawn, again) and near(drawn, anew)
        zipped_again, _ = ask(engine, f"z{ratio}-2", [one], retain_ratio=ratio)
        assert near(zipped, zipped_again)


@pytest.mark.engine
def test_random_choice_keeps_budget_and_floors_over_several_images(engine: Engine) -> None:
    pictures = [picture("beta"), picture("gamma", (128, 64)), picture("delta")]
    setting = {"retain_ratio": 0.25, "min_tokens_per_image": 6, "policy": "random"}
    _, counts = ask(engine, "several", pictures, **setting)
    assert [b for b, _ in counts] == [32, 8, 32]
    assert sum(a for _, a in counts) == 18
    assert min(a for _, a in counts) >= 6
    assert ask(engine, "several-2", pictures, **setting)[1] == counts


@pytest.mark.engine
def test_every_way_to_spend_a_budget_spends_it_and_is_one_of_its_own(engine: Engine) -> None:
    pictures = [picture("eta"), blank((128, 256)), picture("iota", (96, 64))]
    ways: list[dict[str, object]] = [
        {"policy": "grid"},
        {"policy": "random"},
        {"merge": "contextual"},
        {"merge": "contextual", "contextual_share": 0.5},
        *({"budget": budget} for budget in ("raw", "per_image", "log_excess")),
    ]
    found = []
    for i, way in enumerate(ways):
        answer, counts = ask(engine, f"way-{i}", pictures, retain_ratio=0.4, **way)
        assert [b for b, _ in counts] == [32, 32, 6]
        assert sum(a for _, a in counts) == 28 and min(a for _, a in counts) >= 1
        assert not any(near(answer, other) for other in found), way
        found.append(answer)
    for way in ({"policy": "grid"}, {"budget": "per_image"}):
        _, counts = ask(engine, f"even-{next(iter(way))}", pictures, retain_ratio=0.4, **way)
        assert [a for _, a in counts] == [13, 13, 2]


@pytest.mark.engine
def test_smaller_images_have_their_own_tokens_and_positions(engine: Engine) -> None:
    """As the same image made smaller by hand."""
    size = (256, 128)
    one = picture("kappa", size)
    smaller, counts = ask(engine, "small", [one], retain_ratio=0.5, policy="downscale")
    assert counts == ((32, 15),)  # 3 x 5 of 4 x 8
    data = io.BytesIO(base64.b64decode(one.split(",")[1]))
    buffer = io.BytesIO()
    Image.open(data).resize((5 * 32, 3 * 32), Image.Resampling.BICUBIC).save(buffer, "PNG")
    by_hand = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    want, _ = ask(engine, "by-hand", [by_hand], retain_ratio=1.0)
    assert near(smaller, want)
    # Below the least size of the processor, 4 tokens; which else would make it larger again.
    _, counts = ask(engine, "tiny", [one], retain_ratio=0.04, policy="downscale")
    assert counts == ((32, 1),)


@pytest.mark.engine
def test_a_blank_image_gets_less_than_a_page(engine: Engine) -> None:
    pictures = [blank((256, 128)), picture("lambda")]
    _, counts = ask(engine, "blank", pictures, retain_ratio=0.5)
    assert counts[0][1] < counts[1][1] / 2


@pytest.mark.engine
def test_with_everything_kept_the_policy_does_not_matter(engine: Engine) -> None:
    one = picture("epsilon")
    kept, counts = ask(engine, "all-z", [one], retain_ratio=1.0, policy="visionzip")
    for policy in ("random", "grid", "downscale", "none"):
        drawn, drawn_counts = ask(engine, f"all-{policy}", [one], retain_ratio=1.0, policy=policy)
        assert counts == drawn_counts == ((32, 32),)
        assert near(kept, drawn)
    untouched, counts = ask(engine, "none", [one], retain_ratio=0.2, policy="none")
    assert counts == ((32, 32),) and near(kept, untouched)


@pytest.mark.engine
def test_an_unknown_policy_is_an_error_of_the_request(engine: Engine) -> None:
    with pytest.raises(HttpFailure, match="policy='best' must be one of") as failure:
        ask(engine, "wrong", [picture("zeta")], retain_ratio=0.5, policy="best")
    assert failure.value.status == 400
    # The server lives on.
    ask(engine, "right", [picture("zeta")], retain_ratio=0.5, policy="random")
