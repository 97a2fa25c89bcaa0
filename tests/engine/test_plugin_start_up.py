"""What vLLM plans with at start-up: the largest group there can be, and inputs that are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.engine.plugin import register
from harness.pocket.model import ensure

pytestmark = pytest.mark.engine


def plans(model: Path, images: int, max_model_len: int) -> tuple[Any, Any]:
    """A processor and a budget, made as the engine makes them."""
    from vllm.config import ModelConfig, SchedulerConfig, VllmConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    register()
    config = ModelConfig(
        model=str(model),
        dtype="float32",
        max_model_len=max_model_len,
        limit_mm_per_prompt={"image": images, "video": 0},
        mm_processor_cache_gb=0,
    )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )
    whole = VllmConfig(model_config=config, scheduler_config=scheduler)
    return MULTIMODAL_REGISTRY.create_processor(config), MultiModalBudget(
        whole, MULTIMODAL_REGISTRY
    )


@pytest.fixture(scope="module", params=["pocket", "qwen2_5_vl"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "pocket":
        return ensure()
    from tests.engine import families

    return families.qwen2_5_vl(tmp_path_factory.mktemp("model"))


LARGEST = 256
"""Tokens of an image of the largest size, of both models."""


@pytest.mark.parametrize(
    ("limit", "context", "images"),
    [(12, 4096, 12), (12, 1100, 4), (12, 200, 1), (1, 4096, 1)],
)
def test_the_profiled_item_is_the_largest_group(
    model: Path, limit: int, context: int, images: int
) -> None:
    processor, budget = plans(model, limit, context)
    found = processor.get_dummy_mm_inputs({"image": 1})
    (item,), (where,) = found["mm_kwargs"]["image"], found["mm_placeholders"]["image"]
    assert len(item["image_grid_thw"].data) == images
    assert item["group_spend"].data[:2].tolist() == [images, images * LARGEST]
    gaps = int(item["gap_lengths"].data.sum())
    assert where.length == images * LARGEST + gaps
    assert where.length <= max(context, LARGEST)
    # A request's longest group fits the budget of an encoder call and its cache.
    longest = max(context, LARGEST) if limit > 1 else LARGEST
    assert budget.mm_max_toks_per_item == {"image": longest}
    assert budget.encoder_compute_budget >= longest
    assert budget.encoder_cache_size >= longest
    assert budget.mm_max_items_per_batch["image"] >= 1
    assert len(budget.get_dummy_encoder_profile_inputs("image", 1)) == 1
