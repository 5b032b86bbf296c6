"""Results of lm_eval in the form that release 0.4.13 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.measure.score.lm_eval import TaskItem, TaskResults

MOMENT = "2026-11-28T21-47-56.056210"


def left(folder: Path, samples: dict[str, list[dict[str, Any]]], **data: Any) -> Path:
    (folder / "m").mkdir()
    (folder / "m" / f"results_{MOMENT}.json").write_text(json.dumps(data))
    for task, rows in samples.items():
        text = "\n".join(map(json.dumps, rows))
        (folder / "m" / f"samples_{task}_{MOMENT}.jsonl").write_text(text + "\n")
    return folder


def sample(number: int, resps: Any, chain: str = "none", **metrics: Any) -> dict[str, Any]:
    about = {"prompt_hash": f"p{number}", "target_hash": f"t{number}", "filter": chain}
    return {"doc_id": number, "target": "3", "resps": resps, **about, "metrics": list(metrics), **metrics}


def test_each_filter_has_a_score(tmp_path: Path) -> None:
    rows = [
        sample(0, [[" 12"]], "strict-match", exact_match=1.0),
        sample(0, [[" 12"]], "flexible-extract", exact_match=1.0),
        sample(1, [[" is 7"]], "strict-match", exact_match=0.0),
        sample(1, [[" is 7"]], "flexible-extract", exact_match=1.0),
    ]
    values = {
        "name": "gsm8k",
        "alias": "gsm8k",
        "sample_len": 2,
        "exact_match,strict-match": 0.5,
        "exact_match_stderr,strict-match": 0.5,
        "exact_match,flexible-extract": 1.0,
        "exact_match_stderr,flexible-extract": 0.0,
    }
    found = TaskResults.read(left(tmp_path, {"gsm8k": rows}, results={"gsm8k": values}), "gsm8k")
    strict, flexible = "gsm8k.exact_match.strict_match", "gsm8k.exact_match.flexible_extract"
    assert found.scores == {strict: 0.5, flexible: 1.0}
    assert found.errors == {strict: 0.5, flexible: 0.0}
    assert not found.ranks
    assert [(row["id"], row["answer"], row["scores"]) for row in found.answers] == [
        ("gsm8k/0", " 12", {strict: 1.0, flexible: 1.0}),
        ("gsm8k/1", " is 7", {strict: 0.0, flexible: 1.0}),
    ]


def test_a_group_is_scored_by_the_answers_to_its_parts(tmp_path: Path) -> None:
    """Choices are ranked by likelihood: the answer is the number of the likeliest."""
    ranked = [[["-3.5", "False"]], [["-1.25", "True"]]]
    samples = {
        "mmlu_law": [sample(0, ranked, acc=True), sample(1, ranked, acc=False)],
        "mmlu_physics": [sample(0, ranked[::-1], acc=0.0), sample(1, ranked, acc=1.0)],
    }
    results = {
        "mmlu": {"acc,none": 0.5, "acc_stderr,none": 0.25, "alias": "mmlu"},
        "mmlu_stem": {"acc,none": 0.5, "acc_stderr,none": 0.5, "alias": " - stem"},
        "mmlu_physics": {"acc,none": 0.5, "acc_stderr,none": 0.5, "alias": "  - physics"},
        "mmlu_law": {"acc,none": 0.5, "acc_stderr,none": 0.5, "alias": " - law"},
    }
    groups = {"mmlu": ["mmlu_stem", "mmlu_law"], "mmlu_stem": ["mmlu_physics"]}
    configs = {name: {"output_type": "multiple_choice"} for name in samples}
    folder = left(tmp_path, samples, results=results, group_subtasks=groups, configs=configs)
    found = TaskResults.read(folder, "mmlu")
    assert found.ranks
    assert (found.scores, found.questions) == ({"mmlu.acc": 0.5}, {"mmlu.acc": 4})
    assert [(row["id"], row["answer"], row["scores"]["mmlu.acc"]) for row in found.answers] == [
        ("mmlu_physics/0", "0", 0.0),
        ("mmlu_physics/1", "1", 1.0),
        ("mmlu_law/0", "1", 1.0),
        ("mmlu_law/1", "1", 0.0),
    ]


def test_a_tag_has_the_scores_of_its_tasks(tmp_path: Path) -> None:
    results = {name: {"acc,none": 0.5, "acc_stderr,none": "N/A"} for name in ("arc_easy", "arc_challenge")}
    found = TaskResults.read(left(tmp_path, {}, results=results), "ai2_arc")
    assert found.scores == {"arc_easy.acc": 0.5, "arc_challenge.acc": 0.5}
    assert found.errors == {"arc_easy.acc": None, "arc_challenge.acc": None}
    assert not found.answers


def test_answers_have_only_scores_whose_mean_is_the_tasks_score(tmp_path: Path) -> None:
    """A score of all answers together cannot be compared question by question."""
    rows = [sample(0, [["a"]], f1=1.0, bleu=["a", "b"]), sample(1, [["b"]], f1=0.0, bleu=["c", "d"])]
    values = {"f1,none": 0.8, "f1_stderr,none": 0.1, "bleu,none": 31.5, "bleu_stderr,none": 1.0}
    folder = left(tmp_path, {"x": rows}, results={"x": values}, higher_is_better={"x": {"f1": True, "bleu": True}})
    assert TaskResults.read(folder, "x").scores == {"x.f1": 0.8, "x.bleu": 31.5}
    found = TaskResults.read(folder, "x", shares=True)
    assert found.scores == {"x.f1": 0.8}
    assert [row["scores"] for row in found.answers] == [{}, {}]


def test_what_is_no_share_is_no_accuracy(tmp_path: Path) -> None:
    values = {"word_perplexity,none": 0.9, "word_perplexity_stderr,none": "N/A"}
    rising = {"wikitext": {"word_perplexity": False}}
    folder = left(tmp_path, {}, results={"wikitext": values}, higher_is_better=rising)
    with pytest.raises(StageError, match="task wikitext has no score from 0 to 1, higher is better"):
        TaskResults.read(folder, "wikitext", shares=True)


def test_files_of_another_form(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="lm_eval left no results"):
        TaskResults.read(tmp_path, "x")
    with pytest.raises(StageError, match="not a results file of lm_eval"):
        TaskResults.read(left(tmp_path, {}, other=1), "x")


def test_items() -> None:
    assert TaskItem.parse("mmlu:200") == TaskItem("mmlu", "200")
    assert TaskItem.parse("pipeline_arithmetic").shipped
    assert not TaskItem.parse("gsm8k").shipped
    for wrong in ("", "a b", "a:0", "a:-1", "a:b", "../a", ".."):
        with pytest.raises(ValueError, match="is not a task"):
            TaskItem.parse(wrong)
