"""The stages every toolchain shares: getting a model, and everything that talks to a running server.

Only declarations; each stage's program is a module of its own, imported in the process that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from trtllm_pipeline.domain import Cell, Json, Resources, Scope
from trtllm_pipeline.machine.model import Machine
from trtllm_pipeline.stages.base import Option, Stage

ENGINE: Final = ("build", "quantize", "download")
"""What is served, with its tokenizer beside it: an engine, or where there is none to build the weights themselves."""


def pick(cell: Cell, section: str, *names: str) -> dict[str, Json]:
    """The named values of one settings section of a cell."""
    values = cell.settings[section]
    return {name: values[name] for name in names}


def _download_params(cell: Cell) -> Mapping[str, Json]:
    return {"source": cell.recipe["source"]}


DOWNLOAD = Stage(
    name="download",
    version=2,
    summary="fetch a model into a standard Hugging Face folder and verify it",
    program="trtllm_pipeline.stages.download:run",
    shared=True,
    options=(
        Option(
            "source", "json", 'a source as in a recipe: {"hugging_face": NAME, "revision": COMMIT}, ...', required=True
        ),
        Option("max_workers", "int", "files fetched at once", default=4),
        Option("offline", "bool", "use only what is on this machine", default=False),
        Option("folder", "json", "where a local source lies: a path in double quotes, or null"),
    ),
    params=_download_params,
    advice=lambda cell: {
        **pick(cell, "download", "max_workers", "offline"),
        "folder": cell.recipe.get("folder"),
    },
    resources=lambda _cell, _machine: Resources(cpus=0, downloads=1),
    expected_s=2.0,
    expected_s_per_gb=20.0,
    leaves="model",
    timeout_s=24 * 3600.0,
    retries=4,
)


def launch(
    program: str = "trtllm_pipeline.stages.launch:run",
    *,
    inputs: Mapping[str, str | tuple[str, ...]],
    params: tuple[str, ...],
    identity: tuple[str, ...],
    resources: Callable[[Cell, Machine], Resources],
    options: tuple[Option, ...] = (),
) -> Stage:
    """The service stage. `params` are the serve settings that change how the server answers; the rest is advice.

    `options` are those of the toolchain's own program, beside what every server has.
    """
    return Stage(
        name="launch",
        version=1,
        summary="start a server on a repository and keep it running",
        program=program,
        inputs=inputs,
        scope=Scope.SERVICE,
        section="serve",
        options=(
            *options,
            Option("threads", "int", "CPU threads of the runtime, 0 for its own choice", default=0),
            Option("http_port", "int", "0 for a free one", default=0),
            Option("grpc_port", "int", "0 for a free one", default=0),
            Option("metrics_port", "int", "0 for a free one", default=0),
            Option("host", "str", "address to listen on", default="127.0.0.1"),
            Option("ready_timeout_s", "float", "seconds until the server must be ready", default=300.0),
            Option("stop_timeout_s", "float", "seconds a server has to stop by itself", default=3.0),
            Option("restarts", "int", "how often a server that died is started again", default=3),
        ),
        params=lambda cell: pick(cell, "serve", *params),
        # A server that dies under a pipeline's stages has spoilt what they measured: the failure is theirs to hear.
        advice=lambda cell: {
            **pick(
                cell, "serve", "http_port", "grpc_port", "metrics_port", "host", "ready_timeout_s", "stop_timeout_s"
            ),
            "restarts": 0,
        },
        resources=resources,
        identity=identity,
        expected_s=5.0,
        expected_s_per_gb=2.0,
        timeout_s=30 * 24 * 3600.0,
        retries=1,
    )


_QUESTIONS: Final = 28
"""As many are built in."""
_GENERAL_PROMPT = "The capital of France is"
_FULL_PRECISIONS = frozenset({"fp32", "fp16", "bf16"})


def _smoke_params(cell: Cell) -> Mapping[str, Json]:
    """The matrix's question, or the recipe's, or a general one; an expected answer belongs to its own question.

    The recipe's answer is that of the full-precision model; a quantized one may word it otherwise and still be sound.
    """
    settings = cell.settings["smoke"]
    known = cell.recipe.get("smoke")
    recipe: Mapping[str, Json] = known if isinstance(known, dict) else {}
    answers = recipe.get("expected")
    expected = settings["expected"]
    if (
        expected is None
        and cell.precision in _FULL_PRECISIONS
        and settings["prompt"] in {None, recipe.get("prompt")}
        and isinstance(answers, dict)
    ):
        expected = answers.get(cell.toolchain)
    return {
        "prompt": settings["prompt"] or recipe.get("prompt") or _GENERAL_PROMPT,
        "max_tokens": settings["max_tokens"],
        "expected": expected,
    }


SMOKE = Stage(
    name="smoke",
    version=1,
    summary="talk to the server over every protocol and check the answers",
    program="trtllm_pipeline.stages.smoke:run",
    shared=True,
    inputs={"service": "launch", "repository": "repository", "engine": ENGINE},
    scope=Scope.INSIDE,
    options=(
        Option("prompt", "str", "what to ask", required=True),
        Option("max_tokens", "int", "length of the answer", default=16),
        Option("expected", "json", "text the greedy answer must contain, or null"),
        Option("max_seq_len", "json", "tokens of prompt and answer together, where no engine says it, or null"),
        Option("request_timeout_s", "float", "seconds one request may take", default=120.0),
    ),
    params=_smoke_params,
    advice=lambda cell: {**pick(cell, "smoke", "request_timeout_s"), "max_seq_len": cell.isl + cell.osl},
    expected_s=3.0,
    timeout_s=600.0,
)


_LARGEST_KV_BLOCK = 128
"""Tokens, of any release's default."""


