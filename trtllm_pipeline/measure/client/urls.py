"""Addresses of OpenAI-compatible servers, as users type them."""

from __future__ import annotations

from typing import Final

_ENDPOINTS: Final = (["chat", "completions"], ["completions"], ["models"])


def api_url(url: str) -> str:
    """The URL of an OpenAI API, which ends in /v1. `url` may lack it, have extra slashes, or be the URL of an endpoint."""
    scheme, sign, rest = url.rpartition("://")
    host, *path = rest.split("/")
    path = [part for part in path if part]
    for endpoint in _ENDPOINTS:
        if path[-len(endpoint) - 1 :] == ["v1", *endpoint]:
            path = path[: -len(endpoint)]
    if path[-1:] != ["v1"]:
        path.append("v1")
    return "/".join([f"{scheme}{sign}{host}", *path])


def server_url(url: str) -> str:
    """The URL of the server with the API at `url`: without /v1."""
    return api_url(url).removesuffix("/v1")
