"""A remote store: artifacts at a URL that several machines push to and pull from.

    URL/files/AB/ABCD...                            content of files, by BLAKE3
    URL/artifacts/STAGE/FINGERPRINT/manifest.json   what the artifact is; sent last
    URL/artifacts/STAGE/FINGERPRINT/DIGEST.intoto.jsonl   its signed statement, by the BLAKE3 of the manifest that it is for

No file is ever changed there, so pushes of the same artifact do not disturb each other, and what an interrupted one has
sent is not sent again. An artifact without a manifest is not there. Whoever pulls trusts digests, not the place:
manifests are checked by `transferable`, no answer is read without a limit, and a bad artifact is refused alone.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from trtllm_pipeline.domain import Fingerprint
from trtllm_pipeline.errors import PipelineError, RemoteError, StateError, UsageError
from trtllm_pipeline.files import disk, reading
from trtllm_pipeline.files.digest import digest_file
from trtllm_pipeline.stages.base import OUT
from trtllm_pipeline.store import manifest, transferable
from trtllm_pipeline.store.claims import Claim
from trtllm_pipeline.store.manifest import Discrepancy, FileEntry, Manifest
from trtllm_pipeline.store.store import Store
from trtllm_pipeline.store.transferable import PARTS

if TYPE_CHECKING:
    import httpx

BOUND: Final = frozenset({"repository"})
"""Stages whose results have absolute paths of their workspace, and are written anew in a second."""
_PIECE_BYTES: Final = 8 << 20
_AHEAD: Final = 4
"""Pieces of one file, and artifacts, that are on their way at once."""
_LIST_FROM: Final = 200
"""Artifacts from which on a list of all is asked for, and not each of them."""
_MOST_READ_BYTES: Final = 16 << 20
"""Of a small file or a listing."""
_MOST_MANIFEST_BYTES: Final = 256 << 20
"""Of all manifests together, which are kept while artifacts are transferred."""
_SLOWEST_BYTES_S: Final = 1000
_SLOW_AFTER_S: Final = 20.0
"""A web server that sends less than that, after this time, is given up."""
_STAGE: Final = re.compile(r"[a-z_]+")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{32}")
_HREF: Final = re.compile(r"""href\s*=\s*["']?([^"'?#>\s]+)""", re.IGNORECASE)
_BACKENDS: Final = {
    "s3": "s3fs",
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
}
"""Scheme of a URL -> the package that fsspec needs for it."""

T = TypeVar("T")
R = TypeVar("R")
State = Literal["present", "pending", "done", "busy", "refused"]


class ArtifactKey(NamedTuple):
    """Which artifact."""

    stage: str
    fingerprint: Fingerprint


class NotTransferableError(RemoteError):
    """One artifact cannot be taken; others can."""


class BrokenOffError(NotTransferableError):
    """The same, but what has arrived of it is kept."""


@dataclass(frozen=True, slots=True)
class ArtifactTransfer:
    """One artifact, and what becomes of it."""

    stage: str
    fingerprint: Fingerprint
    sealed: Manifest | None
    """None where it cannot be read."""
    content: bytes
    """Of its manifest."""
    state: State
    transfer_bytes: int = 0
    """Bytes of the files that the other side lacks."""
    message: str | None = None
    """Why it was refused."""

    @property
    def id(self) -> str:
        """As a stage run is called."""
        return f"{self.stage}-{self.fingerprint[:12]}"

    @property
    def size_bytes(self) -> int:
        """Of its result; 0 where that is not known."""
        return 0 if self.sealed is None else self.sealed.size_bytes


class Progress:
    """Bytes that have been transferred, told to `show` from any thread. Once it is stopped, transfers end."""

    def __init__(self, show: Callable[[int], None] = lambda _: None) -> None:
        self._show = show
        self._lock = threading.Lock()
        self.done_bytes = 0
        self.stopped = False

    def add(self, size_bytes: int) -> None:
        """More bytes have arrived."""
        if self.stopped:
            raise RemoteError("stopped")
        with self._lock:
            self.done_bytes += size_bytes
            self._show(self.done_bytes)


class Remote:
    """The store at a URL of fsspec, or in a folder. To be closed.

    Credentials and endpoints are found as the URL's package finds them: in its variables and files. `thorough`: what is
    there already counts only once it was read. Raises UsageError for a URL that cannot be one, RemoteError where nobody is there.
    """

    def __init__(self, url: str, *, jobs: int = 8, thorough: bool = False) -> None:
        self.url = shown(url)
        self._thorough = thorough
        self._web = _Web(url) if urlsplit(url).scheme in {"http", "https"} else None
        if self._web is None:
            self._fs, root = _file_system(url)
            self._root = root.rstrip("/")
            self._by_object = bool(getattr(self._fs, "async_impl", False))
            """Whether a file appears there whole or not at all. Else it is written beside and renamed."""
        self._manifest_bytes = 0
        """Of the manifests that were read."""
        self._files = ThreadPoolExecutor(jobs, "files")
        self._pieces = ThreadPoolExecutor(jobs, "pieces")

    def close(self) -> None:
        """End all transfers that have not begun."""
        for pool in (self._files, self._pieces):
            pool.shutdown(cancel_futures=True)
        if self._web is not None:
            self._web.close()

    # what is there

    def check_writable(self) -> None:
        """Raise UsageError for a URL that can only be read."""
        if self._web is not None:
            raise UsageError(
                f"{self.url}: can only be pulled from", hint="push to the s3://, gs:// or az:// address behind it"
            )

    def places(self) -> list[ArtifactKey]:
        """All artifacts that are there. Raises RemoteError, also where a server does not list its files."""
        found = [
            ArtifactKey(stage, Fingerprint(name))
            for stage in self._names("artifacts", _STAGE)
            for name in self._names(f"artifacts/{stage}", _FINGERPRINT)
        ]
        if not found:
            more = "; a web server has to list its folders, or name what you want (--matrix)" if self._web else ""
            raise RemoteError(
                f"{self.url}: no artifacts are there{more}", hint="pipeline store push URL puts some there"
            )
        return sorted(found)

    def candidates(self, places: Collection[ArtifactKey]) -> Collection[ArtifactKey]:
        """Those of `places` that may be there: of many, what lists of their stages have. Raises RemoteError."""
        if len(places) < _LIST_FROM or self._web is not None:  # a web server need not list its folders
            return places
        stages = {place.stage for place in places}
        listed = {(stage, name) for stage in stages for name in self._names(f"artifacts/{stage}", _FINGERPRINT)}
        return [place for place in places if place in listed]

    def _names(self, name: str, form: re.Pattern[str]) -> list[str]:
        """Names of this form in a folder, sorted; none if it is not there. Raises RemoteError."""
        try:
            if self._web is not None:
                links = _HREF.findall(self._content(f"{name}/").decode(errors="replace"))
                paths = [unquote(link) for link in links]
            else:
                with self._asking(name):
                    paths = self._fs.ls(self._path(name), detail=False)
        except FileNotFoundError:
            return []
        except NotTransferableError as error:
            raise RemoteError(f"{self.url}: {error.message}", hint="name what you want with --matrix") from error
        return sorted({each for path in paths if form.fullmatch(each := path.rstrip("/").rpartition("/")[2])})

    def manifest(self, place: ArtifactKey) -> bytes | None:
        """Content of an artifact's manifest; None where there is none. Raises RemoteError."""
        content = self.read(f"artifacts/{place.stage}/{place.fingerprint}/{manifest.NAME}")
        self._manifest_bytes += len(content or b"")
        if self._manifest_bytes > _MOST_MANIFEST_BYTES:
            raise RemoteError(
                f"{self.url}: its manifests have more than {_MOST_MANIFEST_BYTES >> 20} MiB together",
                hint="name fewer artifacts, or a matrix",
            )
        return content

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None where there is none. Raises RemoteError, NotTransferableError beyond 16 MiB."""
        try:
            return self._content(name)
        except FileNotFoundError:
            return None

    def _content(self, name: str) -> bytes:
        most = _MOST_READ_BYTES
        if self._web is None:
            content = self._piece(name, 0, most + 1)
        else:
            received = bytearray()
            for piece in self._web.pieces(name):
                received += piece
                if len(received) > most:
                    break
            content = bytes(received)
        if len(content) > most:
            raise NotTransferableError(f"{name} has more than {most >> 20} MiB")
        return content

    def _piece(self, name: str, start: int, end: int) -> bytes:
        """Bytes of a file, never more than asked for. Raises RemoteError, FileNotFoundError."""
        path = self._path(name)
        with self._asking(name):
            if self._by_object:
                return bytes(self._fs.cat_file(path, start=start, end=end))
            try:
                if self._fs.info(path)["type"] != "file":
                    raise NotTransferableError(f"{name} is not a file there")
                return bytes(self._fs.cat_file(path, start=start, end=end))
            except (IsADirectoryError, NotADirectoryError, PermissionError) as error:  # nothing about other files
                raise NotTransferableError(f"{name}: {error.strerror}") from error

    def _lacks(self, entry: FileEntry) -> bool:
        name = _name(entry)
        try:
            with self._asking(name):
                return bool(self._fs.info(self._path(name))["size"] != entry.size) or (
                    self._thorough and not self._sound(entry)
                )
        except FileNotFoundError:
            return True

    def _sound(self, entry: FileEntry) -> bool:
        """Whether what is there is what its name says: all of it is read."""
        from blake3 import blake3

        digest = blake3()
        with self._asking(_name(entry)), self._fs.open(self._path(_name(entry)), "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        return bool(digest.hexdigest() == entry.digest)

    def lacking(self, sealed: Manifest) -> list[FileEntry]:
        """The files of an artifact whose content is not there, one for each content; or is damaged, if `thorough`."""
        contents = {entry.digest: entry for entry in (*sealed.files, *sealed.records) if entry.link is None}
        known = list(contents.values())
        lacked = list(self._files.map(self._lacks, known))
        return [entry for entry, is_lacked in zip(known, lacked, strict=True) if is_lacked]

    # sending

    def send(self, store: Store, each: ArtifactTransfer, progress: Progress) -> None:
        """Send an artifact: the files that are not there, its signed statement, its manifest. Raises NotTransferableError."""
        assert each.sealed is not None
        folder = store.folder(each.stage, each.fingerprint)
        self.send_contents(folder, each.sealed, progress)
        here = f"artifacts/{each.stage}/{each.fingerprint}"
        with suppress(FileNotFoundError):
            self.write(_envelope(here, each.content), reading.read_bytes(folder / manifest.ENVELOPE))
        self.write(f"{here}/{manifest.NAME}", each.content)

    def send_contents(self, folder: Path, sealed: Manifest, progress: Progress) -> None:
        """Send the files in `folder` whose content is not there. Raises NotTransferableError."""
        paths = _paths(sealed)
        lacked = self.lacking(sealed)
        for _ in _each(
            self._files, lambda entry: self._send(folder / paths[str(entry.digest)][0], entry, progress), lacked
        ):
            pass

    def _send(self, path: Path, entry: FileEntry, progress: Progress) -> None:
        from fsspec.callbacks import Callback

        progress.add(0)
        # What is wrong there could never be replaced: whoever pushes the right content would find it sent.
        if digest_file(path) != entry.digest:
            raise NotTransferableError(f"{path}: its content changed", hint="pipeline store verify")
        told = 0

        def tell(size_bytes: int = 1) -> None:
            nonlocal told
            told += size_bytes
            progress.add(size_bytes)

        callback = Callback()
        callback.relative_update = tell
        self._put(_name(entry), lambda target: self._fs.put_file(str(path), target, callback=callback))
        progress.add(entry.size - told)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file. Raises RemoteError."""
        self._put(name, lambda target: self._fs.pipe_file(target, content))

    def _put(self, name: str, write: Callable[[str], object]) -> None:
        target = self._path(name)
        try:
            with self._asking(name):
                if self._by_object:
                    with suppress(FileExistsError):  # somebody else has sent it: names are contents
                        write(target)
                else:
                    self._put_beside(target, write)
        except FileNotFoundError as error:
            raise RemoteError(
                f"{self.url}: {name}: {error.strerror or error}", hint="make the bucket or the folder first"
            ) from error

    def _put_beside(self, target: str, write: Callable[[str], object]) -> None:
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        beside = f"{target}.{os.getpid()}-{threading.get_ident()}"
        try:
            write(beside)
            self._fs.mv(beside, target)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(beside)
            raise

    def remove(self, name: str) -> None:
        """Remove a folder with all that is in it. Raises RemoteError."""
        with suppress(FileNotFoundError), self._asking(name):
            self._fs.rm(self._path(name), recursive=True)

    # fetching

    def fetch(
        self, store: Store, each: ArtifactTransfer, judge: Callable[[Path], Iterable[Discrepancy]], progress: Progress
    ) -> None:
        """Gather all of an artifact where it arrives, each file checked. Raises NotTransferableError, RemoteError, OSError.

        What an interrupted pull has left there is not fetched again.
        """
        assert each.sealed is not None
        folder = store.arriving(each.stage, each.fingerprint)
        try:
            self.fetch_contents(folder, each.sealed, progress)
            envelope = self.read(_envelope(f"artifacts/{each.stage}/{each.fingerprint}", each.content))
            if envelope is not None:
                (folder / manifest.ENVELOPE).write_bytes(envelope)
            (folder / manifest.NAME).write_bytes(each.content)
            wrong = (*manifest.inspect(folder, contents=False), *judge(folder))
            if wrong:
                raise NotTransferableError(
                    "; ".join(f"{each.path}: {each.message}" if each.path else each.message for each in wrong)
                )
        except (NotTransferableError, OSError) as error:
            if isinstance(error, OSError) and disk.no_room(error, store.workspace) is not None:
                raise
            if not isinstance(error, BrokenOffError):
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise NotTransferableError(str(error)) from error
            raise

    def fetch_contents(self, folder: Path, sealed: Manifest, progress: Progress) -> None:
        """Gather the files of an artifact in `folder`, each checked, and nothing else. Raises NotTransferableError, RemoteError, OSError.

        What is there already is not fetched again.
        """
        if fault := transferable.contents_fault(sealed):
            raise NotTransferableError(fault)
        paths = _paths(sealed)
        _tidy(folder, {name for names in paths.values() for name in names})
        parts = folder / PARTS
        parts.mkdir(parents=True, exist_ok=True)
        known = {str(entry.digest): entry for entry in (*sealed.files, *sealed.records)}

        def arrive(digest: str) -> None:
            self._arrive(folder, parts / digest, known[digest], paths[digest], progress)

        for _ in _each(self._files, arrive, paths):
            pass
        parts.rmdir()
        _link(folder / OUT, sealed)

    def _arrive(self, folder: Path, part: Path, entry: FileEntry, names: Sequence[str], progress: Progress) -> None:
        """Fetch one content to all `names` that it has."""
        first = folder / names[0]
        first.parent.mkdir(parents=True, exist_ok=True)
        if not (first.is_file() and first.stat().st_size == entry.size and digest_file(first) == entry.digest):
            first.unlink(missing_ok=True)
            self._fetch(part, entry, progress)
            part.replace(first)
        for name in names[1:]:
            progress.add(0)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).unlink(missing_ok=True)
            shutil.copyfile(first, folder / name)
        for name in names:
            if name.startswith(f"{OUT}/"):
                (folder / name).chmod((folder / name).stat().st_mode & ~0o222)

    def _fetch(self, part: Path, entry: FileEntry, progress: Progress) -> None:
        name = _name(entry)
        resumed = part.exists()
        try:
            if self._stream(part, entry, progress):
                return
            part.unlink()
            # What was left by a power loss may not be what had arrived.
            if resumed and self._stream(part, entry, progress):
                return
        except FileNotFoundError as error:
            if not part.parent.is_dir():
                raise
            raise NotTransferableError(f"{name} is missing there") from error
        part.unlink(missing_ok=True)
        raise NotTransferableError(f"{name} is damaged there: its content is not what its name says")

    def _stream(self, part: Path, entry: FileEntry, progress: Progress) -> bool:
        """Fetch what `part` lacks; whether it is then what it should be."""
        name = _name(entry)

        def piece(start: int) -> bytes:
            progress.add(0)
            return self._piece(name, start, min(start + _PIECE_BYTES, entry.size))

        with part.open("ab") as file:
            if file.tell() > entry.size:
                file.truncate(0)
                file.seek(0)
            progress.add(file.tell())
            start = file.tell()
            if start == entry.size:
                pieces: Iterable[bytes] = ()
            elif self._web is None:
                pieces = _each(self._pieces, piece, range(start, entry.size, _PIECE_BYTES), _AHEAD)
            else:
                pieces = self._web.pieces(name, start)
            for content in pieces:
                file.write(content[: entry.size - file.tell()])
                progress.add(len(content))
                if file.tell() == entry.size:
                    break
        return part.stat().st_size == entry.size and digest_file(part) == entry.digest

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """What a file system raises, as an error of ours; FileNotFoundError as it is."""
        try:
            yield
        except (FileNotFoundError, PipelineError):
            raise
        except ImportError as error:
            raise UsageError(f"{self.url}: {error}", hint="pip install the package that it names") from error
        except Exception as error:  # each file system has its own
            if isinstance(error.__cause__, RemoteError):
                raise error.__cause__ from None
            said = str(error).strip().splitlines()
            why = getattr(error, "strerror", None) or (said[0] if said else type(error).__name__)
            raise RemoteError(
                f"{self.url}: {name}: {why}",
                hint="check the address and the credentials; what was transferred is kept, the same command goes on",
            ) from error


