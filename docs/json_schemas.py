"""Writes `docs/schemas/*.json`: JSON Schemas of what commands print, from what they print.

    python docs/json_schemas.py

A little matrix is run for real: a cell that works in two precisions, one that fails, one that can never work, and two that are
measured otherwise: without objectives, by conversations of given lengths, and by built-in prompts at request rates. What the
commands then print is merged into one schema each. `tests/integration/test_json_schemas.py` validates another run by the schemas that
are written here, and `docs/generate.py` makes the tables of `docs/reference/json.md` from them.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "schemas"
MATRIX: Final = """\
name: schemas
axes:
  model: [tiny]
  precision: [fp16, int8_wo, int4_wo, fp8]
  max_batch_size: [2]
  lengths: ["160,16"]
add:
  - { model: tiny, precision: int8_wo, max_batch_size: 2, lengths: "160,15" }
  - { model: tiny, precision: int8_wo, max_batch_size: 5, lengths: "160,16" }
override:
  - where: { precision: int4_wo }
    settings: { smoke: { expected: an answer that no model gives } }
  - where: { lengths: "160,16" }
    settings: { perf: { slo: { ttft_ms: 100000 } } }
  - where: { lengths: "160,15" }
    settings: { perf: { turns: 2, turn_delay_s: 0.01 } }
  - where: { max_batch_size: 5 }
    settings: { perf: { workload: prompts, concurrency: [1], request_rate: [20], max_in_flight: 2, find_rate: 0.5, find_concurrency: 0.5, measurement_interval_ms: 300, budget_s: 5 } }
settings:
  perf: { concurrency: [1, 2], requests: 4, warmup_requests: 1, max_tokens: 12 }
  accuracy: { max_tokens: 8 }
  cost: { gpu_hour: 2.5 }
