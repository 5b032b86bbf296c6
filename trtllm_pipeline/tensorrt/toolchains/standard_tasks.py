"""The stage that runs standard tasks of lm-evaluation-harness, and its requirements: `settings.accuracy.tasks`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from trtllm_pipeline.base import Cell, Machine, Scope, assume
from trtllm_pipeline.measure import lm_eval
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.stage.params import TASK_FILE, TaskParams, load
from trtllm_pipeline.tensorrt.toolchains import catalog, companions, time_estimates, vision
from trtllm_pipeline.tensorrt.toolchains.common_stages import ASKED, MAY_LACK

_RELEASES: Final = (Version("0.4.9"), Version("0.5"))
_QUESTIONS: Final[Mapping[str, tuple[int, int]]] = {
    "arc_challenge": (1, 1172),
    "arc_easy": (1, 2376),
    "gsm8k": (1, 1319),
    "hellaswag": (1, 10042),
    "humaneval": (1, 164),
    "ifeval": (1, 541),
    "mmlu": (57, 14042),
    "mmlu_pro": (14, 12032),
    "pipeline_arithmetic": (1, 100),
    "winogrande": (1, 1267),
}
"""Task or group -> its number of tasks, and of questions in all of them."""
_USUAL: Final = (1, 1000)
"""An assumption for other tasks."""
_PROMPT_TOKENS: Final = 512
_ANSWER_TOKENS: Final = 128
"""Usual lengths, if the cell's are longer."""
_START_S: Final = 15.0
"""Seconds to start lm_eval."""


def lacks_for_tasks(cell: Cell, machine: Machine) -> str | None:
    """Why a cell cannot run the standard tasks of its settings, or None."""
    if not _tasks(cell):
        return None
    if companions.adapters(cell) or vision.sees(cell):
        return "settings.accuracy.tasks: only for text models without LoRA adapters"
    if machine.assumed:
        return None
    found = lm_eval.installed()
    if found is None:
        return f"settings.accuracy.tasks: {lm_eval.missing()}: {lm_eval.INSTALL}"
    if not _supported(found.version):
        return f"settings.accuracy.tasks: lm_eval {found.version} is installed, but 0.4.9 or a later 0.4 is needed"
    in_triton = cell.toolchain in catalog.names() and cell.settings["serve"]["frontend"] == "triton"
    if in_triton and importlib.util.find_spec("uvicorn") is None:
        return "settings.accuracy.tasks: lm_eval reaches Triton through the gateway: pip install 'trtllm-pipeline[gateway]'"
    return None


def _supported(version: str | None) -> bool:
    try:
        return version is None or _RELEASES[0] <= Version(version) < _RELEASES[1]
    except InvalidVersion:
        return True


def _tasks(cell: Cell) -> list[lm_eval.TaskItem]:
    tasks: Any = cell.settings["accuracy"]["tasks"]
    return [lm_eval.TaskItem.parse(task) for task in tasks]


def _files(cell: Cell) -> dict[str, str]:
    """The files of the user's tasks, and the questions of a shipped task."""
    files = {f"questions of {item.name}": f"builtin:{item.name}" for item in _tasks(cell) if item.shipped}
    folder: Any = cell.settings["accuracy"]["include_path"]
    if folder is None:
        return files
    root = Path(cell.base_dir, folder)
    names = sorted(
        os.path.relpath(path, root)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    )
    own = {f"{TASK_FILE}{name}": os.path.join(folder, name) for name in names}
    return {**files, **(own or {TASK_FILE: folder})}  # without files, the directory itself is reported


def _with_version(params: TaskParams, _files: Mapping[str, str], machine: Machine) -> TaskParams:
    found = None if machine.assumed else lm_eval.installed()
    return replace(params, version=assume.ASSUMED if machine.assumed else found and found.version)


def _seconds(cell: Cell, machine: Machine) -> float:
    seconds = 0.0
    params = _read(cell)
    for item in _tasks(cell):
        tasks, questions = _QUESTIONS.get(item.name, _USUAL)
        count = questions if item.limit is None else min(questions, int(item.limit) * tasks)
        prompt, answer = min(cell.isl, _PROMPT_TOKENS), min(cell.osl, _ANSWER_TOKENS)
        seconds += _START_S
        seconds += time_estimates.answering_s(cell, machine, count, params.concurrency, prompt=prompt, answer=answer)
    return seconds


def _read(cell: Cell) -> TaskParams:
    return load(TaskParams, {"max_length": cell.isl + cell.osl}, cell.settings["accuracy"])


TASKS = Stage(
    name="tasks",
    version=1,
    summary="run standard tasks of lm-evaluation-harness on a running server",
    program="trtllm_pipeline.tensorrt.stage.tasks:run",
    shared=True,
    inputs=ASKED,
    optional=MAY_LACK,
    after=("smoke",),
    scope=Scope.IN_SERVICE,
    section="accuracy",
    applies=lambda cell, _machine: bool(_tasks(cell)),
    params=TaskParams,
    read=_read,
    files=_files,
    settle=_with_version,
    expected_s=5.0,
    takes=_seconds,
    timeout_s=24 * 3600.0,
)
"""Replaces the stages accuracy and score. Also raise `version` for another shipped task."""