class _Web:
    """A web server that is pulled from."""

    def __init__(self, url: str) -> None:
        import httpx

        self._url = url.rstrip("/")
        # What is compressed may become any size. Digests are of what is sent.
        self._client = httpx.Client(
            headers={"accept-encoding": "identity"}, follow_redirects=True, timeout=httpx.Timeout(30.0, pool=None)
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def pieces(self, name: str, start: int = 0) -> Iterator[bytes]:
        """Content of a file from byte `start`, as it arrives.

        Raises FileNotFoundError, BrokenOffError, NotTransferableError for a status, and RemoteError if nothing listens.
        """
        import httpx

        begun, received = time.monotonic(), 0
        headers = {"range": f"bytes={start}-"} if start else {}
        try:
            with self._client.stream("GET", f"{self._url}/{name}", headers=headers) as response:
                _check_status(response, name)
                skipped = 0 if response.status_code == httpx.codes.PARTIAL_CONTENT else start
                for piece in response.iter_raw():
                    received += len(piece)
                    if (took_s := time.monotonic() - begun) > _SLOW_AFTER_S and received < took_s * _SLOWEST_BYTES_S:
                        raise BrokenOffError(f"{name}: arrives at less than {_SLOWEST_BYTES_S} bytes per second")
                    yield piece[skipped:]
                    skipped = max(0, skipped - len(piece))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise RemoteError(f"{shown(self._url)}: {error}", hint="check the address") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise BrokenOffError(f"{name}: {str(error) or type(error).__name__}") from error


def _check_status(response: httpx.Response, name: str) -> None:
    status = response.status_code
    if status in {404, 410}:
        raise FileNotFoundError(name)
    if status >= 300:
        raise BrokenOffError(f"{name}: the server answers with HTTP {status}")


def shown(url: str) -> str:
    """A URL without the password that may stand in it."""
    return re.sub(r"(?<=://)[^/@]*@", "", url).rstrip("/")


def _file_system(url: str) -> tuple[Any, str]:
    scheme = urlsplit(url).scheme
    if not url:
        raise UsageError("the URL is empty", hint="s3://BUCKET/FOLDER, gs://..., az://..., https://..., or a folder")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(
            "a remote store needs the package fsspec", hint="pip install 'trtllm-pipeline[remote]'"
        ) from error
    try:
        # What others push meanwhile has to be seen.
        found, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        package = _BACKENDS.get(scheme)
        hint = f"pip install {package}" if package else None
        raise UsageError(f"{shown(url)}: {scheme}:// needs another package: {error}", hint=hint) from error
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{shown(url)}: {error}", hint="s3://BUCKET/FOLDER, gs://..., az://..., https://..., or a folder"
        ) from error
    except Exception as error:  # each file system has its own, and some connect at once
        raise RemoteError(f"{shown(url)}: {error}", hint="check the address and the credentials") from error
    return found, str(root)


