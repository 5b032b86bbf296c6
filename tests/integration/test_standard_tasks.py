"""The stage `tasks` against OpenAI-compatible servers, with a stand-in for lm_eval; with the real one if it is installed."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contexts import context
from tests.helpers.answering import Answer, answering
from tests.helpers.embedded_engines import tokenizer
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.measure.score import drift, lm_eval
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.stage import tasks
from trtllm_pipeline.tensorrt.stage.params import TASK_FILE, TaskParams

STANDIN = Path(__file__).parents[1] / "standins" / "lm_eval.py"
TINY = Path(__file__).parents[2] / "matrices" / "tiny.yaml"
real = pytest.mark.skipif(
    not os.environ.get(lm_eval.PYTHON_VARIABLE), reason=f"needs the extra [lm-eval] in {lm_eval.PYTHON_VARIABLE}"
)


def says(text: str, **more: Any) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": "stop", **more}]}


def likelihoods(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Log probabilities of a prompt of tokens, as vLLM returns them: an even number is likelier."""
    if not body.get("echo"):
        return says(" Paris")
    (tokens,) = body["prompt"] if isinstance(body["prompt"][0], list) else (body["prompt"],)
    known = [None, *(-1.0 - token % 2 for token in tokens[1:]), -1.0]
    return says("", logprobs={"token_logprobs": known, "top_logprobs": [{"x": each or 0.0} for each in known]})


