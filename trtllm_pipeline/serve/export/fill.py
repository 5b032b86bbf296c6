"""Fetches a bundle from a hub into a directory and checks every file. Requires only Python 3.9 or newer.

It is copied into a ConfigMap, and run by a job with the volume:  python3 fill.py FOLDER

REPOSITORY   ORGANIZATION/NAME of the bundle on the hub
REVISION     branch, tag or commit (default: main, or master on ModelScope)
HUB          huggingface (default) or modelscope
HF_ENDPOINT, MODELSCOPE_ENDPOINT   another address of the hub, such as a mirror
TOKEN        for a private repository

Existing files with the right digest are kept, so an interrupted run continues. All others are removed, apart from hidden
ones. SHA256SUMS is in FOLDER only while the bundle is complete: servers wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

CHUNK = 8 << 20
TRIES = 5


class FillError(Exception):
    """The bundle cannot be fetched."""


def address(name: str) -> str:
    repository, revision = os.environ["REPOSITORY"], os.environ.get("REVISION")
    if os.environ.get("HUB", "huggingface") == "modelscope":
        endpoint = os.environ.get("MODELSCOPE_ENDPOINT", "https://www.modelscope.cn").rstrip("/")
        query = urllib.parse.urlencode({"Revision": revision or "master", "FilePath": name})
        return f"{endpoint}/api/v1/models/{repository}/repo?{query}"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return f"{endpoint}/{repository}/resolve/{revision or 'main'}/{urllib.parse.quote(name)}"


class SameHost(urllib.request.HTTPRedirectHandler):
    """Sends the token only to the hub, not to its file hosts."""

    def redirect_request(self, req: urllib.request.Request, *more: Any) -> urllib.request.Request | None:
        request = super().redirect_request(req, *more)
        if request is not None and request.host != req.host:
            request.headers.pop("Authorization", None)
        return request


OPENER = urllib.request.build_opener(SameHost)


def fetch(name: str, target: Path) -> str:
    """Fetch one file; returns its SHA-256. Raises FillError."""
    problem = ""
    for attempt in range(TRIES):
        time.sleep(2**attempt if attempt else 0)
        try:
            return fetch_once(name, target)
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError) as error:
            problem = str(error)
    raise FillError(f"{address(name)}: {problem}")


def fetch_once(name: str, target: Path) -> str:
    """As `fetch`, without retries. Raises OSError, ValueError."""
    token = os.environ.get("TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(address(name), headers=headers)  # noqa: S310  the user's own hub
    part, digest, received = target.with_name(f"{target.name}.part"), hashlib.sha256(), 0
    with OPENER.open(request, timeout=60) as answer, part.open("wb") as file:
        expected = answer.headers.get("Content-Length")
        for chunk in iter(lambda: answer.read(CHUNK), b""):
            file.write(chunk)
            digest.update(chunk)
            received += len(chunk)
    if expected is not None and received != int(expected):
        raise ValueError(f"{received} of {expected} bytes received")
    part.replace(target)
    return digest.hexdigest()


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def remove_others(folder: Path, kept: set[Path]) -> None:
    """Remove all files below `folder` except `kept`, and directories that are empty then. Raises OSError."""
    for path in sorted(folder.rglob("*"), reverse=True):  # files before their directory
        top = path.relative_to(folder).parts[0]
        if path in kept or top == "lost+found" or top.startswith("."):  # the file system's own, such as .snapshot
            continue
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        else:
            path.unlink()


def main(folder: Path) -> None:
    """Fill `folder`. Raises FillError, OSError, KeyError for a variable that is not set."""
    sums = folder / ".SHA256SUMS"  # moved into place last: its presence marks a complete bundle
    fetch("SHA256SUMS", sums)
    files = {}
    for line in sums.read_text(encoding="utf-8").splitlines():
        wanted, _, name = line.partition("  ")
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise FillError(f"SHA256SUMS names {name}, which is outside the bundle")
        files[name] = wanted
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    remove_others(folder, {folder / name for name in files})
    for name, wanted in files.items():
        path = folder / name
        if path.is_file():
            if sha256(path) == wanted:
                print(f"there already: {name}", flush=True)  # noqa: T201  the log of the job
                continue
            path.unlink()  # the volume may have no room for both
        path.parent.mkdir(parents=True, exist_ok=True)
        error = fetch(name, path)
        if error != wanted:
            path.unlink()
            raise FillError(f"{name}: its SHA-256 is {error}, expected {wanted}")
        print(f"fetched: {name}", flush=True)  # noqa: T201
    (folder / "start").chmod(0o755)  # hubs do not store file modes
    sums.replace(folder / "SHA256SUMS")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (FillError, KeyError, OSError) as error:
        sys.exit(f"error: {error}")