def _name(entry: FileEntry) -> str:
    return f"files/{str(entry.digest)[:2]}/{entry.digest}"


def _envelope(folder: str, content: bytes) -> str:
    from blake3 import blake3

    return f"{folder}/{blake3(content).hexdigest()}.intoto.jsonl"


def _paths(sealed: Manifest) -> dict[str, list[str]]:
    """Where each content stands in an artifact's folder, by its digest; the folder's own files too."""
    found: dict[str, list[str]] = {}
    for prefix, entries in ((f"{OUT}/", sealed.files), ("", sealed.records)):
        for entry in entries:
            if entry.link is None:
                found.setdefault(str(entry.digest), []).append(f"{prefix}{entry.path}")
    return found


def _tidy(folder: Path, names: set[str]) -> None:
    """Remove from what has arrived all that is not one of these files, links before all."""
    if not folder.is_dir():
        return
    for path in list(manifest.walk(folder)):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not (name in names or name.startswith(f"{PARTS}/")):
            path.unlink()


def _link(out: Path, sealed: Manifest) -> None:
    """Make the links, after all files: nothing is written through one."""
    out.mkdir(exist_ok=True)
    for entry in sealed.files:
        if entry.link is not None:
            (out / entry.path).parent.mkdir(parents=True, exist_ok=True)
            (out / entry.path).symlink_to(entry.link)