def _declared(cell: Cell) -> dict[str, Json]:
    """What a server of this cell must say of itself, under TensorRT-LLM's names."""
    tokens = cell.settings["build"]["max_num_tokens"]
    # Beyond one block of the KV cache and a full batch of prompts trtllm-build may move it; `build` looks at what it did.
    kept = isinstance(tokens, int) and _LARGEST_KV_BLOCK <= tokens <= cell.max_batch_size * cell.isl
    return {
        "tp": cell.tp,
        "max_batch_size": cell.max_batch_size,
        "max_input_len": cell.isl,
        "max_seq_len": cell.isl + cell.osl,
        "max_num_tokens": tokens if kept else None,
        **pick(
            cell,
            "repository",
            "decoupled",
            "accumulate_tokens",
            "exclude_input_in_output",
            "enable_kv_cache_reuse",
        ),
    }


def _rates(cell: Cell) -> dict[str, Json]:
    """What a measurement has only where it was asked for: levels of an open loop, objectives."""
    given = pick(cell, "perf", "request_rate", "request_distribution", "slo")
    wanted = {"request_rate", "request_distribution"} if given["request_rate"] else set()
    return {name: value for name, value in given.items() if name in wanted or (name == "slo" and value)}


def _perf_s(cell: Cell, token_s: float) -> float:
    """Seconds that all levels take, each answer with its longest."""
    perf = cell.settings["perf"]
    requests, repeats = float(str(perf["requests"])), float(str(perf["repeats"]))
    answer_s = float(str(perf["max_tokens"] or cell.osl)) * token_s
    closed = [requests / level * answer_s for level in map(float, _listed(perf["concurrency"]))]
    opened = [requests / rate + answer_s for rate in map(float, _listed(perf["request_rate"]))]
    return repeats * sum(closed + opened)


def _listed(value: Json) -> list[str]:
    return [str(each) for each in value] if isinstance(value, (list, tuple)) else []