"""
_OTHER_RUN: Final = "run --matrix matrix.yaml --set axes.precision=[int8_wo] --until download --progress quiet"
_RUN: Final = "run --matrix matrix.yaml --progress quiet --format json"
_GPUS: Final = "--assume tensorrt_llm==1.2.0,sm=90,gpus=8"
OUTPUTS: Final[Mapping[str, Sequence[str]]] = {
    "plan": (
        "plan --matrix matrix.yaml --format json",
        f"plan --matrix matrix.yaml --toolchain tensorrt_llm {_GPUS} --format json",
        "plan --matrix matrix.yaml --workspace elsewhere --remote shared --format json",
    ),
    "fits": (
        "plan --matrix matrix.yaml --toolchain tensorrt_llm --assume tensorrt_llm==1.2.0,sm=90,gpus=2,gpu_memory_gib=0.1 --set axes.max_batch_size=[512] --fit --format json",
        "plan --matrix matrix.yaml --fit --format json",
    ),
    "plan-difference": (
        f"plan --matrix matrix.yaml {_GPUS} --compare here --format json",
        f"plan --matrix matrix.yaml --toolchain tensorrt_llm {_GPUS} --compare tensorrt_llm==0.12.0,sm=80,gpus=8 --format json",
    ),
    "report": ("report --format json",),
    "status": ("status --format json",),
    "runs": ("status --runs --format json",),
    "comparison": (
        "compare --by precision --base fp16 --format json",
        "compare latest latest --fail-on output_tps:-90% --format json",
    ),
    "recommendation": (
        "recommend --format json",
        "recommend --slo ttft_p99=100s --min-accuracy=-1% --format json",
    ),
    "search": (
        "search --matrix matrix.yaml --dry-run --format json",
        "search --matrix matrix.yaml --set axes.max_batch_size=[2,4] --slo tpot_p50=0.001ms --dry-run --format json",
    ),
    "doctor": (
        "doctor --format json",
        "doctor --assume tensorrt_llm==1.2.0,sm=90,gpus=2 --format json",
        "doctor --assume tensorrt_llm==0.12.0,sm=90,gpus=1,build=no,examples=no,templates=no --format json",
        "doctor --assume gpus=0,triton=no --format json",
    ),
    "doctor-deep": ("doctor --deep --toolchain embedded --precision fp16,fp8 --format json",),
    "store-list": ("store list --format json",),
    "store-verify": (
        "store verify --format json",
        "store verify --require-signed --trusted-keys trusted --format json",
    ),
    "provenance": (
        "store provenance --require-signed --trusted-keys trusted --format json",
        "store provenance --sign signing.pem --format json",
    ),
    "servers": ("serve ps --format json", "serve status schemas --format json"),
    "export": (
        "export tiny/fp16 --to bundle,hub --repository me/tiny --output-dir for-the-hub --format json",
        "export tiny/fp16 --to compose --output-dir for-compose --format json",
    ),
    "store-du": ("store du --format json",),
    "store-keep": ("store keep build --format json",),
    "store-rm": ("store rm build --dry-run --format json", "store rm --run latest --dry-run --format json"),
    "store-prune": ("store prune --unused-for 0d --dry-run --format json",),
}
"""Name of a schema -> the commands whose output it describes."""
FILES: Final = {
    "gateway": "serve/*/gateway.json",
    "job": "store/*/*/job.json",
    "manifest": "store/*/*/manifest.json",
    "load-result": "store/perf/*/out/perf.json",
}
"""Name of a schema -> the files of a workspace that it describes."""
_MAPS: Final = re.compile(
    r"(^|\.)(seconds|counts|environment|inputs|params|key|files|next_commands|accuracy|accuracy_intervals|finish_reasons|scores|slo"
    r"|methods|pairs\[\]\.metrics|objectives_ms|definitions|identity|smoke|settings|sampling|as|token_count|axes|intervals|numerics"
    r"|by\.(stage|model|precision)|fingerprints|ports|logs|targets|statement|synthetic|highest_rate\.tried|highest_concurrency\.tried|triton\[\]\.of|triton_use\.models|(recommended|candidates)\[\]\.workload)$"
)
"""Objects whose keys are data: names of stages, metrics, settings. Any JSON may stand there."""
_WHOLE: Final = re.compile(
    r"(_bytes|tokens|requests|failures|cells|total|count|downloads|pid|checked|damaged|removed_(attempts|partial)|restarts|stage_runs|same|changed|only_new|only_base|feasible\.new|feasible\.base|favourites|expected_measured|questions|gpus|cpus|tp|pp|isl|osl|n|size|schema|budget|spent|\.line)$"
)
"""Names of whole numbers; any other number may have a fraction."""
_NEVER_SEEN: Final = {
    "gpus": "array",
    "gpu": "array",
    "mpirun": "string",
    **dict.fromkeys(("mixed_precisions", "same_work_as"), "string"),
    "nearest": "object",
    "shortfall": "number",
    "hint": "string",
    "failure": "string",
    "request_rate": "number",
    "trace_speed": "number",
    "served_gpus": "integer",
    "line": "integer",
    "tokens": "object",
    "paybacks[].tokens": "number",
    "steady": "object",
    "commit": "string",
    "comparison": "object",
    "run.forecast.expected_s": "number",
    "forecast.expected_s": "number",
    **dict.fromkeys(("left_s", "started_s"), "number"),
    "left_complete": "boolean",
    "progress": "object",
    **dict.fromkeys(("set", "agreement_interval"), "array"),
    **dict.fromkeys(
        (
            "in_flight",
            "in_flight_max",
            "kv_cache_use",
            "kv_cache_use_max",
            "waiting",
            "waiting_max",
            "high",
            "p50",
            "p99",
            "saved_s_per_token",
            "load_s",
            "requests_per_s",
            "errors_per_s",
            "queued",
        ),
        "number",
    ),
}
"""A path, or the last name of one -> its type, where every example has null."""
_SOMETIMES_NULL: Final = re.compile(
    r"(paybacks\[\]\.(tokens|load_s|saved_s_per_token)|\.interval|(?<!feasible)(?<!cells\[\])\.(method|change|base|new)|steady|\.value|\.missed|_intervals?"
    r"|^levels\[\]\.(duration_s|\w+_per_s|(in|out)put_tokens|headline\.window)|(perf|levels)\[\]\.repeats\[\]\.(duration_s|\w+_per_s)"
    r"|triton_use\.(in_flight|waiting|kv_cache_use)\w*|highest_rate\.(rate|low|high|reason)|highest_concurrency\.(concurrency|missed_at|saturated_at)|servers\[\]\.((requests|errors)_per_s|queued)|\.(user_tps|no_p99|gpu_hour|numerics|nearest|shortfall|same_work_as|mixed_precisions|dollars_per_million|goodput\.output_tokens_per_s|output_tokens_per_s_per_gpu|preparation_s|missed_at|saturated_at|highest_concurrency)$|\.trusted|\.commit|(^|(run|doctor-deep)\.)forecast(\.expected_s)?|fits\[\]\.set|\.why|\.bench|\.mpirun|findings\[\]\.(toolchain|family|precision|layout))$"
)
"""Paths that are null by chance, or on other machines: a difference that no interval can be told of, a window that was too
short, a program that was examined instead of a cell, a run that did nothing or not all."""
_SUMMARY: Final = {"n", "min", "mean", "p50", "p99", "max"}
_NUMBER_OR_NULL: Final = {"type": ["number", "null"]}
_DEFINITIONS: Final = {
    "summary": {
        "description": "statistics of many values",
        "type": "object",
        "properties": dict.fromkeys(("n", "min", "mean", "p50", "p75", "p90", "p95", "p99", "max"), _NUMBER_OR_NULL),
        "required": ["n", "mean", "p50", "p99"],
    }
}


def pipeline(folder: Path, words: str, *, codes: Iterable[int] = (0, 1, 3, 4)) -> str:
    """What `pipeline WORDS` prints in a directory."""
    argv = [sys.executable, "-m", "trtllm_pipeline", *shlex.split(words)]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise SystemExit(f"pipeline {words}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def examples(folder: Path) -> dict[str, list[Any]]:
    """Run the matrix in `directory`; what everything printed and wrote, by schema."""
    (folder / "matrix.yaml").write_text(MATRIX, encoding="utf-8")
    report = pipeline(folder, _RUN, codes=[1])
    engine = next((folder / ".pipeline/store/build").glob("*/out"))
    pipeline(folder, "store push shared build", codes=[0])
    _write_key(folder / "signing.pem")
    # It measures, which waits until no server is kept.
    found = {"doctor-deep": _printed(folder, "doctor-deep")}
    try:
        pipeline(folder, "serve start tiny/fp16 --openai --name schemas", codes=[0])
        pipeline(folder, f"serve start {engine} --name of-a-folder", codes=[0])
        found |= {name: _printed(folder, name) for name in OUTPUTS if name not in found}
        found["gateway"] = _written(folder, "gateway")  # which is there while it listens
    finally:
        pipeline(folder, "serve stop --all", codes=[0])
    found["servers"] += _printed(folder, "servers")
    pipeline(folder, _OTHER_RUN, codes=[0])
    found["store-prune"] += _printed(folder, "store-prune")
    found["report"].append(json.loads(report))
    return {**{name: _written(folder, name) for name in FILES}, **found}


def _printed(folder: Path, name: str) -> list[Any]:
    return [json.loads(pipeline(folder, words)) for words in OUTPUTS[name]]


def _written(folder: Path, name: str) -> list[Any]:
    paths = sorted((folder / ".pipeline").glob(FILES[name]))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _write_key(path: Path) -> None:
    """A key that statements can be signed with, and its public part in the directory `trusted` next to it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (path.parent / "trusted").mkdir()
    (path.parent / "trusted" / "signing.pem").write_bytes(public)