def _each(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], ahead: int | None = None
) -> Iterator[R]:
    """The results in order, at most `ahead` of them kept; after an error nothing is begun, and nothing goes on."""
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            if ahead is not None and len(waiting) == ahead:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        # A pool that was shut down meanwhile cancels futures without notifying waiters. Wait only for running ones.
        wait([future for future in waiting if not future.cancel()])


# whole selections


def compare_to_push(store: Store, remote: Remote, chosen: Iterable[ArtifactKey]) -> list[ArtifactTransfer]:
    """What of the artifacts `chosen` is to be pushed: those of which the remote lacks anything."""

    def compare(place: ArtifactKey) -> ArtifactTransfer:
        folder = store.folder(*place)
        content = reading.read_bytes(folder / manifest.NAME)
        sealed = manifest.decode(content, *place, str(folder / manifest.NAME))
        ours = ArtifactTransfer(*place, sealed, content, "pending")
        if fault := transferable.fault(sealed):
            return replace(ours, state="refused", message=fault)
        there = _read_manifest(remote, place)
        # Another machine's is as good, if it is whole.
        if there.sealed is not None and there.content != content and not remote.lacking(there.sealed):
            return replace(ours, state="present")
        lacked = remote.lacking(sealed)
        is_there = there.content == content and not lacked and not _unsent_signature(remote, place, folder, content)
        size = sum(entry.size for entry in lacked)
        return replace(ours, state="present" if is_there else "pending", transfer_bytes=size)

    with ThreadPoolExecutor(_AHEAD) as pool:
        return list(_each(pool, compare, chosen))


