"""`pipeline doctor` as a process, on whatever machine runs the tests: the JSON it promises, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.helpers.command_line import pipeline
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/doctor.json").read_text(encoding="utf-8"))


def doctor(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtllm_pipeline", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, **env})


def document(*words: str, **env: str) -> dict[str, Any]:
    done = pipeline("doctor", *words, "--format", "json", code=None, **env)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    assert done.returncode == (0 if any(each["usable"] for each in found["toolchains"]) else 3)
    return found


@pytest.mark.seam
def test_this_machine_has_the_promised_shape(tmp_path: Path) -> None:
    found = document("--workspace", str(tmp_path / "w"))
    assert not found["machine"]["assumed"]
    assert not (tmp_path / "w").exists(), "looking makes nothing"
    assert [each["name"] for each in found["toolchains"]] == list(toolchains.names())
    checks = {check["id"]: check for check in found["checks"]}
    assert {"host.cpus", "gpu.devices", "tensorrt_llm.release", "triton.server", "space.shm", "hub.hugging_face"} <= (
        checks.keys()
    )
    assert all(check["group"] == name.partition(".")[0] for name, check in checks.items())
    assert checks["gpu.devices"]["value"] == len(found["machine"]["gpus"])
    assert parse(found["machine"]["assume"]).cpus == found["machine"]["cpus"]


def test_text_says_the_same_without_colours_and_in_any_encoding() -> None:
    found = document()
    for encoding, marks in (("utf-8", "✓!✗·"), ("ascii", "+!X-")):
        done = doctor(PYTHONIOENCODING=encoding)
        assert "\x1b" not in done.stdout
        assert done.stderr == ""
        lines = [line.split(None, 2) for line in done.stdout.splitlines()]
        shown = [
            line[1] for line in lines if len(line) == 3 and line[0] in marks and line[1] in {"ok", "warning", "missing"}
        ]
        assert shown == [
            *("ok" if each["usable"] else "missing" for each in found["toolchains"]),
            *(check["status"] for check in found["checks"]),
        ]
        usable = [each["name"] for each in found["toolchains"] if each["usable"]]
        verdict = (
            f"ready: pipeline run uses the toolchain {usable[0]}" if usable else "not ready: no toolchain can be used"
        )
        assert done.stdout.startswith(verdict)


def test_a_mistyped_machine_is_a_message_not_a_traceback() -> None:
    done = pipeline("doctor", "--assume", "tensorrt_lm==0.12.0,sm=ninety", code=2)
    assert done.stdout == ""
    assert "did you mean 'tensorrt_llm'?" in done.stderr
    assert "sm=ninety" in done.stderr
    assert "Traceback" not in done.stderr


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    """`-S` leaves site-packages out: nothing but Python and the project's own directory."""
    return subprocess.run(
        [sys.executable, "-S", "-m", "trtllm_pipeline", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTHON"))},
    )


def test_no_package_from_outside_is_needed() -> None:
    done = bare("doctor", "--format", "json")
    assert done.returncode in {0, 3}, done.stderr
    found = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    assert next(check for check in found["checks"] if check["id"] == "host.packages")["status"] != "ok"
    text = bare("doctor")
    assert text.stdout.startswith(("ready", "not ready"))
    assert text.returncode == done.returncode


def test_other_commands_say_that_a_package_is_missing() -> None:
    done = bare("plan", "--matrix", "tiny")
    assert done.returncode == 2
    assert done.stderr == ("error: the package typer is not installed\n  try: pipeline doctor, which does without\n")
