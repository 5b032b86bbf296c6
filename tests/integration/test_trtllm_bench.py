"""trtllm-bench as a second number beside perf's: a stage of its own, on stand-ins that take and refuse what releases do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.trtllm_runs import Lane
from tests.standins.faults import Fault
from trtllm_pipeline.measure.load.events import read_records

MATRIX = """\
name: bench
axes:
  model: [tiny]
  precision: [fp16]
  max_batch_size: [4]
  lengths: ["256,8"]
  toolchain: [TOOLCHAIN]
settings:
  serve: { frontend: trtllm_serve }
  perf: { concurrency: [1, 2], requests: 6, trtllm_bench: true, exclusive: none }
"""


def lane_of(folder: Path, release: str, toolchain: str) -> Lane:
    lane = Lane(folder / "lane", release, gpus=1)
    lane.matrix.write_text(MATRIX.replace("TOOLCHAIN", toolchain), encoding="utf-8")
    return lane


@pytest.mark.parametrize(
    ("release", "toolchain", "backend"),
    [
        ("1.2.0", "tensorrt_llm", "TensorRT"),
        ("1.2.0", "tensorrt_llm_pytorch", "Pytorch"),
        ("0.20.0", "tensorrt_llm", "TensorRT"),
        pytest.param("1.0.0", "tensorrt_llm", "TensorRT", marks=pytest.mark.nightly),
    ],
)
def test_the_engine_is_asked_what_the_server_was_when_that_is_gone(
    tmp_path: Path, release: str, toolchain: str, backend: str
) -> None:
    lane = lane_of(tmp_path, release, toolchain)
    (cell,) = lane.run().values()
    assert cell["status"] == "done", cell
    (served,), (benched,) = lane.installed.invocations("trtllm-serve"), lane.installed.invocations("trtllm-bench")
    assert served.ended is not None
    assert served.ended <= benched.started, "one GPU: the server has let go of it"
    assert (benched.exit, benched.cuda_visible_devices) == (0, served.cuda_visible_devices)
    (out,) = lane.outputs("trtllm_bench")
    assert Path(benched.argv[benched.argv.index("--dataset") + 1]).name == "dataset.jsonl"
    (events,) = (path / "events.jsonl" for path in lane.outputs("perf"))
    records = read_records(events)
    asked = [each for each in records.requests if (each["concurrency"], each["phase"]) == (2, "measured")]
    rows = [json.loads(line) for line in (out / "dataset.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [
        records.text(each) for each in sorted(asked, key=lambda each: each["sent_ns"])
    ]
    report = json.loads((out / "report.json").read_text())
    assert (report["engine"]["backend"], report["request_info"]["num_requests"]) == (backend, 6)
    told = cell["trtllm_bench"]
    assert (told["level"], told["release"]) == ("2", release)
    assert told["output_tokens_per_s"] == report["performance"]["system_output_throughput_tok_s"]
    assert told["ours"]["output_tokens_per_s"] == cell["perf"][1]["output_tokens_per_s"]
    shown = lane.pipeline("report", "--workspace", str(lane.workspace), "--format", "markdown")
    assert "trtllm-bench tok/s" in shown
    again = (
        "compare",
        "latest",
        "latest",
        "--workspace",
        str(lane.workspace),
        "--metrics",
        "trtllm_bench_tps",
        "--format",
        "json",
    )
    (pair,) = (each for each in json.loads(lane.pipeline(*again))["pairs"] if each["level"] is None)
    assert pair["metrics"]["trtllm_bench_tps"]["base"] == told["output_tokens_per_s"]


def test_a_bench_that_fails_fails_alone_and_is_tried_again(tmp_path: Path) -> None:
    lane = lane_of(tmp_path, "1.2.0", "tensorrt_llm_pytorch")
    lane.installed.fail("trtllm-bench", Fault("build_oom"))
    (cell,) = lane.run(code=1).values()
    assert (cell["status"], cell["failed_stage"], len(cell["perf"])) == ("failed", "trtllm_bench", 2)
    lane.installed.heal()
    (cell,) = lane.run().values()
    assert cell["status"] == "done"
    assert [len(lane.starts(tool)) for tool in ("trtllm-serve", "trtllm-bench")] == [1, 1]
    assert lane.starts("trtllm-bench")["trtllm-bench"] == 2
