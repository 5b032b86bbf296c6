"""What real clients send, recorded from them and reduced to our own prompts: it works, or is refused in OpenAI's shape.

Recorded by running each client against a gateway whose model follows schemas and calls tools, as `respond` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.helpers.chat_models import Running, gateway, said, spoken
from tests.helpers.scripted_server import Script

CLIENTS: Final = json.loads((Path(__file__).parents[1] / "data" / "gateway_clients.json").read_text(encoding="utf-8"))
CALL: Final = '<tool_call>\n{"name": "%s", "arguments": {"city": "Oslo"}}\n</tool_call>'
ENDS: Final = {"/v1/responses": "event: response.completed"}
"""How the last event of a stream starts; elsewhere it is [DONE]."""


def respond(_model: str, values: Mapping[str, Any]) -> Script:
    """JSON if a schema guides it, a call of the first tool, or an answer."""
    if "guided_decoding_guide" in values:
        return spoken('{"city": "Paris", "people": 2}')
    messages = said(str(values["text_input"]))
    tool = re.search(r'^\{.*"name": "(\w+)"', messages[0][1], re.MULTILINE) if messages else None
    called = any(role == "tool" for role, _ in messages)
    return spoken(CALL % tool[1] if tool is not None and not called else "It is sunny in Oslo.")


def text_of(event: Mapping[str, Any]) -> str:
    """What an event adds: text, or arguments of a call."""
    if "choices" not in event:
        return str(event.get("delta", ""))
    choices = [choice.get("delta", choice) for choice in event["choices"]]
    calls = [call["function"]["arguments"] for choice in choices for call in choice.get("tool_calls", ())]
    return "".join([*calls, *(choice.get("content") or choice.get("text") or "" for choice in choices)])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with gateway(tmp_path_factory.mktemp("clients"), respond, guided=True) as found:
        yield found


@pytest.mark.seam
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client["client"])
def test_requests_of_real_clients(running: Running, client: Mapping[str, Any]) -> None:
    with httpx.Client(base_url=running.url.removesuffix("/v1"), timeout=60, trust_env=False) as http:
        for sent in client["requests"]:
            body, path = sent.get("body"), sent["path"]
            response = http.request(sent["method"], path, json=body)
            assert response.status_code == sent["status"], response.text
            if response.status_code != 200:
                error = response.json()["error"]
                assert error.keys() == {"message", "type", "param", "code"}
                assert (error["code"], error["param"]) == (sent["code"], sent["param"])
            elif body is not None and body.get("stream"):
                assert response.text.strip().split("\n\n")[-1].startswith(ENDS.get(path, "data: [DONE]"))
                lines = re.findall(r"^data: (\{.*)", response.text, re.MULTILINE)
                assert re.search("Oslo|Paris", "".join(text_of(json.loads(line)) for line in lines))
            elif body is not None:
                assert re.search("Oslo|Paris", response.text)
