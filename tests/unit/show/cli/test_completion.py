"""What TAB completes, asked as bash, zsh and fish ask: in environment variables."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import fabricated
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.serve.kept.servers import KeptRecord, State, folder_of
from trtllm_pipeline.show.cli.app import main

RUN = "20260101-000000-aa"
PLAN = fabricated.plan(fabricated.cell("fp16"), fabricated.cell("int8_wo"))


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with matrices, a recipe and a workspace that had a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "matrices").mkdir()
    (tmp_path / "recipes").mkdir()
    for name in ("tiny", "quickstart"):
        shutil.copy(matrices_folder() / f"{name}.yaml", tmp_path / "matrices")
    (tmp_path / "recipes" / "mine.yaml").touch()
    store = Store(tmp_path / ".pipeline")
    store.index.begin_run(RUN, "/m/quick.yaml", ("pipeline", "run"))
    (store.runs_dir / RUN).mkdir()
    lines = plan_lines(
        PLAN, present=(), to_run=(), reasons={}, times=lambda _run: None, commands=lambda _run: [], run_id=RUN
    )
    (store.runs_dir / RUN / "plan.json").write_text("\n".join(lines))
    store.close()
    kept = folder_of(tmp_path / ".pipeline", "chat")
    kept.mkdir(parents=True)
    KeptRecord(toolchain="embedded", model="m", state=State.STOPPED, since_s=0.0, started_s=0.0).write(kept)


def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **variables: str) -> str:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    return capsys.readouterr().out


def in_bash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    words = line.split(" ")
    return asked(
        monkeypatch, capsys, _PIPELINE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
    ).split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pipeline pl", {"plan"}),
        ("pipeline matrix s", {"show", "schema"}),
        ("pipeline run --ma", {"--matrix"}),
        ("pipeline run --matrix matrices/t", {"matrices/tiny.yaml"}),
        ("pipeline run --matrix ma", {"matrices/"}),
        ("pipeline run --matrix quick", {"quickstart"}),
        ("pipeline run --matrix matrices/tiny.yaml --cells tiny/f", {"tiny/fp16/tp1pp1/bs4/isl192-osl16"}),
        ("pipeline logs smollm2/i", {str(fabricated.cell("int8_wo").id)}),
        ("pipeline logs fp16 bu", {"build"}),
        ("pipeline run --until con", {"convert"}),
        ("pipeline status --run 2026", {RUN}),
        ("pipeline report --run l", {"latest"}),
        ("pipeline report --workspace nowhere --run ", set()),
        ("pipeline models show min", {"mine"}),
        ("pipeline plan --toolchain emb", {"embedded"}),
        ("pipeline report --format ht", {"html"}),
        ("pipeline serve stop ch", {"chat"}),
        ("pipeline serve logs chat --part k", {"keeper"}),
        ("pipeline serve start smollm2/i", {str(fabricated.cell("int8_wo").id)}),
    ],
)
def test_bash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, words: set[str]) -> None:
    assert set(in_bash(monkeypatch, capsys, line)) == words


def test_a_folder_that_only_looks_like_a_workspace_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other/store").mkdir(parents=True)
    assert in_bash(monkeypatch, capsys, "pipeline status -w other --run ") == []
    assert [path.name for path in Path("other").iterdir()] == ["store"]


def test_zsh_and_fish(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"_TYPER_COMPLETE_ARGS": "pipeline run --until con"}
    assert asked(monkeypatch, capsys, _PIPELINE_COMPLETE="complete_zsh", **line) == "_arguments '*: :((\"convert\"))'\n"
    fish = {"_PIPELINE_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert asked(monkeypatch, capsys, **fish, _TYPER_COMPLETE_ARGS="pipeline pl").startswith("plan\tShow what")


def test_a_damaged_workspace_or_matrix_completes_to_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(".pipeline") / "runs" / RUN / "plan.json").write_text("{")
    assert in_bash(monkeypatch, capsys, "pipeline logs s") == []
    Path("matrices/tiny.yaml").write_text("a: [")
    assert in_bash(monkeypatch, capsys, "pipeline run --matrix matrices/tiny.yaml --cells t") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    script = asked(monkeypatch, capsys, _PIPELINE_COMPLETE=f"source_{shell}")
    assert "_PIPELINE_COMPLETE" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
