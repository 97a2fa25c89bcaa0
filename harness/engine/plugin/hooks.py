"""The light part of the plugin, for every vLLM process: whose model classes replace vLLM's own."""

from __future__ import annotations

MODELS = {
    "Qwen3VLForConditionalGeneration": "harness.engine.plugin.model:GroupQwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "harness.engine.plugin.model:GroupQwen3VLMoe",
}
"""Architecture → class with the vision lever. Imported by vLLM only when a checkpoint asks for it."""


def install() -> None:
    """Register the model classes; registering again changes nothing."""
    from vllm import ModelRegistry

    for architecture, model in MODELS.items():
        ModelRegistry.register_model(architecture, model)
