"""The gateway as a page in a real browser meets it: pages of the allowed origin stream and read errors, others get nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.helpers import needed
from tests.helpers.browser import Browser
from tests.helpers.chat_models import gateway, said, spoken
from tests.helpers.scripted_server import Script

pytestmark = pytest.mark.programs("chromium")

KEY = "sk-of-the-page"
REQUEST: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "Say after me"}]}
ASK = """
(async () => {
  const headers = {"content-type": "application/json", "authorization": "Bearer %(key)s"};
  const response = await fetch("%(url)s/%(path)s", {method: "%(method)s", headers, body: %(body)s});
  return {status: response.status, text: await response.text(), retry: response.headers.get("retry-after")};
})().catch(error => ({error: String(error)}))
"""


class Page(BaseHTTPRequestHandler):
    """An empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>page</title>")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name of the base class
        """Nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where the page is: at 127.0.0.1 and at localhost, which are two origins."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def url(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway that allows the page at 127.0.0.1."""

    def respond(_model: str, values: Mapping[str, Any]) -> Script:
        return spoken(said(str(values["text_input"]))[-1][1])

    folder = tmp_path_factory.mktemp("gateway")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    keys.chmod(0o600)
    with gateway(folder, respond, api_keys_file=keys, cors_origin=(f"http://127.0.0.1:{port}",)) as running:
        yield running.url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(needed.program("chromium"), tmp_path_factory.mktemp("profile")) as one:
        yield one


def ask(
    browser: Browser, url: str, body: object, *, path: str = "chat/completions", key: str = KEY, method: str = "POST"
) -> dict[str, Any]:
    """What the page's fetch got: status and text, or the error that the browser gave it."""
    text = "undefined" if body is None else json.dumps(json.dumps(body))
    found: dict[str, Any] = browser.evaluate(
        ASK % {"url": url, "path": path, "key": key, "method": method, "body": text}
    )
    return found


def test_a_page_of_the_allowed_origin_streams_and_reads_errors(browser: Browser, url: str, port: int) -> None:
    browser.open(f"http://127.0.0.1:{port}/", "document.title === 'page'")
    assert json.loads(ask(browser, url, None, path="models", method="GET")["text"])["data"][0]["id"] == "scripted"
    whole = ask(browser, url, REQUEST)
    assert whole["status"] == 200
    assert json.loads(whole["text"])["choices"][0]["message"]["content"] == "Say after me"
    events = ask(browser, url, {**REQUEST, "stream": True})["text"].split("\n\n")
    assert events[-2] == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
    assert "".join(part.get("content") or "" for part in parts) == "Say after me"
    refused = ask(browser, url, {**REQUEST, "nonsense": 1})
    assert (refused["status"], json.loads(refused["text"])["error"]["param"]) == (400, "nonsense")
    unknown = ask(browser, url, REQUEST, key="sk-of-others")
    assert (unknown["status"], json.loads(unknown["text"])["error"]["code"]) == (401, "invalid_api_key")


def test_a_page_of_another_origin_gets_nothing(browser: Browser, url: str, port: int) -> None:
    browser.open(f"http://localhost:{port}/", "document.title === 'page'")
    browser.complaints.clear()
    assert ask(browser, url, REQUEST) == {"error": "TypeError: Failed to fetch"}
    assert ask(browser, url, None, path="models", method="GET") == {"error": "TypeError: Failed to fetch"}
    assert any("CORS policy" in complaint for complaint in browser.complaints)
