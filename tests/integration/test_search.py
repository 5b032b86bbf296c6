"""A search, killed on its way, that continues with what the workspace has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import eventually

MATRIX = """\
name: search
axes:
  model: [tiny]
  precision: [fp16, int8_wo]
  max_batch_size: [2, 4]
  lengths: ["192,16"]
settings:
  perf: { concurrency: [1, 2], requests: 4, warmup_requests: 1, max_tokens: 8 }
  accuracy: { max_tokens: 8 }
"""


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "trtllm_pipeline",
        "search",
        "--matrix",
        "search.yaml",
        "--slo",
        "ttft_p99=100s",
        *words,
    ]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(cwd)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, start_new_session=True, **pipes)


def found(*words: str, cwd: Path) -> tuple[dict[str, Any], str]:
    process = start(*words, "--format", "json", "--progress", "plain", cwd=cwd)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return json.loads(out), err


def test_a_search_goes_on_with_what_the_workspace_has(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "search.yaml").write_text(MATRIX, encoding="utf-8")
    looked, _ = found("--dry-run", cwd=tmp_path)
    assert not (tmp_path / ".pipeline").exists(), "looking makes no workspace"
    assert (looked["cells"], looked["spent"], looked["tried"]) == (4, 0, [])

    killed = start("--budget", "4", cwd=tmp_path)
    assert eventually(lambda: list((tmp_path / ".pipeline").glob("store/convert/*/manifest.json")))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()

    first, said = found("--budget", "1", cwd=tmp_path)
    assert f"search 1/1: {looked['next']['cell']}: initial cell: center of the matrix" in said, (
        "what was killed is chosen again"
    )
    assert [each["cell"] for each in first["tried"]] == [looked["next"]["cell"]]
    assert first["stopped"] == "budget of 1 cell spent"
    assert first["next"]["cell"] not in {each["cell"] for each in first["tried"]}

    second, said = found("--budget", "2", cwd=tmp_path)
    assert said.count("search 2/2: ") == 1
    assert "search 1/" not in said
    assert {each["cell"] for each in first["tried"]} < {each["cell"] for each in second["tried"]}
    assert all(each["why"] for each in second["tried"])
    best = second["recommendation"]["recommended"][0]["cell"]
    assert best in {each["cell"] for each in second["tried"]}

    third, said = found("--budget", "2", cwd=tmp_path)
    assert "search " not in said, "nothing is left to do"
    assert third == second