def _unsent_signature(remote: Remote, place: ArtifactKey, folder: Path, content: bytes) -> bool:
    try:
        ours = reading.read_bytes(folder / manifest.ENVELOPE)
    except FileNotFoundError:
        return False
    return ours != remote.read(_envelope(f"artifacts/{place.stage}/{place.fingerprint}", content))


def _read_manifest(remote: Remote, place: ArtifactKey) -> ArtifactTransfer:
    """An artifact that is there, as it says itself."""
    try:
        content = remote.manifest(place)
        if content is None:
            return ArtifactTransfer(*place, None, b"", "pending")
        sealed = manifest.decode(content, *place, f"{remote.url}: {place.stage} {place.fingerprint}")
    except (StateError, NotTransferableError) as error:
        return ArtifactTransfer(*place, None, b"", "refused", message=error.message)
    fault = transferable.fault(sealed)
    if fault is not None:
        return ArtifactTransfer(*place, None, b"", "refused", message=f"its manifest is not valid: {fault}")
    return ArtifactTransfer(
        *place, sealed, content, "pending", sum(entry.size for entry in (*sealed.files, *sealed.records))
    )


def push(
    store: Store, remote: Remote, pending: Iterable[ArtifactTransfer], progress: Progress
) -> Iterator[ArtifactTransfer]:
    """Push what `compare_to_push` found; yields each with what became of it. Raises RemoteError."""

    def send(each: ArtifactTransfer) -> ArtifactTransfer:
        try:
            remote.send(store, each, progress)
        except NotTransferableError as error:
            return replace(each, state="refused", message=error.message)
        except FileNotFoundError as error:
            return replace(each, state="refused", message=f"{error.filename}: is gone")
        return replace(each, state="done")

    with ThreadPoolExecutor(_AHEAD) as pool:
        try:
            yield from _each(pool, send, pending, _AHEAD)
        except BaseException:
            progress.stopped = True
            raise