PERF = Stage(
    name="perf",
    version=3,
    summary="measure latency and throughput over a list of concurrencies or request rates",
    program="trtllm_pipeline.stages.perf:run",
    shared=True,
    inputs={"service": "launch", "repository": "repository", "engine": ENGINE},
    after=("smoke",),
    scope=Scope.INSIDE,
    options=(
        Option("concurrency", "json", "requests in flight, e.g. [1,4]; [] for none", required=True),
        Option("request_rate", "json", "requests a second however many are in flight, e.g. [2.5,10]"),
        Option("request_distribution", "str", "of their times", default="poisson", choices=("poisson", "constant")),
        Option("slo", "json", 'objectives of goodput in ms, e.g. {"ttft_ms":300,"tpot_ms":40}'),
        Option("requests", "int", "requests a level", required=True),
        Option("warmup_requests", "json", "requests before each level; null: two for each in flight, 4 for a rate"),
        Option("max_tokens", "int", "output tokens a request", required=True),
        Option("temperature", "float", "0 is greedy", default=0.0),
        Option("protocol", "str", "how to talk", default="grpc", choices=("grpc", "http")),
        Option("repeats", "int", "how often each level is measured", default=1),
        Option("declared", "json", 'settings the server must have, e.g. {"enable_kv_cache_reuse":false}'),
        Option("request_timeout_s", "float", "seconds one request may take", default=300.0),
    ),
    params=lambda cell: {
        **pick(cell, "perf", "concurrency", "requests", "warmup_requests", "temperature", "protocol", "repeats"),
        **_rates(cell),
        "max_tokens": cell.settings["perf"]["max_tokens"] or cell.osl,
        "declared": _declared(cell),
    },
    advice=lambda cell: pick(cell, "perf", "request_timeout_s"),
    file_names=("input_data",),
    files=lambda cell: {"input_data": str(cell.settings["perf"]["input_data"])},
    identity=("cpu",),
    expected_s=5.0,
    load_s=_perf_s,
    timeout_s=6 * 3600.0,
)


def _accuracy_s(cell: Cell, token_s: float) -> float:
    """Seconds that the built-in questions take, each with the longest answer."""
    settings = cell.settings["accuracy"]
    return _QUESTIONS / float(str(settings["concurrency"])) * float(str(settings["max_tokens"])) * token_s


def _score_params(cell: Cell) -> dict[str, Json]:
    return pick(cell, "accuracy", "metrics", "min_score")


def _score_files(cell: Cell, asked_by: str) -> Mapping[str, str]:
    """The prompt file of the stage that asked, and the module of the user's own metrics where they name one."""
    files = {"input_data": str(cell.settings[asked_by]["input_data"])}
    metrics, folder = (cell.settings["accuracy"][name] for name in ("metrics", "python_path"))
    own = [str(name).partition(":")[0] for name in metrics if ":" in str(name)] if isinstance(metrics, list) else []
    if own:
        files["metric_module"] = f"{folder}/{own[0].replace('.', '/')}.py"
    return files


_SCORE_OPTIONS = (
    Option("metrics", "json", 'scores to compute, e.g. ["exact","contains"]', default=["exact", "contains"]),
    Option("min_score", "json", "least mean score of the first metric, or null"),
)

ACCURACY = Stage(
    name="accuracy",
    version=2,
    summary="score the server's greedy answers against references",
    program="trtllm_pipeline.stages.accuracy:run",
    shared=True,
    inputs={"service": "launch", "engine": ENGINE},
    after=("smoke",),
    scope=Scope.INSIDE,
    applies=lambda cell, _machine: cell.settings["accuracy"]["answers"] == "own",
    options=(
        Option("max_tokens", "int", "output tokens a request", required=True),
        *_SCORE_OPTIONS,
        Option("concurrency", "int", "requests in flight", default=4),
        Option("request_timeout_s", "float", "seconds one request may take", default=300.0),
    ),
    params=lambda cell: {**pick(cell, "accuracy", "max_tokens"), **_score_params(cell)},
    advice=lambda cell: pick(cell, "accuracy", "concurrency", "request_timeout_s"),
    file_names=("input_data", "metric_module"),
    files=lambda cell: _score_files(cell, "accuracy"),
    expected_s=2.0,
    load_s=_accuracy_s,
    timeout_s=6 * 3600.0,
)

# Instead of the accuracy stage, where the matrix says that perf's own answers are to be scored. An artifact of perf's
# artifact: another metric, or a corrected reference, neither starts a server nor measures again.
SCORE = Stage(
    name="score",
    version=1,
    summary="score the answers that perf timed against references",
    program="trtllm_pipeline.stages.score:run",
    shared=True,
    inputs={"perf": "perf", "engine": ENGINE},
    section="accuracy",
    applies=lambda cell, _machine: cell.settings["accuracy"]["answers"] == "perf",
    options=_SCORE_OPTIONS,
    params=_score_params,
    file_names=("input_data", "metric_module"),
    files=lambda cell: _score_files(cell, "perf"),
)
