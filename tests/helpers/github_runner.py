"""Runs a job of a GitHub workflow as its runner would: expressions, conditions, environment, one bash for each step.

Only what the workflows of this repository use is known; anything else raises. Actions are not run: what
`actions/upload-artifact` would upload is copied, the others have no effect here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

_EXPRESSION: Final = re.compile(r"\$\{\{(.*?)\}\}")
_STATUS: Final = re.compile(r"\b(success|failure|cancelled|always)\(\)")
_OPERATORS: Final = ((r"&&", " and "), (r"\|\|", " or "), (r"!(?!=)", " not "))
_SHELL: Final = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
"""What `shell: bash` stands for."""
_FILES: Final = ("GITHUB_STEP_SUMMARY", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_ENV")


class Context(dict[str, Any]):
    """A context of expressions: what it lacks is null, which is empty, and lacks everything as well."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name, {})
        return Context(value) if isinstance(value, dict) else value


@dataclass(slots=True)
class Step:
    """How a step ended."""

    name: str
    outcome: str
    """`success`, `failure` or `skipped`."""
    code: int | None = None
    output: str = ""
    summary: str = ""
    """What it added to the job's summary."""


@dataclass(slots=True)
class Job:
    """How a job went."""

    steps: list[Step] = field(default_factory=list)
    artifacts: dict[str, Path] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a step failed."""
        return any(step.outcome == "failure" for step in self.steps)

    @property
    def summary(self) -> str:
        """The summary of the job."""
        return "".join(step.summary for step in self.steps)

    def step(self, name: str) -> Step:
        """The step called `name`."""
        return next(step for step in self.steps if step.name == name)


def workflow(path: Path) -> dict[str, Any]:
    """A workflow file; YAML 1.1 takes its key `on` for a truth value."""
    data: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    data["on"] = data.pop(True)
    return data


def evaluated(expression: str, contexts: Mapping[str, Any], *, failed: bool = False) -> Any:
    """The value of an expression."""
    for operator, python in _OPERATORS:
        expression = re.sub(operator, python, expression)
    status = {
        "success": lambda: not failed,
        "failure": lambda: failed,
        "cancelled": lambda: False,
        "format": str.format,
    }
    known = {name: Context(value) for name, value in contexts.items()}
    return eval(expression.strip(), {"__builtins__": {}, **status, **known})


def interpolated(text: object, contexts: Mapping[str, Any]) -> str:
    """A value with its expressions replaced."""

    def value(match: re.Match[str]) -> str:
        found = evaluated(match[1], contexts)
        return "" if found in (None, {}) else str(found)

    return _EXPRESSION.sub(value, str(text))


def run(
    job: Mapping[str, Any],
    checkout: Path,
    temporary: Path,
    *,
    contexts: Mapping[str, Any],
    environment: Mapping[str, str],
    leave_out: Collection[str] = (),
    timeout_s: float = 300,
) -> Job:
    """Run the steps of a job in the directory `checkout`, but for those whose ids are in `leave_out`."""
    done = Job()
    seen: dict[str, dict[str, Any]] = {}
    variables = {**contexts.get("env", {})}
    variables |= {name: interpolated(value, contexts) for name, value in job.get("env", {}).items()}
    path = environment["PATH"]
    for number, step in enumerate(job["steps"]):
        name = step.get("name") or step["uses"].partition("@")[0]
        now = {**contexts, "env": variables, "steps": seen}
        condition = str(step.get("if", "success()")).strip().removeprefix("${{").removesuffix("}}")
        if not _STATUS.search(condition):
            condition = f"success() && ({condition})"
        outputs: dict[str, str] = {}
        if step.get("id") in leave_out or not evaluated(condition, now, failed=done.failed):
            outcome = "success" if step.get("id") in leave_out else "skipped"
            done.steps.append(Step(name, outcome))
        elif "uses" in step:
            if step["uses"].startswith("actions/upload-artifact@"):
                given = {key: interpolated(value, now) for key, value in step["with"].items()}
                kept = temporary / "artifacts" / given["name"]
                shutil.copytree(checkout / given["path"], kept)
                done.artifacts[given["name"]] = kept
            done.steps.append(Step(name, "success"))
        else:
            files = {key: temporary / f"{number}-{key.lower()}" for key in _FILES}
            for file in files.values():
                file.touch()
            more = {**variables, **{key: str(file) for key, file in files.items()}}
            more |= {key: interpolated(value, now) for key, value in step.get("env", {}).items()}
            ended = subprocess.run(
                [*_SHELL, interpolated(step["run"], now)],
                cwd=checkout,
                env={**os.environ, **environment, **more, "PATH": path, "RUNNER_TEMP": str(temporary), "CI": "true"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=timeout_s,
                check=False,
            )
            told = {key: file.read_text(encoding="utf-8") for key, file in files.items()}
            assert not told["GITHUB_ENV"], "the workflows keep what people typed out of this file"
            outputs = dict(line.split("=", 1) for line in told["GITHUB_OUTPUT"].splitlines())
            path = ":".join([*reversed(told["GITHUB_PATH"].split()), path])
            outcome = "failure" if ended.returncode else "success"
            done.steps.append(Step(name, outcome, ended.returncode, ended.stdout, told["GITHUB_STEP_SUMMARY"]))
        if "id" in step:
            seen[step["id"]] = {"outcome": done.steps[-1].outcome, "outputs": outputs}
    return done
