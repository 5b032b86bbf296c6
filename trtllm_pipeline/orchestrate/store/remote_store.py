"""A remote store: artifacts at a URL that several machines push to and pull from.

    URL/artifacts/STAGE/FINGERPRINT/manifest.json   the artifact's manifest; sent last
    URL/artifacts/STAGE/FINGERPRINT/DIGEST/         its files and its signed statement, as in a workspace

DIGEST is the BLAKE3 of the manifest, so two builds of one artifact never mix. An artifact without a manifest does not
exist. A pull trusts digests and never the remote: `transferable` checks manifests, every response has a limit, and an
invalid artifact is refused without affecting others.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

from blake3 import blake3

from trtllm_pipeline.base import (
    Fingerprint,
    PipelineError,
    RemoteError,
    StateError,
    UsageError,
    digest_file,
    disk,
    reading,
)
from trtllm_pipeline.orchestrate.store import manifest, transferable
from trtllm_pipeline.orchestrate.store.manifest import Discrepancy, FileEntry, Manifest
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import OUT

if TYPE_CHECKING:
    import httpx

BOUND: Final = frozenset({"repository"})
"""Stages whose results contain absolute paths of their workspace, and take a second to rebuild."""
_PIECE_BYTES: Final = 8 << 20
_AHEAD: Final = 4
"""Concurrent pieces of one file."""
_LIST_FROM: Final = 200
"""From this number of artifacts, list all instead of checking each of them."""
_MOST_READ_BYTES: Final = 16 << 20
"""Maximum size of a small file or a listing."""
_MOST_MANIFEST_BYTES: Final = 256 << 20
"""Maximum size of all manifests, which stay in memory during transfers."""
_SLOWEST_BYTES_S: Final = 1000
_SLOW_AFTER_S: Final = 20.0
"""A web server that is slower than this after this time is abandoned."""
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
    """Identifies an artifact."""

    stage: str
    fingerprint: Fingerprint


class NotTransferableError(RemoteError):
    """One artifact cannot be transferred. Others can."""


@dataclass(frozen=True, slots=True)
class ArtifactTransfer:
    """One artifact and its transfer state."""

    stage: str
    fingerprint: Fingerprint
    sealed: Manifest | None
    """None if it cannot be read."""
    content: bytes
    """Content of its manifest."""
    state: State
    transfer_bytes: int = 0
    message: str | None = None
    """Why it was refused."""

    @property
    def id(self) -> str:
        """Name of the stage run."""
        return f"{self.stage}-{self.fingerprint[:12]}"

    @property
    def size_bytes(self) -> int:
        """Size of its result; 0 if unknown."""
        return 0 if self.sealed is None else self.sealed.size_bytes


class Progress:
    """Transferred bytes, reported to `show` from any thread. After `stopped` is set, transfers end."""

    def __init__(self, show: Callable[[int], None] = lambda _: None) -> None:
        self._show = show
        self._lock = threading.Lock()
        self.done_bytes = 0
        self.stopped = False

    def add(self, size_bytes: int) -> None:
        if self.stopped:
            raise RemoteError("stopped")
        with self._lock:
            self.done_bytes += size_bytes
            self._show(self.done_bytes)


class Remote:
    """The store at an fsspec URL, or in a directory. Must be closed.

    The URL's package finds credentials and endpoints in its variables and files. `thorough`: an existing artifact counts
    only after all its files were read. Raises UsageError for an invalid URL, RemoteError if it does not respond.
    """

    def __init__(self, url: str, *, jobs: int = 8, thorough: bool = False) -> None:
        self.url = shown(url)
        self.thorough = thorough
        self._web = _Web(url) if urlsplit(url).scheme in {"http", "https"} else None
        if self._web is None:
            self._fs, root = _file_system(url)
            self._root = root.rstrip("/")
            self._by_object = bool(getattr(self._fs, "async_impl", False))
            """True if writes are atomic. If not, a temporary file is written and renamed."""
        self._manifest_bytes = 0
        """Size of the manifests read so far."""
        self._small = ThreadPoolExecutor(jobs, "small files")
        self._files = ThreadPoolExecutor(jobs, "files")
        self._pieces = ThreadPoolExecutor(jobs, "pieces")

    def close(self) -> None:
        """Cancel all transfers that have not started."""
        for pool in (self._small, self._files, self._pieces):
            pool.shutdown(cancel_futures=True)
        if self._web is not None:
            self._web.close()

    # listing

    def check_writable(self) -> None:
        """Raise UsageError for a read-only URL."""
        if self._web is not None:
            raise UsageError(f"{self.url}: is read-only", hint="push to the s3://, gs:// or az:// address behind it")

    def places(self) -> list[ArtifactKey]:
        """Return all artifacts. Raises RemoteError, also if a server does not list its files."""
        keys = [
            ArtifactKey(stage, Fingerprint(name))
            for stage in self._names("artifacts", _STAGE)
            for name in self._names(f"artifacts/{stage}", _FINGERPRINT)
        ]
        if not keys:
            more = "; a web server must list its directories, or select artifacts with --matrix" if self._web else ""
            raise RemoteError(f"{self.url}: has no artifacts{more}", hint="push some with pipeline store push URL")
        return sorted(keys)

    def candidates(self, places: Collection[ArtifactKey]) -> Collection[ArtifactKey]:
        """Return those of `places` that may exist: if there are many, those in the listings of their stages. Raises RemoteError."""
        if len(places) < _LIST_FROM or self._web is not None:  # a web server need not list its directories
            return places
        stages = {place.stage for place in places}
        listed = {(stage, name) for stage in stages for name in self._names(f"artifacts/{stage}", _FINGERPRINT)}
        return [place for place in places if place in listed]

    def _names(self, name: str, form: re.Pattern[str]) -> list[str]:
        """Return names of this form in a directory, sorted. Empty if it does not exist. Raises RemoteError."""
        try:
            if self._web is not None:
                links = _HREF.findall(self._content(f"{name}/").decode(errors="replace"))
                paths = [unquote(link) for link in links]
            else:
                with self._converted_errors(name):
                    paths = self._fs.ls(self._path(name), detail=False)
        except FileNotFoundError:
            return []
        except NotTransferableError as error:
            raise RemoteError(f"{self.url}: {error.message}", hint="select artifacts with --matrix") from error
        return sorted({each for path in paths if form.fullmatch(each := path.rstrip("/").rpartition("/")[2])})

    def manifest(self, place: ArtifactKey) -> bytes | None:
        """Return the content of an artifact's manifest. None if it does not exist. Raises RemoteError."""
        content = self.read(f"artifacts/{place.stage}/{place.fingerprint}/{manifest.NAME}")
        self._manifest_bytes += len(content or b"")
        if self._manifest_bytes > _MOST_MANIFEST_BYTES:
            raise RemoteError(
                f"{self.url}: its manifests have more than {_MOST_MANIFEST_BYTES >> 20} MiB together",
                hint="select fewer artifacts, or a matrix",
            )
        return content

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file. None if it does not exist. Raises RemoteError, NotTransferableError beyond 16 MiB."""
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
        """Return bytes of a file, never more than requested. Raises RemoteError, FileNotFoundError."""
        path = self._path(name)
        with self._converted_errors(name):
            if self._by_object:
                return bytes(self._fs.cat_file(path, start=start, end=end))
            try:
                if self._fs.info(path)["type"] != "file":
                    raise NotTransferableError(f"{name} is not a file there")
                return bytes(self._fs.cat_file(path, start=start, end=end))
            except (IsADirectoryError, NotADirectoryError, PermissionError) as error:  # does not affect other files
                raise NotTransferableError(f"{name}: {error.strerror}") from error

    def compared(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield the results of a function that reads small files of the remote, in order."""
        return _each(self._small, function, items)

    def is_sound(self, name: str, sealed: Manifest) -> bool:
        """Return True if all files of an artifact are in `name`. Reads all of them."""
        try:
            self._each(lambda item: self._receive(f"{name}/{item[0]}", item[1]), sealed)
        except NotTransferableError:
            return False
        return True

    # sending

    def send(self, store: Store, each: ArtifactTransfer, progress: Progress) -> None:
        """Send an artifact: missing files, its signed statement, its manifest. Raises NotTransferableError."""
        assert each.sealed is not None
        folder, here = store.folder(each.stage, each.fingerprint), _place(each)
        name = f"{here}/{manifest.NAME}"
        if self.thorough or self.read(name) != each.content:
            self.send_files(_contents(here, each.content), folder, each.sealed, progress)
        with suppress(FileNotFoundError):
            envelope = reading.read_bytes(folder / manifest.ENVELOPE)
            self.write(f"{_contents(here, each.content)}/{manifest.ENVELOPE}", envelope)
        self.write(name, each.content)

    def send_files(self, name: str, folder: Path, sealed: Manifest, progress: Progress) -> None:
        """Send the files in `folder` to `name`. Raises NotTransferableError."""
        from fsspec.callbacks import Callback

        def send(item: tuple[str, FileEntry]) -> None:
            path, entry = item
            reported = 0

            def report(size_bytes: int = 1) -> None:
                nonlocal reported
                reported += size_bytes
                progress.add(size_bytes)

            report(0)
            if digest_file(folder / path) != entry.digest:
                raise NotTransferableError(f"{folder / path}: its content changed", hint="pipeline store verify")
            callback = Callback()
            callback.relative_update = report
            self._put(f"{name}/{path}", lambda target: self._fs.put_file(str(folder / path), target, callback=callback))
            report(entry.size - reported)

        self._each(send, sealed, progress)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file. Raises RemoteError."""
        self._put(name, lambda target: self._fs.pipe_file(target, content))

    def _put(self, name: str, write: Callable[[str], object]) -> None:
        target = self._path(name)
        try:
            with self._converted_errors(name):
                if self._by_object:
                    with suppress(FileExistsError):  # another process has already sent it
                        write(target)
                else:
                    self._put_temporary(target, write)
        except FileNotFoundError as error:
            raise RemoteError(
                f"{self.url}: {name}: {error.strerror or error}", hint="create the bucket or the directory first"
            ) from error

    def _put_temporary(self, target: str, write: Callable[[str], object]) -> None:
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        temporary = f"{target}.{os.getpid()}-{threading.get_ident()}"
        try:
            write(temporary)
            self._fs.mv(temporary, target)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def remove(self, name: str) -> None:
        """Remove a directory and its content. Raises RemoteError."""
        with suppress(FileNotFoundError), self._converted_errors(name):
            self._fs.rm(self._path(name), recursive=True)

    # fetching

    def fetch(
        self, store: Store, each: ArtifactTransfer, judge: Callable[[Path], Iterable[Discrepancy]], progress: Progress
    ) -> None:
        """Fetch an artifact into `Store.arriving`, with every file checked. Raises NotTransferableError, RemoteError, OSError."""
        assert each.sealed is not None
        folder, name = store.arriving(each.stage, each.fingerprint), _contents(_place(each), each.content)
        try:
            self.fetch_files(name, folder, each.sealed, progress)
            envelope = self.read(f"{name}/{manifest.ENVELOPE}")
            if envelope is not None:
                (folder / manifest.ENVELOPE).write_bytes(envelope)
            (folder / manifest.NAME).write_bytes(each.content)
            wrong = (*manifest.inspect(folder, contents=False), *judge(folder))
            if wrong:
                raise NotTransferableError(
                    "; ".join(f"{each.path}: {each.message}" if each.path else each.message for each in wrong)
                )
        except BaseException as error:
            store.discard(each.stage, each.fingerprint)
            if isinstance(error, OSError) and disk.no_room(error, store.workspace) is None:
                raise NotTransferableError(str(error)) from error
            raise

    def fetch_files(self, name: str, folder: Path, sealed: Manifest, progress: Progress) -> None:
        """Fetch files from `name` into the empty `folder`, each checked. Raises NotTransferableError, RemoteError, OSError."""
        if fault := transferable.contents_fault(sealed):
            raise NotTransferableError(fault)

        def fetch(item: tuple[str, FileEntry]) -> None:
            path, entry = item
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("xb") as file:

                def write(content: bytes) -> None:
                    file.write(content)
                    progress.add(len(content))

                self._receive(f"{name}/{path}", entry, write)
                if path.startswith(f"{OUT}/"):
                    os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & ~0o222)

        self._each(fetch, sealed, progress)
        # Links come after all files, so no file is written through one.
        (folder / OUT).mkdir(parents=True, exist_ok=True)
        for entry in sealed.files:
            if entry.link is not None:
                (folder / OUT / entry.path).parent.mkdir(parents=True, exist_ok=True)
                (folder / OUT / entry.path).symlink_to(entry.link)

    def _receive(self, name: str, entry: FileEntry, write: Callable[[bytes], None] = lambda _: None) -> None:
        """Read a file, never more than its size. Raises NotTransferableError if its content differs, RemoteError."""

        def piece(start: int) -> bytes:
            return self._piece(name, start, min(start + _PIECE_BYTES, entry.size))

        digest, left = blake3(), entry.size
        starts = range(0, entry.size, _PIECE_BYTES)
        try:
            for content in _each(self._pieces, piece, starts, _AHEAD) if self._web is None else self._web.pieces(name):
                content = content[:left]
                left -= len(content)
                digest.update(content)
                write(content)
                if not left:
                    break
        except FileNotFoundError as error:
            raise NotTransferableError(f"{name} is missing there") from error
        if left or digest.hexdigest() != entry.digest:
            raise NotTransferableError(f"{name} is damaged there: it does not match its digest")

    def _each(
        self, function: Callable[[tuple[str, FileEntry]], None], sealed: Manifest, progress: Progress | None = None
    ) -> None:
        """Call `function` with path and entry of each file in an artifact's directory, without links."""
        files = [(f"{OUT}/{entry.path}", entry) for entry in sealed.files if entry.link is None]
        files += [(entry.path, entry) for entry in sealed.records]
        for _ in _each(self._files, function, files, None, progress):
            pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _converted_errors(self, name: str) -> Iterator[None]:
        """Convert errors of a file system to ours, except FileNotFoundError."""
        try:
            yield
        except (FileNotFoundError, PipelineError):
            raise
        except ImportError as error:
            raise UsageError(f"{self.url}: {error}", hint="pip install the package that it names") from error
        except Exception as error:  # each file system has its own errors
            if isinstance(error.__cause__, RemoteError):
                raise error.__cause__ from None
            lines = str(error).strip().splitlines()
            why = getattr(error, "strerror", None) or (lines[0] if lines else type(error).__name__)
            raise RemoteError(
                f"{self.url}: {name}: {why}",
                hint="check the address and the credentials, then run the same command again",
            ) from error