def schema_of(values: Sequence[Any], path: str = "") -> dict[str, Any]:
    """A schema that all these values meet."""
    kinds = {_kind(value, path) for value in values}
    objects = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    if _SOMETIMES_NULL.search(path) and not path.endswith("]"):
        kinds.add("null")
    if objects and all(value.keys() >= _SUMMARY for value in objects):
        reference = {"$ref": "#/$defs/summary"}
        return {"anyOf": [reference, {"type": "null"}]} if "null" in kinds else reference
    if kinds == {"null"}:
        kinds.add(_NEVER_SEEN.get(path) or _NEVER_SEEN.get(path.rpartition(".")[2].removesuffix("[]"), "string"))
    if kinds >= {"integer", "number"}:
        kinds.remove("integer")
    schema: dict[str, Any] = {"type": sorted(kinds, key=lambda kind: (kind == "null", kind))}
    if len(kinds) == 1:
        schema["type"] = kinds.pop()
    if path == "schema":
        return {"const": values[0]}
    if objects and not _MAPS.search(path):
        names = list(dict.fromkeys(name for value in objects for name in value))
        schema["properties"] = {
            name: schema_of([value[name] for value in objects if name in value], f"{path}.{name}".lstrip("."))
            for name in names
        }
        schema["required"] = [name for name in names if all(name in value for value in objects)]
    items = [item for value in lists for item in value]
    if items:
        schema["items"] = schema_of(items, f"{path}[]")
    return schema


def _kind(value: Any, path: str) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer" if _WHOLE.search(path) else "number"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def document(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """The whole schema of one output."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **schema_of(values)}
    return {**schema, "$defs": _DEFINITIONS} if "$defs/summary" in json.dumps(schema) else schema


def main() -> int:
    """Write all schemas. Told to end, it stops its servers first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, values in examples(Path(folder)).items():
            text = json.dumps(document(name, values), indent=1)
            (FOLDER / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
