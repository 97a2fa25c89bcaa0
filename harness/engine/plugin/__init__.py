"""What runs inside vLLM's processes: the fused image group, the re-routing router, telemetry.

vLLM calls `register` in each of its processes through the ``vllm.general_plugins`` entry point.
"""


def register() -> None:
    """Install both levers' hooks. Idempotent."""
    from harness.engine.plugin import hooks

    hooks.install()