class _Web:
    """A web server to pull from."""

    def __init__(self, url: str) -> None:
        import httpx

        self._url = url.rstrip("/")
        # Compressed data could expand to any size, and digests are of the data as sent.
        self._client = httpx.Client(
            headers={"accept-encoding": "identity"}, follow_redirects=True, timeout=httpx.Timeout(30.0, pool=None)
        )

    def close(self) -> None:
        self._client.close()

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file as it arrives.

        Raises FileNotFoundError, NotTransferableError for an HTTP status, and RemoteError if no server listens.
        """
        import httpx

        begun, received = time.monotonic(), 0
        try:
            with self._client.stream("GET", f"{self._url}/{quote(name)}") as response:
                _check_status(response, name)
                for piece in response.iter_raw():
                    received += len(piece)
                    if (took_s := time.monotonic() - begun) > _SLOW_AFTER_S and received < took_s * _SLOWEST_BYTES_S:
                        raise NotTransferableError(f"{name}: arrives at less than {_SLOWEST_BYTES_S} bytes per second")
                    yield piece
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise RemoteError(f"{shown(self._url)}: {error}", hint="check the address") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise NotTransferableError(f"{name}: {str(error) or type(error).__name__}") from error


def _check_status(response: httpx.Response, name: str) -> None:
    status = response.status_code
    if status in {404, 410}:
        raise FileNotFoundError(name)
    if status >= 300:
        raise NotTransferableError(f"{name}: the server responded with HTTP {status}")


def shown(url: str) -> str:
    """Return a URL without its password."""
    return re.sub(r"(?<=://)[^/@]*@", "", url).rstrip("/")


def _file_system(url: str) -> tuple[Any, str]:
    scheme = urlsplit(url).scheme
    if not url:
        raise UsageError("the URL is empty", hint="s3://BUCKET/FOLDER, gs://..., az://..., https://..., or a directory")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(
            "a remote store needs the package fsspec", hint="pip install 'trtllm-pipeline[remote]'"
        ) from error
    try:
        # Concurrent pushes must be visible.
        file_system, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        package = _BACKENDS.get(scheme)
        hint = f"pip install {package}" if package else None
        raise UsageError(f"{shown(url)}: {scheme}:// needs another package: {error}", hint=hint) from error
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{shown(url)}: {error}", hint="s3://BUCKET/FOLDER, gs://..., az://..., https://..., or a directory"
        ) from error
    except Exception as error:  # each file system has its own errors, and some connect at once
        raise RemoteError(f"{shown(url)}: {error}", hint="check the address and the credentials") from error
    return file_system, str(root)


def _place(each: ArtifactTransfer | ArtifactKey) -> str:
    return f"artifacts/{each.stage}/{each.fingerprint}"


def _contents(place: str, content: bytes) -> str:
    return f"{place}/{blake3(content).hexdigest()}"


def _each(
    pool: ThreadPoolExecutor,
    function: Callable[[T], R],
    items: Iterable[T],
    ahead: int | None = None,
    progress: Progress | None = None,
) -> Iterator[R]:
    """Yield results in order, keeping at most `ahead`. After an error no work is started. An interrupt stops `progress`."""
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            if ahead is not None and len(waiting) == ahead:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()
    except BaseException as error:
        if progress is not None and not isinstance(error, NotTransferableError):
            progress.stopped = True
        raise
    finally:
        # A pool that was shut down meanwhile cancels futures without notifying waiters. Wait only for running ones.
        wait([future for future in waiting if not future.cancel()])


# whole selections


def compare_to_push(store: Store, remote: Remote, chosen: Iterable[ArtifactKey]) -> list[ArtifactTransfer]:
    """Return the artifacts `chosen`, each present in the remote, pending or refused."""
    return list(remote.compared(partial(_compare_to_push, store, remote), chosen))


def _compare_to_push(store: Store, remote: Remote, place: ArtifactKey) -> ArtifactTransfer:
    folder = store.folder(*place)
    content = reading.read_bytes(folder / manifest.NAME)
    sealed = manifest.decode(content, *place, str(folder / manifest.NAME))
    ours = ArtifactTransfer(*place, sealed, content, "pending", _size(sealed))
    if fault := transferable.fault(sealed):
        return replace(ours, state="refused", message=fault)
    theirs = _read_manifest(remote, place)
    here = _contents(_place(place), theirs.content)
    if theirs.sealed is None or (remote.thorough and not remote.is_sound(here, theirs.sealed)):
        return ours
    with suppress(FileNotFoundError):  # it may have been signed after the push
        signed = reading.read_bytes(folder / manifest.ENVELOPE)
        if theirs.content == content and remote.read(f"{here}/{manifest.ENVELOPE}") != signed:
            return replace(ours, transfer_bytes=0)
    return replace(ours, state="present", transfer_bytes=0)  # another machine's build is as good


def _size(sealed: Manifest) -> int:
    return sum(entry.size for entry in (*sealed.files, *sealed.records))


def _read_manifest(remote: Remote, place: ArtifactKey) -> ArtifactTransfer:
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
    return ArtifactTransfer(*place, sealed, content, "pending", _size(sealed))


def push(
    store: Store, remote: Remote, pending: Iterable[ArtifactTransfer], progress: Progress
) -> Iterator[ArtifactTransfer]:
    """Push the result of `compare_to_push`. Yields each with its new state. Raises RemoteError."""
    for each in pending:
        try:
            remote.send(store, each, progress)
            yield replace(each, state="done")
        except NotTransferableError as error:
            yield replace(each, state="refused", message=error.message)
        except FileNotFoundError as error:
            yield replace(each, state="refused", message=f"{error.filename}: is gone")


def offered(
    remote: Remote, places: Collection[ArtifactKey], gpus: Collection[str]
) -> dict[ArtifactKey, ArtifactTransfer]:
    """Return those of `places` that exist: pending, or refused with a reason.

    If `gpus` names this machine's GPUs, engines built on GPUs of other names are refused, since their keys only have the
    compute capability. Raises RemoteError.
    """
    transfers = remote.compared(partial(_read_manifest, remote), remote.candidates(places))
    return {
        ArtifactKey(each.stage, each.fingerprint): _for_gpus(each, gpus)
        for each in transfers
        if each.sealed is not None or each.message is not None
    }


def _for_gpus(each: ArtifactTransfer, gpus: Collection[str]) -> ArtifactTransfer:
    made_on = set() if each.sealed is None else _made_for(each.sealed)
    if not gpus or not made_on or made_on.intersection(gpus):
        return each
    return replace(
        each,
        state="refused",
        message=f"was built on {' and '.join(sorted(made_on))}, this machine has {' and '.join(sorted(set(gpus)))} "
        "(--allow-other-gpu accepts it)",
    )


def _made_for(sealed: Manifest) -> set[str]:
    """Return the names of the GPUs that an engine was built on. Empty for other artifacts, or if not recorded."""
    system = sealed.provenance.get("system")
    gpus = system.get("gpus") if isinstance(system, dict) else None
    if "sm" not in json.loads(sealed.key).get("identity", {}) or not isinstance(gpus, list):
        return set()
    return {str(each).rpartition(",")[0] for each in gpus}


def compare_to_pull(
    store: Store, remote: Remote, chosen: Sequence[ArtifactKey], gpus: Collection[str] = ()
) -> list[ArtifactTransfer]:
    """Return those of `chosen` that are present here or offered by the remote. Others are left out."""
    known = store.present({place.fingerprint: place.stage for place in chosen})
    offers = offered(remote, [place for place in chosen if place.fingerprint not in known], gpus)
    transfers = []
    for place in chosen:
        if place.fingerprint not in known:
            transfers += [offers[place]] if place in offers else []
        else:
            sealed = manifest.read(store.folder(*place))
            transfers.append(ArtifactTransfer(*place, sealed, b"", "present"))
    return transfers


def check_room(store: Store, pending: Iterable[ArtifactTransfer]) -> None:
    """Raise StateError if all pulls do not fit on the workspace's disk. `pull` refuses single artifacts that do not fit."""
    free = shutil.disk_usage(store.workspace).free
    needed = sum(each.transfer_bytes for each in pending if each.transfer_bytes <= free)
    if needed > free:
        raise StateError(
            f"{store.workspace}: {needed / 1e9:.1f} GB are to be pulled, {free / 1e9:.1f} GB are free",
            hint="select less, free some space (pipeline store prune --unused-for 30d), or choose another --workspace",
        )


