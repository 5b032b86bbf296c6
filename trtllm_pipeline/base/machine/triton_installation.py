"""Finds an installed Triton Inference Server. Imports almost nothing, because every plan needs it.

The server is from an NGC container (on PATH or in its usual directory), or the binary in the `nvidia-pytriton` wheel.
The Python API of that package is never imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.machine.packages import version_of

CONTAINER_BINARY: Final = Path("/opt/tritonserver/bin/tritonserver")
OPENAI_PROGRAM: Final = Path("python/openai/openai_frontend/main.py")
"""The OpenAI front end, relative to the server's directory."""


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """The files of an installed server."""

    binary: Path
    source: str
    """Its package or container, with the version."""
    backends: Path
    stubs: Path | None = None
    """The wheel's directory of Python stubs by Python version. None if the backend has its own."""
    libraries: Path | None = None


def find() -> TritonInstallation:
    """The server to use: on PATH, else in the container's directory, else in the PyPI wheel. Raises ServerError."""
    on_path = shutil.which("tritonserver")
    for candidate in (on_path and Path(on_path), CONTAINER_BINARY):
        if candidate and candidate.is_file():
            known = (os.environ.get(name) for name in ("TRITON_SERVER_VERSION", "NVIDIA_TRITON_SERVER_VERSION"))
            version = next(filter(None, known), "unknown")
            home = candidate.resolve().parent.parent
            return TritonInstallation(candidate, f"tritonserver {version}", home / "backends")
    spec = importlib.util.find_spec("pytriton")  # finds the package without importing it
    if spec is not None and spec.submodule_search_locations:
        package = Path(spec.submodule_search_locations[0])
        home = package / "tritonserver"
        if (home / "bin" / "tritonserver").is_file():
            return TritonInstallation(
                home / "bin" / "tritonserver",
                f"nvidia-pytriton {version_of('nvidia-pytriton')}",
                home / "backends",
                home / "python_backend_stubs",
                package.parent / "nvidia_pytriton.libs",
            )
    raise ServerError(
        "no Triton Inference Server found: not on PATH, not in /opt/tritonserver, not as a Python package",
        failure=FailureClass.USER,
        hint="pip install 'trtllm-pipeline[embedded]', or run inside a Triton container",
    )
