"""The light part of the plugin, for every vLLM process: whose model classes replace vLLM's own."""

from __future__ import annotations

_FAMILIES = "harness.engine.plugin.models"

MODELS = {
    "Qwen2_5_VLForConditionalGeneration": f"{_FAMILIES}.qwen2_5_vl:GroupQwen25VL",
    "Qwen3VLForConditionalGeneration": f"{_FAMILIES}.qwen3_vl:GroupQwen3VL",
    "Qwen3VLMoeForConditionalGeneration": f"{_FAMILIES}.qwen3_vl:GroupQwen3VLMoe",
    "Qwen3_5ForConditionalGeneration": f"{_FAMILIES}.qwen3_5:GroupQwen35",
    "Qwen3_5MoeForConditionalGeneration": f"{_FAMILIES}.qwen3_5:GroupQwen35Moe",
}
"""Architecture → class with the vision lever. Imported by vLLM only when a checkpoint asks for it."""


def install() -> None:
    """Register the model classes that this vLLM has stock ones for; again changes nothing."""
    from vllm import ModelRegistry

    from harness.engine.plugin import sixteen_bits

    sixteen_bits.install()
    known = ModelRegistry.get_supported_archs()
    for architecture, model in MODELS.items():
        if architecture in known:
            ModelRegistry.register_model(architecture, model)
