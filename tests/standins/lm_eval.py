"""A stand-in for lm_eval 0.4: it takes the options and model arguments that are used here, and no others, sends each question of
a task to the server, and leaves files of the same form.

Its tasks are named by what they show: `missing` does not exist, `group` has parts, `ranked` needs log probabilities of prompts,
and `long` is refused by the server. Other names have two questions.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MOMENT = "2026-01-02T03-04-05.678901"
QUESTIONS = {"The capital of France is": "Paris", "The capital of Italy is": "Oslo"}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--model", "--model_args", "--tasks", "--output_path"):
        parser.add_argument(flag, required=True)
    for flag in ("--num_fewshot", "--limit", "--include_path"):
        parser.add_argument(flag)
    for flag in ("--apply_chat_template", "--log_samples"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def log(text: str) -> None:
    print(f"2026-01-02:03:04:05 INFO     [{text}", file=sys.stderr, flush=True)


def main() -> None:
    given = parsed()
    model = dict(pair.split("=") for pair in given.model_args.split(","))
    known = {
        "model",
        "base_url",
        "num_concurrent",
        "tokenized_requests",
        "tokenizer",
        "tokenizer_backend",
        "max_length",
    }
    assert set(model) <= {*known, "timeout"}
    chat = given.model == "local-chat-completions"
    assert chat == given.apply_chat_template
    assert chat or given.model == "local-completions"
    assert given.log_samples
    if given.include_path is not None:
        assert Path(given.include_path) == Path.cwd()
    task = given.tasks
    if task == "missing":
        sys.exit("ValueError: Tasks not found: missing")
    log(f"evaluator:589] Running {'loglikelihood' if task == 'ranked' else 'generate_until'} requests")
    parts = ["group_a", "group_b"] if task == "group" else [task]
    limit = int(given.limit or 2)
    results: dict[str, Any] = {}
    folder = Path(given.output_path) / model["model"]
    folder.mkdir(parents=True)
    for part in parts:
        rows = [row(number, text, model, chat=chat) for number, text in enumerate(list(QUESTIONS)[:limit])]
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / f"samples_{part}_{MOMENT}.jsonl").write_text(text)
        results[part] = scores(part, [each["exact_match"] for each in rows])
    if task == "group":
        means = [results[part]["exact_match,none"] for part in parts]
        results = {"group": scores("group", means), **results}
    (folder / f"results_{MOMENT}.json").write_text(
        json.dumps(
            {
                "results": results,
                "group_subtasks": {"group": parts} if task == "group" else {},
                "versions": dict.fromkeys(results, 2.0),
                "n-shot": dict.fromkeys(results, int(given.num_fewshot or 0)),
                "higher_is_better": {each: {"exact_match": True, "f1": True, "ppl": False} for each in results},
                "n-samples": {part: {"original": 2, "effective": limit} for part in parts},
                "lm_eval_version": "0.4.13",
            }
        )
    )
    print("a table for people")


def row(number: int, text: str, model: dict[str, str], *, chat: bool) -> dict[str, Any]:
    """One answer of the server, as lm_eval logs it."""
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = json.dumps({"model": model["model"], "max_tokens": 4, **prompt}).encode()
    try:
        reply = json.load(urllib.request.urlopen(urllib.request.Request(model["base_url"], body)))["choices"][0]
    except urllib.error.HTTPError as error:
        said = error.read().decode()
        log(f"models.api_models] API request failed! Status code: {error.code}, Response text: {said}. Retrying...")
        sys.exit(1)
    said = reply["message"]["content"] if chat else reply["text"]
    # A log line may follow the progress bar on the same line.
    print(f"\rRequesting API: {number + 1}/2 [00:01<00:00, 9it/s]", end="", file=sys.stderr, flush=True)
    return {
        "doc_id": number,
        "target": QUESTIONS[text],
        "resps": [[said]],
        "filtered_resps": [said],
        "filter": "none",
        "metrics": ["exact_match"],
        "prompt_hash": f"prompt {number}",
        "target_hash": f"target {number}",
        "exact_match": float(said.strip() == QUESTIONS[text]),
    }


def scores(task: str, values: list[float]) -> dict[str, Any]:
    mean = sum(values) / len(values)
    more = {"f1,strict-match": 0.5, "f1_stderr,strict-match": 0.1, "ppl,none": 7.5, "ppl_stderr,none": "N/A"}
    return {
        "name": task,
        "alias": task,
        "sample_len": 2,
        "exact_match,none": mean,
        "exact_match_stderr,none": 0.1,
        **more,
    }


if __name__ == "__main__":
    main()
