"""Pulled from a web server that sends anything: each fault is told, nothing is read without a limit."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from blake3 import blake3

from tests.helpers.signed import publish
from trtllm_pipeline.base.errors import RemoteError
from trtllm_pipeline.orchestrate.store import remote_store
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.remote_store import (
    ArtifactKey,
    ArtifactTransfer,
    NotTransferableError,
    Progress,
    Remote,
)
from trtllm_pipeline.orchestrate.store.store import Store

FILES = {"config.json": "{}", "rank0.engine": "weights" * 1000}


class _Site(http.server.ThreadingHTTPServer):
    """Files of a directory; what a path contains decides which answer is another one."""

    daemon_threads = True
    folder: Path
    lies: dict[str, Callable[[http.server.BaseHTTPRequestHandler], None]]


class _Answers(http.server.BaseHTTPRequestHandler):
    server: _Site
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        lie = next((lie for part, lie in self.server.lies.items() if part in self.path), None)
        path = self.server.folder / self.path.strip("/")
        if lie is not None:
            lie(self)
        elif path.is_dir():
            self.answer("".join(f'<a href="{each.name}/">' for each in path.iterdir()).encode())
        elif path.is_file():
            self.answer(path.read_bytes())
        else:
            self.answer(b"", 404)

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
    except OSError:
        handler.close_connection = True


def _send(body: bytes, status: int = 200, **headers: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        assert isinstance(handler, _Answers)
        handler.answer(body, status, **headers)

    return answer


def short(handler: http.server.BaseHTTPRequestHandler) -> None:
    _send(b"part", Content_Length="100000")(handler)
    handler.close_connection = True


@pytest.fixture
def site(tmp_path: Path) -> Iterator[_Site]:
    with _Site(("127.0.0.1", 0), _Answers) as server:
        server.folder, server.lies = tmp_path / "site", {}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def made(tmp_path: Path) -> tuple[Artifact, Artifact]:
    store = Store(tmp_path / "w")
    found = publish(store, "a", FILES), publish(store, "b", {"rank0.engine": "unlike others"})
    with closing(Remote(str(tmp_path / "site"))) as there:
        pending = remote_store.compare_to_push(
            store, there, [ArtifactKey(each.stage, each.fingerprint) for each in found]
        )
        assert [each.state for each in remote_store.push(store, there, pending, Progress())] == ["done", "done"]
    return found


def pull(store: Store, site: _Site) -> dict[str, ArtifactTransfer]:
    with closing(Remote(f"http://127.0.0.1:{site.server_port}")) as there:
        found = remote_store.compare_to_pull(store, there, there.places())
        pending = [each for each in found if each.state == "pending"]
        done = remote_store.pull(store, there, pending, lambda _: (), Progress())
        return {each.fingerprint: each for each in (*found, *done) if each.state != "pending"}


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (endless, "more than 16 MiB"),
        (_send(gzip.compress(b" " * (32 << 20)), Content_Encoding="gzip"), "not the manifest of this artifact"),
        (_send(b"", 500), "HTTP 500"),
        (_send(b"", 302, Location="file:///etc/hostname"), "manifest.json: "),
        (_send(b"", 302, Location="/artifacts/build/"), "not the manifest of this artifact"),
        (short, "manifest.json: "),
    ],
)
def test_a_manifest_that_is_a_lie_is_refused_alone(
    tmp_path: Path, site: _Site, made: tuple[Artifact, Artifact], lie: Callable[..., None], said: str
) -> None:
    good, bad = made
    site.lies[bad.fingerprint] = lie
    found = pull(Store(tmp_path / "other"), site)
    assert (found[good.fingerprint].state, found[bad.fingerprint].state) == ("done", "refused")
    assert said in str(found[bad.fingerprint].message)


@pytest.mark.parametrize("lie", [endless, short, _send(b"x" * 13), _send(b"", 403), _send(b"")])
def test_a_file_that_is_a_lie_is_refused_alone(
    tmp_path: Path, site: _Site, made: tuple[Artifact, Artifact], lie: Callable[..., None]
) -> None:
    good, bad = made
    site.lies[f"{bad.fingerprint}/{blake3((bad.folder / 'manifest.json').read_bytes()).hexdigest()}/out"] = lie
    found = pull(Store(tmp_path / "other"), site)
    assert (found[good.fingerprint].state, found[bad.fingerprint].state) == ("done", "refused")


def test_a_server_that_drips_is_given_up(
    site: _Site, made: tuple[Artifact, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_SLOW_AFTER_S", 0.0)
    monkeypatch.setattr(remote_store, "_SLOWEST_BYTES_S", 10**15)
    with (
        closing(Remote(f"http://127.0.0.1:{site.server_port}")) as there,
        pytest.raises(NotTransferableError, match="bytes per second"),
    ):
        there.manifest(ArtifactKey("build", made[0].fingerprint))


def test_a_listing_without_end_is_told(tmp_path: Path, site: _Site, made: tuple[Artifact, Artifact]) -> None:
    site.lies["/artifacts/"] = endless
    with pytest.raises(RemoteError, match="more than 16 MiB"):
        pull(Store(tmp_path / "other"), site)
