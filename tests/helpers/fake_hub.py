"""A small hub on loopback that speaks the HTTP APIs of Hugging Face and ModelScope, and misbehaves when told to.

It serves what the official clients ask for: model information, listings, files by redirect to a "CDN" on another port
(another origin, so that a token sent there would show), ranges, entity tags, error headers. Of Hugging Face it also takes
uploads, as commits with small files in them and large ones put into the CDN before (LFS); Xet it does not speak.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_BYTES = 4096
"""Files from this size on are in LFS: digest SHA-256, served by the CDN."""


@dataclass
class Repository:
    files: dict[str, bytes]
    commit: str = "c" * 40
    branch: str = "main"
    gated: bool = False
    private: bool = False
    listed: dict[str, dict] = field(default_factory=dict)
    """Lies of the listing, by file: {"size": ..., "sha256": ..., "oid": ...}."""
    extra: tuple[str, ...] = ()
    """Names that are listed but not there."""


@dataclass
class Fault:
    """What goes wrong with requests for a path that contains `match`, `times` times."""

    match: str
    kind: str = "status"
    """status, drop (close after `after` bytes), short (a complete answer that lacks bytes), corrupt, slow, no_range."""
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0
    times: int = 1
    delay_s: float = 0.0


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class FakeHub:
    """`with FakeHub({"org/name": Repository({...})}) as hub: hub.url`."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.faults: list[Fault] = []
        self.tokens = {"good": True, "stranger": False}
        """Valid tokens, and whether their owners may read gated and private models."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.uploaded: dict[str, bytes] = {}
        """What was put into the CDN, by SHA-256."""
        self.commits: list[str] = []
        """Their summaries."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(role)) for role in ("hub", "cdn")]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self) -> FakeHub:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in self._servers]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    def count(self, match: str, method: str = "GET") -> int:
        return sum(1 for verb, path, _ in self.requests if verb == method and match in path)

    def ranges(self, match: str) -> list[str]:
        return [headers["range"] for _, path, headers in self.requests if match in path and "range" in headers]

    def _fault(self, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.match in path:
                    fault.times -= 1
                    return fault
        return None

    def _handler(hub, role: str) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the request below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def do_PUT(self) -> None:
                content = self._body()
                hub.requests.append(
                    (self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
                )
                hub.uploaded[sha256(content)] = content
                self._send(200, b"", {"ETag": '"1"'})

            def do_POST(self) -> None:
                content = self._body()
                headers = {name.lower(): value for name, value in self.headers.items()}
                hub.requests.append((self.command, self.path, headers))
                fault = hub._fault(unquote(self.path))
                if fault is not None:
                    self._send(fault.status, b"", fault.headers)
                    return
                path = unquote(urlsplit(self.path).path)
                if path == "/api/validate-yaml":
                    self._json({"warnings": [], "errors": []})
                elif not hub.tokens.get(headers.get("authorization", "").removeprefix("Bearer "), False):
                    self._refuse(401, "", "Invalid username or password.")
                elif path == "/api/repos/create":
                    self._create(json.loads(content))
                elif path.endswith("/info/lfs/objects/batch"):
                    self._lfs(path, json.loads(content))
                elif "/preupload/" in path:
                    files = json.loads(content)["files"]
                    modes = {each["path"]: "lfs" if each["size"] >= LFS_BYTES else "regular" for each in files}
                    self._json(
                        {
                            "files": [
                                {"path": name, "uploadMode": mode, "shouldIgnore": False}
                                for name, mode in modes.items()
                            ]
                        }
                    )
                elif "/commit/" in path:
                    self._commit("/".join(path.split("/")[3:5]), content)
                else:
                    self._send(404, b"", {})

            def _body(self) -> bytes:
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _create(self, asked: dict) -> None:
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                status = 409 if name in hub.repositories else 200
                hub.repositories.setdefault(
                    name,
                    Repository(
                        {}, private="private" in (asked.get("visibility"), "private" if asked.get("private") else "")
                    ),
                )
                self._json({"url": f"{hub.url}/{name}", "name": name, "id": "1"}, status)

            def _lfs(self, path: str, asked: dict) -> None:
                actions = []
                for each in asked["objects"]:
                    action = {"upload": {"href": f"{hub.cdn}{path.partition('.git')[0]}/{each['oid']}", "header": {}}}
                    there = each["oid"] in hub.uploaded
                    actions.append({**each, "authenticated": True, **({} if there else {"actions": action})})
                self._json({"transfer": "basic", "objects": actions})

            def _commit(self, model: str, content: bytes) -> None:
                repository = hub.repositories[model]
                for line in content.splitlines():
                    entry = json.loads(line)
                    value = entry["value"]
                    if entry["key"] == "header":
                        hub.commits.append(value["summary"])
                    elif entry["key"] == "file":
                        repository.files[value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "lfsFile":
                        repository.files[value["path"]] = hub.uploaded[value["oid"]]
                self._json(
                    {"commitUrl": f"{hub.url}/{model}/commit/{repository.commit}", "commitOid": repository.commit}
                )

            def _answer(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                hub.requests.append((self.command, self.path, headers))
                fault = hub._fault(unquote(self.path)) if self.command == "GET" else None
                if fault is not None and fault.kind == "status":
                    self._send(fault.status, b"", fault.headers)
                    return
                url = urlsplit(self.path)
                path, query = unquote(url.path), {name: values[0] for name, values in parse_qs(url.query).items()}
                if role == "cdn":
                    organisation, model, name = path.strip("/").split("/", 2)
                    self._content(hub.repositories[f"{organisation}/{model}"].files[name], fault)
                elif path.startswith("/api/v1/models/"):
                    self._modelscope(path.removeprefix("/api/v1/models/"), query, headers, fault)
                elif path.startswith("/api/models/"):
                    self._hugging_face_api(path.removeprefix("/api/models/").split("/"), query, headers)
                elif path.startswith("/api/datasets/"):
                    organisation, *rest = path.removeprefix("/api/datasets/").split("/")
                    self._hugging_face_api([f"datasets/{organisation}", *rest], query, headers)
                elif "/resolve/" in path:
                    model, rest = path.strip("/").split("/resolve/")
                    self._hugging_face_file(model, *rest.split("/", 1), headers, fault)
                else:
                    self._send(200, b"hub", {})

            # Hugging Face

            def _known(self, model: str, headers: dict[str, str]) -> Repository | None:
                """The repository, or None after an answer as the hub gives it to those who may not see it."""
                token = headers.get("authorization", "").removeprefix("Bearer ")
                if token and token not in hub.tokens:
                    self._refuse(401, "", "Invalid credentials in Authorization header")
                    return None
                repository = hub.repositories.get(model)
                if repository is None or (repository.private and not hub.tokens.get(token, False)):
                    self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
                    return None
                return repository

            def _admitted(self, repository: Repository, headers: dict[str, str]) -> bool:
                token = headers.get("authorization", "").removeprefix("Bearer ")
                if repository.gated and not hub.tokens.get(token, False):
                    self._refuse(403 if token else 401, "GatedRepo", "Access to this model is restricted")
                    return False
                return True

            def _hugging_face_api(self, parts: list[str], query: dict[str, str], headers: dict[str, str]) -> None:
                model, action = "/".join(parts[:2]), parts[2:]
                repository = self._known(model, headers)
                if repository is None:
                    return
                if action == ["auth-check"]:
                    if self._admitted(repository, headers):
                        self._json({})
                    return
                if len(action) > 1 and action[1] not in (repository.branch, repository.commit):
                    self._refuse(404, "RevisionNotFound", f"Invalid rev id: {action[1]}")
                elif action[:1] == ["tree"]:
                    self._json([{"type": "file", **self._entry(repository, name)} for name in self._names(repository)])
                else:
                    siblings = []
                    for name in self._names(repository):
                        entry = self._entry(repository, name)
                        sibling = {"rfilename": name, "size": entry["size"], "blobId": entry["oid"]}
                        if "lfs" in entry:
                            sibling["lfs"] = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 130}
                        siblings.append(sibling if "blobs" in query else {"rfilename": name})
                    self._json(
                        {
                            "_id": "1", "id": model, "modelId": model, "sha": repository.commit, "private": False,
                            "gated": "manual" if repository.gated else False, "disabled": False, "tags": [],
                            "downloads": 0, "likes": 0, "siblings": siblings,
                        }
                    )  # fmt: skip

            def _names(self, repository: Repository) -> list[str]:
                return [*repository.files, *repository.extra]

            def _entry(self, repository: Repository, name: str) -> dict:
                content = repository.files.get(name, b"")
                lie = repository.listed.get(name, {})
                size = lie.get("size", len(content))
                entry = {"path": name, "size": size, "oid": lie.get("oid", git_sha1(content))}
                if len(content) >= LFS_BYTES:
                    entry["lfs"] = {"oid": lie.get("sha256", sha256(content)), "size": size, "pointerSize": 130}
                return entry

            def _hugging_face_file(
                self, model: str, revision: str, name: str, headers: dict[str, str], fault: Fault | None
            ) -> None:
                repository = self._known(model, headers)
                if repository is None or not self._admitted(repository, headers):
                    return
                content = repository.files.get(name)
                if content is None:
                    self._refuse(404, "EntryNotFound", "Entry not found")
                    return
                commit = {"X-Repo-Commit": repository.commit}
                if len(content) < LFS_BYTES:
                    self._content(content, fault, {**commit, "ETag": f'"{git_sha1(content)}"'})
                else:
                    linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{sha256(content)}"'}
                    self._send(302, b"", {**commit, **linked, "Location": f"{hub.cdn}/{model}/{name}"})

            def _refuse(self, status: int, code: str, message: str) -> None:
                self._send(status, b"", {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})})

            # ModelScope

            def _modelscope(
                self, path: str, query: dict[str, str], headers: dict[str, str], fault: Fault | None
            ) -> None:
                model, _, action = path.partition("/repo")
                repository = hub.repositories.get(model.removesuffix("/revisions"))
                token = headers.get("authorization", "").removeprefix("Bearer ")
                if token and token not in hub.tokens:
                    self._json({"Code": 10990101003, "Message": "invalid token", "Success": False}, 401)
                elif repository is None or query.get("Revision", "master") not in ("master", repository.commit):
                    self._json({"Code": 10010205001, "Message": "record not found", "Success": False}, 404)
                elif repository.gated and not hub.tokens.get(token, False):
                    self._json({"Code": 10010205003, "Message": "no permission", "Success": False}, 403)
                elif action == "/files":
                    entries = [{"Path": "docs", "Name": "docs", "Type": "tree", "Size": 0, "CommittedDate": 1}]
                    for i, name in enumerate(self._names(repository)):
                        entry = self._entry(repository, name)
                        digest = repository.listed.get(name, {}).get("sha256", sha256(repository.files.get(name, b"")))
                        entries.append(
                            {
                                "Path": name, "Name": name, "Type": "blob", "Size": entry["size"], "Sha256": digest,
                                "IsLFS": "lfs" in entry, "CommittedDate": 1700000000 + i,
                                "Revision": repository.commit if i + 1 == len(self._names(repository)) else "d" * 40,
                            }
                        )  # fmt: skip
                    self._json({"Code": 200, "Success": True, "Data": {"Files": entries}})
                elif model.endswith("/revisions"):
                    branches = [{"Revision": "master", "CreatedAt": 1}]
                    self._json({"Code": 200, "Data": {"RevisionMap": {"Branches": branches, "Tags": []}}})
                else:
                    content = repository.files.get(query.get("FilePath", ""))
                    if content is None:
                        self._json({"Code": 10990101001, "Message": "file not found", "Success": False}, 404)
                    elif len(content) < LFS_BYTES:
                        self._content(content, fault)
                    else:
                        self._send(302, b"", {"Location": f"{hub.cdn}/{model}/{query['FilePath']}"})

            # Both

            def _content(self, content: bytes, fault: Fault | None, headers: dict[str, str] | None = None) -> None:
                kind = fault.kind if fault is not None else ""
                if kind == "corrupt":
                    content = bytes([content[0] ^ 1]) + content[1:]
                if kind == "short":
                    content = content[: fault.after]
                start, status = 0, 200
                wanted = self.headers.get("Range")
                if wanted and kind != "no_range":
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, status = int(first), 206
                    if start >= len(content):
                        self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                        return
                    end = int(last) + 1 if last else len(content)
                    body = content[start:end]
                    headers = {
                        **(headers or {}),
                        "Content-Range": f"bytes {start}-{start + len(body) - 1}/{len(content)}",
                    }
                else:
                    body = content
                if kind == "slow":
                    hub._closing.wait(fault.delay_s)
                cut = fault.after if kind == "drop" else None
                self._send(status, body, {"Accept-Ranges": "bytes", **(headers or {})}, cut)

            def _json(self, value: object, status: int = 200) -> None:
                self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

            def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                self.wfile.write(body if cut is None else body[:cut])
                if cut is not None:
                    self.wfile.flush()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True

        return Handler
