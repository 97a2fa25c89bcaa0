"""The model families with the vision lever: vLLM's classes with `FusedGroups` mixed in, a file each.

vLLM imports a file only when a checkpoint asks for its architecture (`harness.engine.plugin.hooks`).
"""
