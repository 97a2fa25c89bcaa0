"""How the server is started."""

from __future__ import annotations

import sys

import pytest

from harness.engine.command import serve_environment
from tests.engine.conftest import engine_settings


@pytest.mark.parametrize(
    ("prefix", "off"), [("/home/me/my project/.venv", True), ("/opt/v", False)]
)
def test_nothing_is_compiled_where_the_path_has_a_space(
    monkeypatch: pytest.MonkeyPatch, prefix: str, off: bool
) -> None:
    """PyTorch passes its include path to the C++ compiler unquoted."""
    monkeypatch.setattr(sys, "prefix", prefix)
    environment = serve_environment(engine_settings(), {})
    assert ("TORCHDYNAMO_DISABLE" in environment) == off
    kept = serve_environment(engine_settings(), {"TORCHDYNAMO_DISABLE": "0"})
    assert kept["TORCHDYNAMO_DISABLE"] == "0"


def test_a_key_for_the_server_does_not_lock_us_out() -> None:
    assert "VLLM_API_KEY" not in serve_environment(engine_settings(), {"VLLM_API_KEY": "x"})
