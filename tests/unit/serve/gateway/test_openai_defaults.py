from __future__ import annotations

from typing import Any

import pytest

from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve.gateway.openai_backend import with_defaults


@pytest.mark.parametrize(
    ("params", "body", "sent"),
    [
        ({}, {"prompt": "a"}, {"prompt": "a"}),
        (
            {"temperature": 0.0, "top_p": 0.5, "top_k": 4, "repetition_penalty": 1.1, "max_tokens": 9},
            {"prompt": "a"},
            {"prompt": "a", "temperature": 0.0, "top_p": 0.5, "top_k": 4, "repetition_penalty": 1.1, "max_tokens": 9},
        ),
        ({"temperature": 0.0}, {"temperature": 1}, {"temperature": 1}),
        ({"temperature": 0.0}, {"temperature": None}, {"temperature": 0.0}),
        ({"max_tokens": 9}, {"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 9}, {"max_completion_tokens": 5}, {"max_completion_tokens": 5}),
        ({"stop": ("x", "y")}, {}, {"stop": ["x", "y"]}),
        ({"stop": ("x",)}, {"stop": "b"}, {"stop": ["b", "x"]}),
        ({"stop": ("x",)}, {"stop": ["b", "x"]}, {"stop": ["b", "x"]}),
        ({"stop": ("x",)}, {"stop": 7}, {"stop": 7}),
        ({"end_id": 2, "pad_id": 2}, {}, {}),
    ],
)
def test_defaults_are_of_requests_that_leave_them_out(
    params: dict[str, Any], body: dict[str, Any], sent: dict[str, Any]
) -> None:
    before = dict(body)
    assert with_defaults("completions", body, GatewayParams(**params)) == sent
    assert body == before