def in_words_only(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """A server that ignores `echo`: log probabilities of its answer only."""
    return says(" Paris", logprobs={"token_logprobs": [-1.0], "top_logprobs": [{" Paris": -1.0}]})


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "lm_eval"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{STANDIN.read_text(encoding='utf-8')}")
    program.chmod(0o755)
    monkeypatch.delenv(lm_eval.PYTHON_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def run_stage(folder: Path, url: str, *names: str, files: dict[str, Path] | None = None, **params: Any) -> Path:
    """Run the stage. Returns its result."""
    model, attempt = folder / "model", folder / "attempt"
    if not model.is_dir():
        model.mkdir()
        (model / "config.json").write_text("{}")
        tokenizer(model)
        service = {"http": url.partition("//")[2], "url": url, "grpc": "", "kind": "openai", "model": "m"}
        (folder / "service.json").write_text(json.dumps(service))
    out = attempt / "out"
    out.mkdir(parents=True)
    inputs = {"service": folder / "service.json", "engine": model, "model": model}
    tasks.run(context(TaskParams, {"tasks": names, **params}, inputs, files or {}, out, attempt))
    return out


@pytest.mark.seam
@pytest.mark.usefixtures("standin")
def test_scores_and_answers_of_a_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with answering(lambda body: says(" Paris")) as (url, _asked):
        out = run_stage(tmp_path, url, "a", "group:1", num_fewshot=3)
    found = json.loads((out / "accuracy.json").read_text())
    assert found["scores"] == {
        "a.exact_match": 0.5,
        "a.f1.strict_match": 0.5,
        "group.exact_match": 1.0,
        "group.f1.strict_match": 0.5,
    }
    assert found["questions"]["group.exact_match"] == 2
    assert found["total"] == 4
    assert {row["id"] for row in drift.read(out)} == {"a/0", "a/1", "group_a/0", "group_b/0"}
    progress = json.loads((tmp_path / "attempt" / "progress.json").read_text())
    assert progress["unit"].startswith("questions of")
    log = capfd.readouterr()
    assert "--num_fewshot 3" in log.out
    assert "tokenizer_backend=None" in log.out, "generated answers need no tokenizer"
    assert "a table for people" in log.err


@pytest.mark.seam
@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("answer", [in_words_only, lambda body: (400, {"error": {"message": "no echo"}})])
def test_ranked_choices_need_log_probabilities_of_prompts(tmp_path: Path, answer: Answer) -> None:
    """lm_eval would sum those of nothing, and score noise."""
    with (
        answering(answer) as (url, _asked),
        pytest.raises(StageError, match="task ranked needs log probabilities of the prompt") as error,
    ):
        run_stage(tmp_path, url, "ranked")
    assert error.value.failure is FailureClass.USER
    assert "a task that generates its answers" in str(error.value.hint)
    assert not (tmp_path / "attempt" / "out" / "accuracy.json").exists()


@pytest.mark.seam
@pytest.mark.usefixtures("standin")
def test_a_server_with_likelihoods_gets_tokens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with answering(likelihoods) as (url, asked):
        run_stage(tmp_path, url, "ranked", max_length=208)
    assert asked[0]["echo"] is True
    log = capfd.readouterr().out
    assert f"tokenized_requests=True,max_length=208,timeout=300,tokenizer={tmp_path / 'model'}" in log


@pytest.mark.seam
@pytest.mark.usefixtures("standin")
def test_what_fails(tmp_path: Path) -> None:
    def refuses(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 400, {"error": {"message": "prompt of 900 tokens, 192 at most"}}

    with (
        answering(refuses) as (url, _asked),
        pytest.raises(StageError, match=r"the server refused a request: .*prompt of 900 tokens, 192 at most") as error,
    ):
        run_stage(tmp_path, url, "a")
    assert "lengths that the model is served with" in str(error.value.hint)
    (tmp_path / "low").mkdir()
    with (
        answering(lambda body: says(" Paris")) as (url, _asked),
        pytest.raises(StageError, match=r"a\.exact_match is 0\.500 on 2 questions, expected at least 0\.9"),
    ):
        run_stage(tmp_path / "low", url, "a", min_score=0.9)


@pytest.mark.seam
@pytest.mark.usefixtures("standin")
def test_tasks_of_the_user_run_in_their_directory(tmp_path: Path) -> None:
    own = tmp_path / "own" / "deep" / "task.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("task: a\n")
    with answering(lambda body: says(" Paris")) as (url, _asked):
        run_stage(tmp_path, url, "a", files={f"{TASK_FILE}deep/task.yaml": own})


# ------------------------------------------------------------------------------------------------------ real lm_eval


def calculated(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The right answer to a sum or a series, except for products."""
    if body.get("echo"):
        return 400, {"error": {"message": "no echo"}}
    question = body["prompt"].rpartition("\n")[2]
    numbers = [int(each) for each in re.findall(r"\d+", question)]
    if "," in question:
        return says(f" {numbers[-1] + numbers[1] - numbers[0]},")
    first, second = numbers
    return says(f" {first + second if '+' in question else first - second if '-' in question else 0}\n")


@real
def test_the_shipped_task_by_lm_eval(tmp_path: Path) -> None:
    with answering(calculated) as (url, asked):
        out = run_stage(tmp_path, url, "pipeline_arithmetic")
    found = json.loads((out / "accuracy.json").read_text())
    assert found["scores"] == {"pipeline_arithmetic.exact_match": 0.75}
    assert found["questions"] == {"pipeline_arithmetic.exact_match": 100}
    assert found["lm_eval_version"].startswith("0.4.")
    low, high = found["intervals"]["pipeline_arithmetic.exact_match"]
    assert (low, high) == pytest.approx((0.665, 0.835), abs=1e-3)
    answers = drift.read(out)
    assert len(answers) == 100
    assert sum(row["scores"]["pipeline_arithmetic.exact_match"] for row in answers) == 75
    assert len(asked) == 101, "each question once, and the probe"


RANKED = """task: own_ranked
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{input}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
"""


@real
@pytest.mark.parametrize("answer", [likelihoods, in_words_only])
def test_a_users_ranked_task_by_lm_eval(tmp_path: Path, answer: Answer) -> None:
    """A byte is a token of the tokenizer here: of "b" and "c", one is even and likelier to the server."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "task.yaml").write_text(RANKED)
    even = [chr(97 + number) for number in range(26)]
    rows = [{"input": f"letter {each}:", "choices": ["b", "c"], "label": 0} for each in even]
    (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {f"{TASK_FILE}{path.name}": path for path in own.iterdir()}
    with answering(answer) as (url, _asked):
        if answer is in_words_only:
            with pytest.raises(StageError, match="task own_ranked needs log probabilities of the prompt"):
                run_stage(tmp_path, url, "own_ranked:10", files=files, max_length=64)
            return
        out = run_stage(tmp_path, url, "own_ranked:10", files=files, max_length=64)
    found = json.loads((out / "accuracy.json").read_text())
    assert found["questions"] == {"own_ranked.acc": 10}
    assert found["scores"]["own_ranked.acc"] in {0.0, 1.0}, "the same choice is likelier in each row"
    assert len({row["answer"] for row in drift.read(out)}) == 1


@real
def test_a_matrix_with_lm_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real Triton, our gateway, and lm_eval: two precisions compared by pairs of questions."""
    workspace = ["--workspace", str(tmp_path / "ws")]
    argv = ["run", str(TINY), *workspace, "--set", "settings.accuracy.tasks=[pipeline_arithmetic:20]"]
    assert main(argv) == 0
    capsys.readouterr()
    assert main(["report", *workspace, "--format", "json"]) == 0
    full, quantized = json.loads(capsys.readouterr().out)["cells"]
    name = "pipeline_arithmetic.exact_match"
    for row in (full, quantized):
        assert row["accuracy"].keys() == {name}
        assert row["accuracy_total"] == 20
        assert len(row["accuracy_intervals"][name]) == 2
    assert quantized["accuracy_drift"]["reference"] == full["id"]
    assert quantized["accuracy_drift"]["scores"][name]["questions"] == 20
    assert main(["recommend", *workspace, "--min-accuracy", "pipeline_arithmetic:-50%"]) == 0
