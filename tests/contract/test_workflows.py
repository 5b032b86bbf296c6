"""The workflows: what they may do, and that their commands are ones that the pipeline has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from tests.helpers.github_runner import Context, evaluated, interpolated, workflow
from trtllm_pipeline.show.cli import app

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = {path.stem: workflow(path) for path in WORKFLOWS}
PINNED = re.compile(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+(\.\d+)*")


def steps(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in found["jobs"].values() for step in job["steps"]]


def commands(text: str) -> list[list[str]]:
    """The words of each `pipeline ...` in a shell script."""
    joined = text.replace("\\\n", " ")
    return [
        ["pipeline", *shlex.split(match)]
        for match in re.findall(r"(?:^|\s|\()pipeline ((?:\"[^\"]*\"|'[^']*'|[^\n|>)#&;])*)", joined)
        if not match.startswith("is ")
    ]


def test_there_are_five() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "docs.yml", "nightly.yml", "quickstart.yml", "tests.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_little_and_ends(path: Path) -> None:
    found = workflow(path)
    assert found["permissions"] == {}
    assert found["concurrency"]["group"]
    assert "pull_request_target" not in found["on"]
    for job in found["jobs"].values():
        if "environment" in job:  # what publishes runs nothing of the repository
            assert job["permissions"] == {"pages": "write", "id-token": "write"}
            assert all("run" not in step for step in job["steps"])
        else:
            assert job["permissions"] == {"contents": "read"}
        assert job["timeout-minutes"] > 0
    for line in path.read_text(encoding="utf-8").splitlines():
        if "uses:" in line:
            assert PINNED.search(line), f"{line}: pinned by commit, with its version as a comment"
    # What people typed reaches a script as a variable only, never as a part of it.
    assert [step["run"] for step in steps(found) if "${{" in step.get("run", "")] == []


def test_people_start_a_night_and_pull_requests_do_not() -> None:
    assert SCRIPTS["nightly"]["on"].keys() == {"schedule", "workflow_dispatch"}
    assert SCRIPTS["nightly"]["on"]["workflow_dispatch"]["inputs"].keys() == {"matrix", "baseline", "release"}


def test_the_commands_are_ones_that_the_pipeline_has() -> None:
    texts = [step.get("run", "") for found in SCRIPTS.values() for step in steps(found)]
    texts.append((ROOT / "examples" / "nightly.sh").read_text(encoding="utf-8").partition("set -euo pipefail")[2])
    found = [words for text in texts for words in commands(text)]
    assert len(found) > 20
    assert {words[1] for words in found} == {"doctor", "plan", "run", "compare", "report", "status", "store"}
    for words in found:
        command, rest = get_command(app.build(words)), words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        try:
            command.make_context("pipeline", list(rest))
        except (SystemExit, typer.TyperException) as error:
            pytest.fail(f"{shlex.join(words)}\n{error}")


def test_expressions_are_evaluated_as_github_does() -> None:
    contexts = {"inputs": {"a": "", "b": "x y"}, "steps": {"run": {"outcome": "failure"}}, "github": Context()}
    assert (
        interpolated("${{ inputs.a || inputs.none || 'z' }}/w ${{ inputs.b }} ${{ inputs.none }}", contexts)
        == "z/w x y "
    )
    for expression, value in {
        "!inputs.a && github.ref_name == github.event.repository.default_branch": True,
        "!cancelled() && steps.run.outcome != 'skipped'": True,
        "steps.other.outcome == 'success'": False,
    }.items():
        assert evaluated(expression, contexts) is value
    assert evaluated("success()", contexts, failed=True) is False
    with pytest.raises(NameError):
        evaluated("secrets.token", contexts)
