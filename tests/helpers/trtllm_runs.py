"""A GPU machine of stand-ins and `pipeline` on it: real processes, a real Triton and a real mpirun, no TensorRT-LLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers import command_line, needed
from tests.helpers.launched import still_running
from tests.helpers.waiting import eventually
from tests.standins import templates
from tests.standins.installation import Installation, install
from tests.standins.triton import install_server

MATRIX = """\
name: lane
axes:
  model: [tiny]
  precision: [fp16, fp8]
  parallel: [tp1, tp2]
  max_batch_size: [2, 4]
  lengths: ["256,32"]
exclude:
  - { precision: fp16, parallel: tp2 }
  - { precision: fp16, max_batch_size: 4 }
  - { precision: fp8, parallel: tp1 }
settings:
  quantize: { calibration: { samples: 8 } }
  perf: { exclusive: none } # servers side by side, on GPUs of their own
"""
"""Three cells: FP16 on one GPU, and two batch sizes of one FP8 checkpoint on two."""
PLAIN = "tiny/fp16/tp1pp1/bs2/isl256-osl32"
LARGER = "tiny/fp8/tp2pp1/bs4/isl256-osl32"
ALL_STARTS = {"convert_checkpoint.py:llama": 1, "quantize.py": 1, "trtllm-build": 3, "run.py": 5}
"""What those three take: two checkpoints, three engines, and each rank of each engine once for its check."""


class Lane:
    """A release of TensorRT-LLM with everything around it, a matrix and a workspace.

    Several GPUs are for engines with several ranks: without mpirun, the test is skipped. With `gpus=1` it needs none.
    """

    def __init__(self, folder: Path, release: str, **options: Any) -> None:
        options = {"gpus": 4, **options}
        if options["gpus"] > 1:
            needed.program("mpirun")
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.workspace = folder / "w"
        self.matrix = folder / "matrix.yaml"
        self.matrix.write_text(MATRIX, encoding="utf-8")
        self.installed: Installation = install(
            folder / "trt",
            release,
            templates=templates.install(folder / "templates", release),
            **options,
        )
        self.marker = f"TEST_MARKER_{uuid.uuid4().hex}"
        self.environment = {
            **os.environ,
            **install_server(folder / "triton", self.installed.environment),
            "XDG_RUNTIME_DIR": str(folder),
            self.marker: "1",
        }

    def hide(self, program: str) -> None:
        """Let the machine lack a program: directories of PATH that have it are replaced by links to all else in them."""
        folders = []
        for number, folder in enumerate(map(Path, self.environment["PATH"].split(os.pathsep))):
            shown = folder
            if (folder / program).exists():
                shown = self.folder / f"without-{program}-{number}"
                shown.mkdir()
                for path in folder.iterdir():
                    if path.name != program:
                        (shown / path.name).symlink_to(path)
            folders.append(str(shown))
        self.environment["PATH"] = os.pathsep.join(folders)

    def start(self, *words: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """`pipeline` with these words."""
        return subprocess.Popen(
            [sys.executable, "-m", "trtllm_pipeline", *words],
            cwd=self.folder,
            env={**self.environment, **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def pipeline(self, *words: str, code: int = 0) -> str:
        """What `pipeline` prints; nothing of it is left when it has ended. What looks at no machine is no process."""
        if words[0] in {"report", "store"}:
            return command_line.pipeline(*words, cwd=self.folder, code=code, **self.environment).stdout
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            self.kill(process)
            raise
        assert process.returncode == code, f"{words}: exit code {process.returncode}, expected {code}\n{out}\n{err}"
        assert "\nTraceback" not in err, err  # that of a stand-in is quoted, and indented
        assert self.left() == []
        return out

    def words(self, *words: str) -> tuple[str, ...]:
        """A command line of `run` on the matrix and the workspace."""
        return ("run", "--matrix", str(self.matrix), "--workspace", str(self.workspace), "--format", "json", *words)

    def run(self, *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
        """The report of a run, by cell."""
        return cells(self.pipeline(*self.words(*words), code=code))

    def resume(self) -> dict[str, dict[str, Any]]:
        """The report of what continues with the latest run and ends well."""
        return cells(self.pipeline("resume", "--workspace", str(self.workspace), "--format", "json"))

    def starts(self, tool: str | None = None) -> Counter[str]:
        """How often each of TensorRT-LLM's programs was started so far."""
        return Counter(start.tool for start in self.installed.invocations(tool))

    def artifacts(self) -> dict[str, int]:
        """STAGE/FINGERPRINT of what is finished, and the inode it has as long as it is not made again."""
        found = (self.workspace / "store").glob("*/*/manifest.json")
        return {f"{path.parent.parent.name}/{path.parent.name}": path.parent.stat().st_ino for path in found}

    def outputs(self, stage: str) -> list[Path]:
        """Directories of the stage's results."""
        return sorted(self.workspace.glob(f"store/{stage}/*/out"))

    def left(self) -> list[str]:
        """Processes that were started from here and still run."""
        return still_running(self.marker)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """kill -9 of the pipeline alone; all it has started ends by itself."""
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=280)
        assert eventually(lambda: not self.left()), self.left()


def cells(report: str) -> dict[str, dict[str, Any]]:
    return {cell["id"]: cell for cell in json.loads(report)["cells"]}