def pull(
    store: Store,
    remote: Remote,
    pending: Iterable[ArtifactTransfer],
    judge: Callable[[Path], Iterable[Discrepancy]],
    progress: Progress,
) -> Iterator[ArtifactTransfer]:
    """Pull the result of `compare_to_pull`. Yields each with its new state. Only complete artifacts are published.

    `judge` returns the faults of a received artifact. Artifacts that another process works on are left to it. Raises
    RemoteError, and StateError for a full disk.
    """
    store.check_writable()
    for each in pending:
        free = shutil.disk_usage(store.workspace).free
        if each.transfer_bytes > free:
            message = f"it has {each.transfer_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on the disk"
            yield replace(each, state="refused", message=message)
            continue
        claim = store.claim(each.fingerprint)
        if claim is None:
            yield replace(each, state="busy")
            continue
        with claim:
            pulled = _pulled(store, remote, each, judge, progress)
        yield pulled


def _pulled(
    store: Store,
    remote: Remote,
    each: ArtifactTransfer,
    judge: Callable[[Path], Iterable[Discrepancy]],
    progress: Progress,
) -> ArtifactTransfer:
    if store.get(each.stage, each.fingerprint) is not None:  # built meanwhile
        return replace(each, state="present")
    assert each.sealed is not None
    try:
        store.discard(each.stage, each.fingerprint)  # left by a killed process
        # Created before the first file is fetched, so that other processes wait for this pull instead of building the artifact.
        store.arriving(each.stage, each.fingerprint).mkdir(parents=True, exist_ok=True)
        remote.fetch(store, each, judge, progress)
        store.receive(each.sealed)
    except NotTransferableError as error:
        return replace(each, state="refused", message=error.message)
    except OSError as error:
        problem = disk.no_room(error, store.workspace)
        if problem is None:
            raise
        raise StateError(
            f"{problem}, while pulling artifacts",
            hint=f"{'raise the limit' if error.errno == errno.EFBIG else 'free some space'}, then run the command again",
        ) from error
    return replace(each, state="done")