def offered(
    remote: Remote, places: Collection[ArtifactKey], gpus: Collection[str]
) -> dict[ArtifactKey, ArtifactTransfer]:
    """Those of `places` that are there: to be pulled, or refused with the reason.

    Where `gpus` has the names of this machine's, engines that were made on GPUs of other names are refused: their keys have the
    compute capability alone. Raises RemoteError.
    """
    with ThreadPoolExecutor(2 * _AHEAD) as pool:
        found = list(_each(pool, partial(_read_manifest, remote), remote.candidates(places)))
    return {
        ArtifactKey(each.stage, each.fingerprint): _for_gpus(each, gpus)
        for each in found
        if each.sealed is not None or each.message is not None
    }


def _for_gpus(each: ArtifactTransfer, gpus: Collection[str]) -> ArtifactTransfer:
    made_on = set() if each.sealed is None else _made_for(each.sealed)
    if not gpus or not made_on or made_on.intersection(gpus):
        return each
    return replace(
        each,
        state="refused",
        message=f"was made on {' and '.join(sorted(made_on))}, this machine has {' and '.join(sorted(set(gpus)))} "
        "(--allow-other-gpu takes it)",
    )


def _made_for(sealed: Manifest) -> set[str]:
    """Names of the GPUs that an engine was made on; empty for what is not made for a GPU, or does not tell."""
    system = sealed.provenance.get("system")
    told = system.get("gpus") if isinstance(system, dict) else None
    if "sm" not in json.loads(sealed.key).get("identity", {}) or not isinstance(told, list):
        return set()
    return {str(each).rpartition(",")[0] for each in told}


