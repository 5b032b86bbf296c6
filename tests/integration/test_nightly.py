"""Four nights of `.github/workflows/nightly.yml`, step by step as a runner does them, on the embedded toolchain."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from tests.helpers import github_runner
from tests.helpers.trtllm_runs import Lane
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder

ROOT = Path(__file__).resolve().parents[2]
NIGHTLY = ROOT / ".github" / "workflows" / "nightly.yml"
LIMITS = "ttft_p50:+1000%,output_tps:-95%,accuracy:-50%"
"""So wide that a busy machine keeps them. What has to break them does so by construction."""


class Runner:
    """A self-hosted runner: its directory stays from night to night."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "kept"
        self.checkout = folder / "checkout"
        self.matrix = self.checkout / "small.yaml"
        self.nights = 0
        self.more: dict[str, str] = {}
        """Variables of the machine."""

    def check_out(self, **settings: Any) -> None:
        """What the repository has tonight: one cell of the tiny matrix, with these settings as well."""
        shutil.rmtree(self.checkout, ignore_errors=True)
        self.checkout.mkdir(parents=True)
        (self.checkout / "examples").symlink_to(ROOT / "examples")
        tiny = yaml.safe_load((matrices_folder() / "tiny.yaml").read_text(encoding="utf-8"))
        tiny["axes"]["precision"] = ["fp16"]
        tiny["settings"] = {**tiny["settings"], **settings}
        self.matrix.write_text(yaml.safe_dump(tiny), encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """With leases of its own: tests must not wait for real work on this machine."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "XDG_RUNTIME_DIR": str(self.folder), "GITHUB_ACTIONS": "true", **self.more}

    def night(self, *, branch: str | None = None, **inputs: str) -> github_runner.Job:
        """One run of the workflow: by schedule, or by hand for a branch or with inputs."""
        self.nights += 1
        by_hand = branch is not None or bool(inputs)
        temporary = self.folder / f"temporary-{self.nights}"
        temporary.mkdir()
        github = {
            "run_id": 4000 + self.nights,
            "run_attempt": 1,
            "event_name": "workflow_dispatch" if by_hand else "schedule",
            "ref": f"refs/heads/{branch or 'main'}",
            "event": {"repository": {"default_branch": "main"}} if by_hand else {"schedule": "17 2 * * *"},
        }
        variables = {"NIGHTLY_FOLDER": str(self.kept), "NIGHTLY_MATRIX": "small.yaml", "NIGHTLY_FAIL_ON": LIMITS}
        return github_runner.run(
            github_runner.workflow(NIGHTLY)["jobs"]["nightly"],
            self.checkout,
            temporary,
            contexts={"github": github, "inputs": inputs, "vars": variables},
            environment=self.environment(),
            leave_out=("install",),
        )

    def script(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """One night of `examples/nightly.sh`, as cron and GitLab start it."""
        environment = {"FOLDER": str(self.kept), "MATRIX": "small.yaml", "FAIL_ON": LIMITS, **variables}
        return subprocess.run(
            ["examples/nightly.sh"],
            cwd=self.checkout,
            env={**os.environ, **self.environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    @property
    def baseline(self) -> dict[str, Any]:
        """The report that the next night is compared with."""
        found: dict[str, Any] = json.loads((self.kept / "small.json").read_text(encoding="utf-8"))
        return found

    def hold_back(self) -> int:
        """Microseconds of delay that hold every request twelve times as long as one took to begin in the baseline.

        At one request in flight no batch is ever full, so the limit of +1000% is broken however fast the machine is now.
        """
        (cell,) = self.baseline["cells"]
        (alone,) = (level for level in cell["perf"] if level["concurrency"] == 1)
        delay_us = 1 + int(12_000 * alone["ttft_ms"]["p50"])
        self.check_out(repository={"max_queue_delay_microseconds": delay_us})
        return delay_us


def other_machine(runner: Runner) -> str:
    """The baseline as another machine would have measured it."""
    report = runner.baseline
    for cell in report["cells"]:
        cell["conditions"]["measured_s"] -= 86400
        cell["conditions"]["system"] |= {"cpu": "AMD EPYC 9654 96-Core Processor", "cores": 96}
    path = runner.folder / "other-machine.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    return str(path)


def outcomes(job: github_runner.Job) -> dict[str, str]:
    return {step.name: step.outcome for step in job.steps if step.name[0].isupper()}


def told(job: github_runner.Job) -> str:
    """All that it printed, for a test that fails."""
    return "\n".join(f"--- {step.name}: {step.outcome} {step.code}\n{step.output}{step.summary}" for step in job.steps)


@pytest.mark.nightly
def test_four_nights(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    # The first night: everything is made, and becomes the baseline.
    runner.check_out()
    first = runner.night()
    assert not first.failed, told(first)
    assert outcomes(first)["Plan for another release"] == "skipped"
    assert "| `build` | 1 | 0 | 1 |" in first.step("Plan").summary
    assert "There is no baseline yet." in first.step("Compare").summary
    assert "| `tiny/fp16/tp1pp1/bs4/isl192-osl16` | done" in first.step("Report").summary
    assert runner.baseline["run"]["id"].endswith("-night-4001-1")
    uploaded = first.artifacts["night-4001-1"]
    assert {file.name for file in uploaded.iterdir()} == {"report.json", "junit.xml", "report.html", "lock"}
    cases = ET.parse(uploaded / "junit.xml").getroot().iter("testcase")
    assert {case.get("classname") for case in cases} >= {"build", "smoke", "perf", "accuracy"}
    assert yaml.safe_load((uploaded / "lock" / "matrix.yaml").read_text(encoding="utf-8"))["axes"]["model"] == ["tiny"]

    # The second night: nothing changed, nothing is done, and it is green.
    runner.check_out()
    second = runner.night()
    assert not second.failed, told(second)
    assert "nothing to do: all results are up to date" in second.step("Plan").summary
    assert "1 up to date" in second.step("Run").output
    assert "**Gate: passed**" in second.step("Compare").summary
    assert "- same: both sides are the same measurement" in second.step("Compare").summary
    assert runner.baseline["run"]["id"].endswith("-night-4002-1")
    plan = json.loads(next((runner.kept / "workspace" / "runs").glob("*-night-4002-1/plan.json")).read_text())
    assert [run["action"] for run in plan["stage_runs"] if run["action"] == "run"] == []

    # The third night: a setting that holds every request back. The gate fails, and says what and why.
    delay_us = runner.hold_back()
    third = runner.night()
    assert third.step("Compare").code == 1, told(third)
    assert {name for name, outcome in outcomes(third).items() if outcome == "failure"} == {"Compare"}
    assert f"params.max_queue_delay_microseconds 0 -> {delay_us}" in third.step("Plan").summary
    told_of = third.step("Compare").summary
    assert re.search(r"\*\*Gate: \d conditions? broken\*\*", told_of), told_of
    assert re.search(r"\| `tiny/.*@1.*ttft\\?_p50:\+1000%.*beyond the limit", told_of), told_of
    assert outcomes(third)["Move the baseline"] == "skipped"
    assert runner.baseline["run"]["id"].endswith("-night-4002-1")
    assert third.artifacts["night-4003-1"].joinpath("report.html").stat().st_size > 10_000
    assert outcomes(third)["Remove what no run of the last month needed"] == "success"

    # The fourth night: compared with a report of another machine. That is no regression and no pass.
    runner.check_out()
    fourth = runner.night(baseline=other_machine(runner))
    assert fourth.step("Compare").code == 4, told(fourth)
    assert "Gate: not evaluated: some cells are not comparable" in fourth.step("Compare").summary
    why = "not comparable: CPU: AMD EPYC 9654 96-Core Processor in the baseline, "
    assert why in fourth.step("Compare").summary, told(fourth)
    assert "error: 1 cell not comparable" in fourth.step("Compare").output
    assert outcomes(fourth)["Move the baseline"] == "skipped"
    assert runner.baseline["run"]["id"].endswith("-night-4002-1")

    runner.check_out()
    # A branch is compared with the default branch's baseline, and does not move it. It makes all in its own workspace.
    runs = set((runner.kept / "workspace/runs").iterdir())
    branch = runner.night(branch="feature")
    assert set((runner.kept / "workspace/runs").iterdir()) == runs
    assert (runner.kept / "refs/heads/feature/workspace/store/build").is_dir()
    assert not branch.failed, told(branch)
    assert "**Gate: passed**" in branch.step("Compare").summary
    assert outcomes(branch)["Move the baseline"] == "skipped"
    assert runner.baseline["run"]["id"].endswith("-night-4002-1")


@pytest.mark.parametrize(
    ("github", "workspace"),
    [
        ({"event_name": "schedule", "ref": "refs/heads/main"}, "workspace"),
        ({"event_name": "workflow_dispatch", "ref": "refs/heads/main"}, "workspace"),
        ({"event_name": "workflow_dispatch", "ref": "refs/heads/a/b"}, "refs/heads/a/b/workspace"),
        ({"event_name": "workflow_dispatch", "ref": "refs/tags/main"}, "refs/tags/main/workspace"),
    ],
)
def test_only_the_default_branch_works_in_the_workspace_of_the_nights(github: dict[str, Any], workspace: str) -> None:
    job = github_runner.workflow(NIGHTLY)["jobs"]["nightly"]
    event = {"event": {"repository": {"default_branch": "main"}}}
    contexts = {"github": {**event, **github}, "vars": {"NIGHTLY_FOLDER": "/kept"}, "inputs": {}}
    assert github_runner.interpolated(job["env"]["PIPELINE_WORKSPACE"], contexts) == f"/kept/{workspace}"
    moves = next(step["if"] for step in job["steps"] if step.get("name") == "Move the baseline")
    condition = moves.strip().removeprefix("${{").removesuffix("}}")
    assert bool(github_runner.evaluated(condition, contexts)) == (workspace == "workspace")


def test_gitlab_names_every_other_branch_for_the_script() -> None:
    rules = yaml.safe_load((ROOT / "examples/gitlab-ci.yml").read_text(encoding="utf-8"))["nightly"]["rules"]
    assert [rule.get("variables") for rule in rules if rule.get("when") != "never"] == [
        None,
        {"REF": "$CI_COMMIT_REF_SLUG"},
    ]
    assert "CI_DEFAULT_BRANCH" in rules[1]["if"]


def test_a_night_shows_what_another_release_would_change(tmp_path: Path) -> None:
    """On a machine with stand-ins of TensorRT-LLM, the two steps that plan."""
    runner = Runner(tmp_path)
    runner.check_out()
    here = Lane(tmp_path / "machine", "0.16.0", gpus=1).environment
    job = github_runner.workflow(NIGHTLY)["jobs"]["nightly"]
    job["steps"] = [step for step in job["steps"] if str(step.get("name", "")).startswith("Plan")]
    (tmp_path / "temporary").mkdir()
    done = github_runner.run(
        job,
        runner.checkout,
        tmp_path / "temporary",
        contexts={
            "github": {"run_id": 1, "run_attempt": 1},
            "inputs": {"release": "1.0.0"},
            "vars": {"NIGHTLY_FOLDER": str(runner.kept), "NIGHTLY_MATRIX": "small.yaml"},
        },
        environment={**here, "PATH": f"{Path(sys.executable).parent}:{here['PATH']}"},
    )
    assert not done.failed, told(done)
    summary = done.step("Plan for another release").summary
    assert summary.startswith("### here,tensorrt_llm==1.0.0, compared with here")
    assert 'identity.tensorrt_llm "0.16.0" -> "1.0.0"' in summary
    assert "with /app/examples/models/core/llama/convert_checkpoint.py" in summary


@pytest.mark.seam
def test_a_night_whose_matrix_is_wrong_runs_nothing_and_compares_nothing(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.check_out()
    runner.matrix.write_text("name: small\naxes: {model: [tiny], precison: [fp16]}\n", encoding="utf-8")
    job = runner.night()
    assert job.step("Plan").code == 2
    assert "precison: unknown axis" in job.step("Plan").output
    assert {name for name, outcome in outcomes(job).items() if outcome == "success"} == {
        "Install",
        "Look at the machine",
    }
    assert job.artifacts == {}
    assert not runner.kept.exists()


@pytest.mark.nightly
def test_the_script_does_the_same_elsewhere(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.check_out()
    for night in (1, 2):
        done = runner.script(NIGHT=f"night-{night}")
        assert done.returncode == 0, done.stdout
        assert runner.baseline["run"]["id"].endswith(f"-night-{night}")
    left = {path.name for path in (runner.checkout / "night").iterdir()}
    assert left == {
        *("plan.md", "compare.md", "report.md", "report.json", "junit.xml", "report.html", "lock"),
    }
    branch = runner.script(NIGHT="night-of-a-branch", REF="feature")
    assert branch.returncode == 0, branch.stdout
    assert (runner.kept / "refs/feature/workspace/store/build").is_dir()
    assert not list((runner.kept / "workspace/runs").glob("*night-of-a-branch"))
    assert runner.baseline["run"]["id"].endswith("-night-2")
    other = runner.script(NIGHT="night-3", BASELINE=other_machine(runner))
    assert other.returncode == 4, other.stdout
    runner.hold_back()
    slower = runner.script(NIGHT="night-4")
    assert slower.returncode == 1, slower.stdout
    assert "Gate: " in (runner.checkout / "night" / "compare.md").read_text(encoding="utf-8")
    runner.check_out(smoke={"expected": "nothing that noise could say"})
    failed = runner.script(NIGHT="night-5")
    assert failed.returncode == 1, failed.stdout
    assert runner.baseline["run"]["id"].endswith("-night-2")
    runner.matrix.unlink()
    assert runner.script(NIGHT="night-6").returncode == 2


def without_a_hub(folder: Path) -> Runner:
    runner = Runner(folder)
    runner.check_out()
    runner.more = dict.fromkeys(("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"), "http://127.0.0.1:9")
    return runner


def test_a_night_that_cannot_begin_fails_where_it_should_have_begun_and_nowhere_else(tmp_path: Path) -> None:
    job = without_a_hub(tmp_path).night(matrix="nightly")
    assert job.step("Run").code == 1, told(job)
    assert "cannot be reached at http://127.0.0.1:9" in job.step("Run").output
    assert (
        job.step("Run").summary == "There is nothing to compare and to report: the run never started, or was stopped.\n"
    )
    assert {name for name, outcome in outcomes(job).items() if outcome == "failure"} == {"Run"}
    assert {outcomes(job)[name] for name in ("Compare", "Report", "Move the baseline")} == {"skipped"}
    assert outcomes(job)["Remove what no run of the last month needed"] == "success"
    assert job.artifacts == {}


def test_a_night_that_cannot_begin_reports_none_of_an_earlier_one(tmp_path: Path) -> None:
    runner = without_a_hub(tmp_path)
    failed = runner.script(MATRIX="nightly")
    assert failed.returncode == 1, failed.stdout
    assert failed.stdout.count("error: ") == 1, failed.stdout
    assert "cannot be reached at http://127.0.0.1:9" in failed.stdout
    assert [file.name for file in (runner.checkout / "night").iterdir()] == ["plan.md"]


def test_the_quickstart_workflow(tmp_path: Path) -> None:
    """All but its installation, with the model that is generated on the spot."""
    runner = Runner(tmp_path)
    runner.check_out()
    job = github_runner.workflow(NIGHTLY.with_name("quickstart.yml"))["jobs"]["quickstart"]
    (tmp_path / "temporary").mkdir()
    done = github_runner.run(
        {**job, "env": {"MATRIX": "small.yaml"}},
        runner.checkout,
        tmp_path / "temporary",
        contexts={"github": {}, "inputs": {}, "vars": {}},
        environment=runner.environment(),
        leave_out=("install",),
    )
    assert not done.failed, told(done)
    assert {file.name for file in done.artifacts["quickstart"].iterdir()} == {"junit.xml", "report.html"}
