"""Addresses of OpenAI-compatible servers, as people type them."""

from __future__ import annotations

import pytest

from trtllm_pipeline.measure.client.urls import api_url, server_url


@pytest.mark.parametrize(
    "typed",
    [
        *("http://host:8000", "http://host:8000/", "http://host:8000//", "http://host:8000/v1", "http://host:8000/v1/"),
        *("http://host:8000//v1", "http://host:8000//v1//", "http://host:8000/v1/completions"),
        *("http://host:8000/v1/chat/completions", "http://host:8000/v1/models/"),
    ],
)
def test_every_spelling_is_the_same_server(typed: str) -> None:
    assert (api_url(typed), server_url(typed)) == ("http://host:8000/v1", "http://host:8000")


@pytest.mark.parametrize(
    ("typed", "api"),
    [
        ("host:8000", "host:8000/v1"),
        ("https://host/openai/v1/", "https://host/openai/v1"),
        ("https://host/openai", "https://host/openai/v1"),
        ("http://[::1]:8000/", "http://[::1]:8000/v1"),
        ("http://host/completions", "http://host/completions/v1"),
    ],
)
def test_other_paths_stay(typed: str, api: str) -> None:
    assert api_url(typed) == api