def compare_to_pull(
    store: Store, remote: Remote, chosen: Sequence[ArtifactKey], gpus: Collection[str] = ()
) -> list[ArtifactTransfer]:
    """What of `chosen` is to be pulled, or refused as `offered` says; what is neither there nor here is left out."""
    known = store.present({place.fingerprint: place.stage for place in chosen})
    found = offered(remote, [place for place in chosen if place.fingerprint not in known], gpus)
    told = []
    for place in chosen:
        if place.fingerprint not in known:
            told += [found[place]] if place in found else []
        else:
            sealed = manifest.read(store.folder(*place))
            told.append(ArtifactTransfer(*place, sealed, b"", "present"))
    return told


def check_room(store: Store, pending: Iterable[ArtifactTransfer]) -> None:
    """Raise StateError if what is to be pulled does not fit on the workspace's disk. `pull` refuses what does not fit alone."""
    free = shutil.disk_usage(store.workspace).free
    needed = sum(each.transfer_bytes for each in pending if each.transfer_bytes <= free)
    if needed > free:
        raise StateError(
            f"{store.workspace}: {needed / 1e9:.1f} GB are to be pulled, {free / 1e9:.1f} GB are free",
            hint="select less, free some space (pipeline store gc --unused-days 30), or choose another --workspace",
        )


