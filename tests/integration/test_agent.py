"""A real agent on the gateway: LangChain calls the model's tools, and the model answers with their results.

LangChain is installed in an environment of its own, which AGENT_PYTHON names; .ci/nightly creates it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_models import gateway, said, spoken
from tests.helpers.scripted_server import Script

PYTHON = os.environ.get("AGENT_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="AGENT_PYTHON names no Python with LangChain"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"


def call(name: str, city: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'city': city}})}\n</tool_call>"


def respond(_model: str, values: Mapping[str, Any]) -> Script:
    """A model that asks for both times at once, then for the weather where it is noon, then answers."""
    messages = said(str(values["text_input"]))
    results = [text for role, text in messages if role == "tool"]
    cities = re.findall(r"Berlin|Tokyo", next(text for role, text in messages if role == "user"))
    if not results:
        assert "get_time" in messages[0][1], "the tools stand in the system message"
        return spoken("Let me see.\n\n" + "\n".join(call("get_time", city) for city in cities), gap_s=0.002)
    if len(results) == 2:
        return spoken(call("get_weather", cities[results.index("12:00")]), gap_s=0.002)
    return spoken(f"It is noon there: {results[-1]}.", gap_s=0.002)


def test_langchain(tmp_path: Path) -> None:
    with gateway(tmp_path, respond) as found:
        done = subprocess.run(
            [str(PYTHON), str(EXAMPLE), "--url", found.url, "What is the weather where it is noon, Tokyo or Berlin?"],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env={**os.environ, "LANGSMITH_TRACING": "false", "PYTHONPATH": ""},
        )
        assert done.returncode == 0, done.stderr
        first, *times, weather, last = done.stdout.splitlines()
        assert first == "Let me see."
        assert sorted(times) == ["[get_time: 12:00]", "[get_time: 19:00]"]
        assert (weather, last) == ("[get_weather: 18 °C and rain]", "It is noon there: 18 °C and rain.")
        assert len(found.triton.served) == 3
