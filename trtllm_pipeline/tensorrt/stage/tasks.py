"""Run standard tasks of lm-evaluation-harness on a running server.

Writes `accuracy.json` and `answers.jsonl` like the accuracy stage, next to the files of lm_eval. lm_eval sends requests
to OpenAI endpoints. A Triton server gets one from a separate gateway while the stage runs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, StageError, write_json
from trtllm_pipeline.measure import Service, lm_eval, target, urls
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.model_inputs import encoder, model_folder
from trtllm_pipeline.tensorrt.stage.params import TASK_FILE, TaskParams, to_json

_GATEWAY: Final = "trtllm_pipeline.serve.gateway"
_PROBE: Final = "The capital of France is"


def run(context: StageContext[TaskParams]) -> None:
    """Send, score, write. Raises StageError if lm_eval fails, and for a score below the minimum."""
    params, model = context.params, model_folder(context.inputs)
    service = Service.read(context.inputs["service"])
    endpoint = params.task_endpoint or (service.endpoint if service.kind == "openai" else "completions")
    with _openai_url(service, context.inputs["service"], model, context.attempt) as url:
        tokens = None if endpoint == "chat" or service.kind != "openai" else encoder(model)
        likelihoods = tokens is not None and returns_likelihoods(
            url, service.model, tokens(_PROBE), params.request_timeout_s
        )
        scored = lm_eval.evaluate(
            lm_eval.Evaluation(
                url=url,
                model=service.model,
                tasks=params.tasks,
                endpoint=endpoint,
                tokenizer=str(model) if likelihoods else "none",
                max_length=params.max_length if likelihoods else None,
                num_fewshot=params.num_fewshot,
                concurrency=params.concurrency,
                timeout_s=params.request_timeout_s,
                include_path=_include_path(context.files),
                likelihoods=likelihoods,
            ),
            context.out,
            started=lambda argv: print(shlex.join(argv), flush=True),  # noqa: T201 - the stage's log
            progress=context.progress,
            settings=to_json(params),
            shares=True,
        )
    print(scored)  # noqa: T201
    scored.check_least(next(iter(scored.scores)), params.min_score)


def _include_path(files: Mapping[str, Path]) -> str | None:
    """The directory of the user's tasks, from one of its files."""
    for name, path in files.items():
        if name.startswith(TASK_FILE):
            return str(path.parents[len(Path(name.removeprefix(TASK_FILE)).parts) - 1])
    return None


def returns_likelihoods(url: str, model: str, tokens: Sequence[int], timeout_s: float) -> bool:
    """True if a server returns the log probability of each token of a prompt, as lm_eval requests it."""
    import httpx

    key = target.environment_key()
    body = {"model": model, "prompt": [list(tokens)], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    try:
        answer = httpx.post(
            f"{urls.api_url(url)}/completions",
            json=body,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
        ).json()
        known = answer["choices"][0]["logprobs"]["token_logprobs"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError):
        return False
    return len(known) == len(tokens) + 1 and all(isinstance(each, (int, float)) for each in known[1:])


@contextmanager
def _openai_url(service: Service, file: Path, model: Path, attempt: Path) -> Iterator[str]:
    """The URL of the server's OpenAI endpoints. For Triton, of a gateway that runs meanwhile. Raises StageError."""
    if service.kind == "openai":
        yield service.http
        return
    config, log = attempt / "gateway-config.json", attempt / "gateway.log"
    offered = {"name": service.model, "service": str(file), "model_folder": str(model)}
    write_json(config, {"schema": 1, "models": [offered]})
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", _GATEWAY, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise StageError(
                    f"the gateway for lm_eval did not start: {log.read_text(errors='replace')[-500:].strip()}",
                    failure=FailureClass.TRANSIENT,
                )
            yield json.loads(line)["url"]
        finally:
            process.terminate()
