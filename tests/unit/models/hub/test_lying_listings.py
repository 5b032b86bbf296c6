"""Answers of a hub that are no listing: each is told in words, and nothing is read without a limit."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trtllm_pipeline.base.errors import DownloadError
from trtllm_pipeline.models.hub import hugging_face, modelscope

COMMIT = "c" * 40
FILE = {"rfilename": "config.json", "size": 3, "blobId": "0" * 40}
Answers = list[Callable[[http.server.BaseHTTPRequestHandler], None]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """The last one answers every request."""
    given: Answers = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            given[-1](self)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield given
        server.shutdown()
        thread.join()


def sending(body: bytes) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(body)

    return answer


def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
    try:
        while True:
            handler.wfile.write(b" " * 65536)
    except OSError:
        pass


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"5",
        b"<html>",
        b"\xff",
        b"[" * 1_000_000,
        json.dumps({"sha": 5}).encode(),
        *(
            json.dumps({"sha": COMMIT, "siblings": files}).encode()
            for files in (
                5,
                [5],
                [{**FILE, "size": "x"}],
                [{**FILE, "size": -5}],
                [{**FILE, "size": 1.5}],
                [{**FILE, "rfilename": None}],
                [{**FILE, "blobId": {}}],
                [{**FILE, "lfs": {"sha256": None}}],
            )
        ),
    ],
)
def test_what_is_no_listing_is_told(answers: Answers, body: bytes) -> None:
    answers.append(sending(body))
    with pytest.raises(DownloadError, match="does not list a model"):
        hugging_face.listing("org/m", COMMIT)


def test_an_answer_without_end_is_told(answers: Answers) -> None:
    answers.append(endless)
    with pytest.raises(DownloadError, match="sends more than 64 MiB"):
        hugging_face.pin("org/m", "main", offline=False)


@pytest.mark.parametrize(
    "entries", [5, [5], [{"Path": "a", "Size": -1}], [{"Path": "a", "Size": "x"}], [{"CommittedDate": [1]}]]
)
def test_a_listing_of_modelscope_that_is_none_is_told(entries: Any) -> None:
    class Legacy:
        endpoint = "http://127.0.0.1:1"

        def list_repo_files(self, *_: object, **__: object) -> Any:
            return entries

        def get_download_url(self, *_: object) -> str:
            return ""

    class Api:
        legacy = Legacy()

    with pytest.raises(DownloadError, match="cannot parse the listing"):
        modelscope._entries(Api(), "org/m", "master")  # type: ignore[arg-type]
