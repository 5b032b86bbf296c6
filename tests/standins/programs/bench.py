"""`trtllm-bench throughput`: answers a data set in its own process, and writes the report.

Source of the report's form: `bench/dataclasses/reporting.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.standins.programs import ProgramError, Work, arguments, refusal
from tests.standins.programs.engine import check_tokenizer, is_engine, read_engine
from tests.standins.programs.llm_api import check_architecture, read_settings
from tests.standins.tokens import Tokens

_TTFT_MS: Final = 10.0
_TOKEN_MS: Final = 2.0


def run(work: Work, argv: Sequence[str]) -> int:
    """Load what is asked, answer all rows, write the report."""
    group, command, options = arguments.parse_group("trtllm-bench", work.facts["tools"]["trtllm-bench"], argv)
    if command != "throughput":
        raise refusal(f"there is no stand-in for `trtllm-bench {command}`")
    model = Path(group["model_path"] or group["model"])
    backend, ranks = _load(work, model, options)
    if ranks > len(work.gpus):
        raise refusal(f"{ranks} ranks and {len(work.gpus)} visible GPUs")
    settings = options.get("extra_llm_api_options") or options.get("config")
    if settings is not None:
        read_settings(Path(settings).read_text("utf-8"))
    rows = _rows(options["dataset"])
    work.begin()
    if options.get("report_json"):
        sys.path.append(work.facts["packages"])
        report = _report(work, group["model"], Tokens(model), backend, rows, options)
        Path(options["report_json"]).write_text(json.dumps(report), encoding="utf-8")
    return 0


def _load(work: Work, model: Path, options: Mapping[str, Any]) -> tuple[str, int]:
    """The backend that answers, and its ranks."""
    engine = options.get("engine_dir")
    backend = options.get("backend")
    if backend in {None, "tensorrt"} and engine is not None:
        check_tokenizer(model)
        config = read_engine(work, Path(engine))
        return "TensorRT", int(config["pretrained_config"]["mapping"]["world_size"])
    if engine is not None:
        raise refusal(f"{engine} is an engine, and the backend is {backend}")
    file = model / "config.json"
    if not file.is_file() or is_engine(model):
        raise ProgramError(f"OSError: {model} does not appear to have a file named config.json.")
    check_architecture(json.loads(file.read_text(encoding="utf-8")))
    check_tokenizer(model)
    return "Pytorch", int(options["tp"]) * int(options["pp"])


def _rows(dataset: str | None) -> list[dict[str, Any]]:
    """The rows of the data set. Source: `create_dataset_from_stream`."""
    if dataset is None:
        raise refusal("no data set")
    rows = [json.loads(line) for line in Path(dataset).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if "task_id" not in row or "output_tokens" not in row or not ({"prompt", "input_ids", "logits"} & row.keys()):
            raise ProgramError(f"KeyError: a row of the data set is {sorted(row)}")
    return rows


def _report(
    work: Work,
    model: str,
    tokens: Tokens,
    backend: str,
    rows: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    at_once = min(len(rows), options["concurrency"] if options["concurrency"] > 0 else len(rows))
    lengths = [tokens.count(row["prompt"]) for row in rows]
    wanted = [int(row["output_tokens"]) for row in rows]
    latency_ms = _TTFT_MS + _TOKEN_MS * (sum(wanted) / len(wanted) - 1)
    total_s = latency_ms / 1e3 * len(rows) / at_once
    timed = {"avg_ttft_ms": _TTFT_MS, "avg_tpot_ms": _TOKEN_MS}
    return {
        "engine": {"model": model, "version": work.release, "backend": backend},
        "request_info": {
            "num_requests": len(rows),
            "avg_num_concurrent_requests": float(at_once),
            "avg_input_length": sum(lengths) / len(rows),
            "avg_output_length": sum(wanted) / len(rows),
        },
        "performance": {
            "total_latency_ms": total_s * 1e3,
            "avg_request_latency_ms": latency_ms,
            "request_throughput_req_s": len(rows) / total_s,
            "system_output_throughput_tok_s": sum(wanted) / total_s,
        },
        **({"streaming_metrics": timed} if options["streaming"] else {}),
    }