def pull(
    store: Store,
    remote: Remote,
    pending: Iterable[ArtifactTransfer],
    judge: Callable[[Path], Iterable[Discrepancy]],
    progress: Progress,
) -> Iterator[ArtifactTransfer]:
    """Pull what `compare_to_pull` found; yields each with what became of it. Nothing is published that is not whole.

    `judge` says what is wrong with one that has arrived. What another process works on is left to it. Raises RemoteError,
    and StateError for a full disk.
    """
    waiting: deque[tuple[ArtifactTransfer, Claim, Future[None]]] = deque()

    def received() -> ArtifactTransfer:
        each, claim, future = waiting[0]
        try:
            future.result()
            assert each.sealed is not None
            store.receive(each.sealed)
            return replace(each, state="done")
        except NotTransferableError as error:
            return replace(each, state="refused", message=error.message)
        finally:
            if future.done():
                waiting.popleft()
                claim.release()

    store.check_writable()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_AHEAD))
        try:
            for each in pending:
                free = shutil.disk_usage(store.workspace).free
                if each.transfer_bytes > free:
                    message = f"it has {each.transfer_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on the disk"
                    yield replace(each, state="refused", message=message)
                    continue
                claim = store.claim(each.fingerprint)
                if claim is None:
                    yield replace(each, state="busy")
                elif store.get(each.stage, each.fingerprint) is not None:  # made meanwhile
                    claim.release()
                    yield replace(each, state="present")
                else:
                    # Before anybody can look what the claim is for: what is pulled is waited for, not made.
                    store.arriving(each.stage, each.fingerprint).mkdir(parents=True, exist_ok=True)
                    waiting.append((each, claim, pool.submit(remote.fetch, store, each, judge, progress)))
                    if len(waiting) == _AHEAD:
                        yield received()
            while waiting:
                yield received()
        except OSError as error:
            told = disk.no_room(error, store.workspace)
            if told is None:
                raise
            raise StateError(
                f"{told}, while artifacts were pulled",
                hint=f"{'raise the limit' if error.errno == errno.EFBIG else 'free some space'}; "
                "the same command goes on from there",
            ) from error
        finally:
            progress.stopped = progress.stopped or bool(waiting)
            for _, claim, future in waiting:
                future.cancel()
                with suppress(Exception):
                    future.exception()
                claim.release()
