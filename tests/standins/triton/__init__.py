"""A Triton server as an NGC image with TensorRT-LLM has it: the real server, with a stand-in for its backend.

`model.py` beside this file is a Python-based backend. Triton loads a backend folder that has a `model.py` through its
Python backend, so a repository filled for TensorRT-LLM is served as it is, `backend: "tensorrtllm"` and all. Where
the repository says `triton_backend: python`, the same file can be the model's own `1/model.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.standins import refusals
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.tensorrt.servers import triton_server

MODEL: Final = Path(__file__).with_name("model.py")
_WRAPPER: Final = """\
#!/bin/sh
export LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
exec "{binary}" --backend-directory="{backends}" "$@"
"""
_OPENAI: Final = """\
import os
import sys

# Python stubs take the packages of the Python that is found first, as in an image that has only one.
os.environ["PATH"] = {python!r} + os.pathsep + os.environ.get("PATH", os.defpath)
sys.path.insert(0, {root!r})
from tests.standins.triton.openai_frontend import main

sys.exit(main({server!r}, sys.argv[1:]))
"""


def install_server(
    folder: Path, environment: Mapping[str, str] | None = None, *, openai: bool = True
) -> dict[str, str]:
    """Lay out `bin/tritonserver` and `backends/{python,tensorrtllm}` in `folder` around the server of this machine, and
    Triton's OpenAI front end where `openai` says so.

    Returns `environment`, such as an Installation's, with a PATH on which that server is found first. Raises
    ServerError where there is no server at all.
    """
    found = triton_installation.find()
    home = folder.absolute()
    python = home / "backends" / "python"
    python.mkdir(parents=True)
    # Copies: Triton refuses a Python-based backend when the Python backend's library is a link out of its folder.
    stub = () if found.stubs is None else (triton_server.stub_binary(found.stubs),)
    for source in (*(path for path in (found.backends / "python").iterdir() if path.is_file()), *stub):
        shutil.copy(source, python)
    (home / "backends" / "tensorrtllm").mkdir()
    backend = home / "backends" / "tensorrtllm"
    shutil.copy(MODEL, backend)
    shutil.copy(str(refusals.__file__), backend)
    (backend / "refusals.json").write_text(json.dumps(refusals.recorded()["tensorrtllm"]), encoding="utf-8")
    library = triton_server.python_library()
    folders = [str(each) for each in (found.libraries, library and library.parent) if each is not None]
    server = home / "bin" / "tritonserver"
    server.parent.mkdir()
    server.write_text(
        _WRAPPER.format(libraries=os.pathsep.join(folders), binary=found.binary, backends=home / "backends"),
        encoding="utf-8",
    )
    server.chmod(0o755)
    if openai:
        program = home / triton_installation.OPENAI_PROGRAM
        program.parent.mkdir(parents=True)
        root = Path(__file__).resolve().parents[3]
        program.write_text(
            _OPENAI.format(root=str(root), server=str(server), python=str(Path(sys.executable).parent)),
            encoding="utf-8",
        )
    given = dict(environment or {})
    path = given.get("PATH") or os.environ.get("PATH", os.defpath)
    return {**given, "PATH": os.pathsep.join((str(server.parent), path))}
