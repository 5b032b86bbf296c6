from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest

from tests.helpers import fabricated, fabricated_run
from tests.helpers.fabricated_conditions import CONDITIONS, other
from tests.helpers.fabricated_run import drift
from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.base.wording import amount, duration, merged, shared_parts, shorten
from trtllm_pipeline.measure.load.conditions import Conditions
from trtllm_pipeline.measure.load.result import Goodput, LevelResult
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus, read_report, report_json
from trtllm_pipeline.show.phrases import groups, without
from trtllm_pipeline.show.progress.views import LOOKS, grid
from trtllm_pipeline.show.report.columns import columns
from trtllm_pipeline.show.report.report_formats import Report
from trtllm_pipeline.show.report.writers import flat, load_of, loads_of, notes_of, to_csv, to_markdown, write_table


def level(concurrency: int, ttft_ms: float, output_tokens_per_s: float) -> LevelResult:
    latencies = {"ttft_ms": {"n": 40.0, "p50": ttft_ms}}
    return LevelResult(
        concurrency=concurrency,
        requests=40,
        failures=0,
        duration_s=12.5,
        input_tokens_per_s=1000.0,
        output_tokens_per_s=output_tokens_per_s,
        requests_per_s=2.0,
        window="whole",
        latencies=latencies,
    )


def row(precision: str, batch: int = 4, *, model: str = "smollm2-135m-instruct", **changes: object) -> CellResult:
    axes = {"model": model, "precision": precision, "max_batch_size": batch}
    values: dict[str, object] = {
        "id": CellId(f"{model}/{precision}/tp1pp1/bs{batch}/isl128-osl64"),
        "axes": axes,
        "status": CellStatus.DONE,
        "seconds": {"download": 3.0, "build": 1.25},
        "engine_size_bytes": 270_000_000,
        "levels": (level(1, 30.4, 80.0), level(4, 91.0, 251.3)),
        "accuracy": {"exact": 0.5, "contains": 0.75},
        "accuracy_total": 50,
        "findings": ("warning: the client was busy (concurrency 4)", "info: prompts repeat"),
    }
    return CellResult(**{**values, **changes})


def failed(precision: str, batch: int = 4) -> CellResult:
    return row(
        precision,
        batch,
        status=CellStatus.FAILED,
        failed_stage="build",
        failure="out_of_memory",
        reason="build: was killed | by <somebody>",
        hint="free some memory",
        log="work/ab.1/log",
        seconds={"download": 3.0},
        engine_size_bytes=None,
        levels=(),
        accuracy={},
        accuracy_total=None,
        findings=(),
    )


ROWS = (row("fp16"), row("int8_wo"), failed("int4_wo"), failed("int4_wo", 8))


def table(rows: tuple[CellResult, ...], width: int, monkeypatch: pytest.MonkeyPatch, *, verbose: bool = False) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    write_table(Report(rows=rows, stream=stream, workspace=Path("/ws"), verbose=verbose))
    return stream.getvalue()


def test_toolchains_that_differ_are_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(toolchain: str, precision: str, *, named: bool = False) -> CellResult:
        made = row(precision)
        cell = CellId(f"{made.id}/{toolchain}") if named else made.id
        return dataclasses.replace(made, id=cell, axes={**made.axes, "toolchain": toolchain})

    engine, other = on("tensorrt_llm", "fp16"), on("tensorrt_llm_pytorch", "int4_awq")
    lines = table((engine, other), 120, monkeypatch).splitlines()
    assert next(line for line in lines if line.startswith("int4_awq")).split()[:4] == [
        *("int4_awq", "done", "!", "tensorrt_llm_pytorch"),
    ]
    alike = (engine, on("tensorrt_llm", "int8_wo"))
    named = (on("tensorrt_llm", "fp16", named=True), on("tensorrt_llm_pytorch", "int4_awq", named=True))
    for rows in (alike, named):
        assert "toolchain" not in [column.head for column in columns(rows)]


def test_the_table_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table(ROWS, 80, monkeypatch).splitlines() == [
        "4 cells: 2 done, 2 failed; all: smollm2-135m-instruct tp1pp1 isl128-osl64",
        "",
        "                     TTFT ms  tok/s  req/s                   engine  build",
        "cell         status       @4     @4     @4  exact  contains      MB      s",
        "fp16/bs4     done !     91.0    251   2.00   0.50      0.75   270.0   1.25",
        "int8_wo/bs4  done !     91.0    251   2.00   0.50      0.75   270.0   1.25",
        "int4_wo/bs4  failed",
        "int4_wo/bs8  failed",
        "",
        "build failed (out of memory), 2 cells: int4_wo/bs4, int4_wo/bs8",
        "  build: was killed | by <somebody>",
        "  log: /ws/work/ab.1/log",
        "  try: free some memory",
        "",
        "warning (2 cells): the client was busy (concurrency 4)",
        "note (2 cells): the steady window was too short: rates include ramp-up and drain",
        "Measured on an unknown system",
        "Latencies are medians (p50), @4 is concurrency 4, ! has warnings.",
        "A wider terminal also shows tok/s 95% @4, input tok/s @4",
        "Load: 1/4 in flight, 40 requests",
        "-v: definitions, system and load in full",
    ]


def test_verbose_adds_conditions_and_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    short, full = table(ROWS, 80, monkeypatch).splitlines(), table(ROWS, 80, monkeypatch, verbose=True).splitlines()
    legend = short.index("Measured on an unknown system")
    assert full[:legend] == short[:legend]
    assert full[legend:] == [
        "",
        "system: not recorded",
        "load: not recorded",
        "lengths and levels: 1/4 in flight, 40 requests",
        "",
        "TTFT ms @4: time to first token: first content - sent; the median (p50) is shown",
        "tok/s @4: output tokens / seconds of the headline window; median of the repeats",
        "req/s @4: successful requests / seconds of the headline window; median of the",
        "repeats",
        "exact: share of answers that equal a reference, both normalized",
        "contains: share of answers that contain a reference as whole words, both",
        "normalized",
    ]


def test_reasons_that_were_told_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    write_table(Report(rows=ROWS, stream=stream, workspace=Path("/ws"), reported={str(failed("int4_wo").reason)}))
    text = stream.getvalue()
    assert "build failed (out of memory), 2 cells: int4_wo/bs4, int4_wo/bs8\n\n" in text
    assert "somebody" not in text
    assert "try:" not in text


def test_the_figures_people_read_first_fit_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = level(4, 91.0, 251.3)
    measured = dataclasses.replace(measured, latencies={**measured.latencies, "tpot_ms": {"n": 40.0, "p50": 12.5}})
    full = {
        "levels": (measured,),
        "accuracy_intervals": {"exact": (0.4, 0.6)},
        "accuracy_drift": drift("m/fp16", 0.5, 0.5),
    }
    rows = [
        row(precision, 256, model=model, status=CellStatus.UP_TO_DATE, **full)
        for model in ("smollm2-135m-instruct", "qwen2-72b-instruct-with-a-long-name")
        for precision in ("fp16", "int4_wo")
    ]
    lines = table(tuple(rows), 80, monkeypatch).splitlines()
    heads = next(line for line in lines if line.startswith("cell"))
    assert lines[lines.index(heads) - 1].split()[:5] == ["TTFT", "ms", "TPOT", "ms", "tok/s"]
    assert "exact" in heads
    assert "0.50 (0.40 to 0.60)" in lines[lines.index(heads) + 2]
    wide = table(tuple(rows), 200, monkeypatch)
    assert "tok/s/user" in wide
    assert "agree" in wide


def test_many_notes_are_short_unless_verbose(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = tuple(f"warning: {letter} {'was late ' * 12}" for letter in "abcdef")
    short = table((row("fp16", levels=(), findings=findings),), 80, monkeypatch).splitlines()
    assert sum(line.startswith("warning (1 cell)") for line in short) == 3
    assert " ".join(short).count("was late") == 3 * 12, "no warning is cut off"
    assert short[-1] == "-v: 3 more notes, definitions, system and load in full"
    four = table((row("fp16", levels=(), findings=findings[:4]),), 80, monkeypatch).splitlines()
    assert four[-1].startswith("-v: 1 more note, ")
    full = table((row("fp16", levels=(), findings=findings),), 80, monkeypatch, verbose=True)
    assert full.count("warning (1 cell)") == 6


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize("models", [("smollm2",), ("smollm2-135m-instruct", "qwen2-72b-instruct-with-a-long-name")])
def test_the_table_is_never_wider_than_the_terminal(
    width: int, models: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tuple(
        row(precision, batch, model=model)
        for model in models
        for precision in ("fp16", "int4_wo")
        for batch in (1, 256)
    )
    lines = table(rows, width, monkeypatch).splitlines()
    assert max(map(len, lines)) <= width
    heads = next(number for number, line in enumerate(lines) if line.startswith("cell"))
    body = lines[heads + 1 : lines.index("", heads)]
    assert sum("done" in line for line in body) == len(rows)
    assert len(body) in {len(rows), len(rows) + len(models)}, "one line a cell, and one a model where they are grouped"


def test_columns_without_room_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (table((row("fp16"),), width, monkeypatch) for width in (72, 300))
    assert "A wider terminal also shows tok/s 95% @4, req/s @4, contains, " in narrow
    assert "wider terminal" not in wide


def test_heads_say_when_concurrencies_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (row("fp16"), row("int8_wo", levels=(level(2, 1.0, 2.0),)))
    text = table(rows, 120, monkeypatch)
    assert "@highest is the highest load of each cell" in text
    lowest = to_markdown(Report(rows=rows, level="lowest"))
    assert "TTFT ms @lowest" in lowest
    assert "| 30.4 |" in lowest
    assert "| 91.0 |" not in lowest
    assert "TTFT ms @2" in to_markdown(Report(rows=rows, level="2"))


def test_findings_that_differ_in_figures_are_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    late = "warning: the client was {} ms late (concurrency {})"
    rows = tuple(
        row(precision, levels=(), findings=(late.format(lag, 1), late.format(lag + 1, 4)))
        for precision, lag in (("fp16", 9.1), ("int8_wo", 8.3))
    )
    notes = [line for line in table(rows, 120, monkeypatch).splitlines() if line.startswith("warning")]
    assert notes == ["warning (2 cells): the client was 9.1 ms late (concurrency 1), or similar"]


def test_json_is_stable_and_reads_back(tmp_path: Path) -> None:
    text = "\n".join(report_json(ROWS, "r1", "m.yaml"))
    data = json.loads(text)
    assert list(data) == ["schema", "run", "metrics", "cells"]
    counts = {"done": 2, "failed": 2}
    assert data["run"] == {"id": "r1", "matrix": "m.yaml", "finished": True, "counts": counts, "forecast": None}
    (cell, *_) = data["cells"]
    assert cell["perf"][0]["ttft_ms"]["p50"] == 30.4
    assert {"name": "e2e_ms", "unit": "ms", "formula": "end-to-end latency: last content - sent"} in data["metrics"]
    path = tmp_path / "report.json"
    path.write_text(text)
    assert read_report(path) == (ROWS, data["run"])


def test_csv_has_a_line_for_each_cell_and_concurrency() -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(ROWS))))
    assert [(line["cell"], line["concurrency"]) for line in lines] == [
        (ROWS[0].id, "1"),
        (ROWS[0].id, "4"),
        (ROWS[1].id, "1"),
        (ROWS[1].id, "4"),
        (ROWS[2].id, ""),
        (ROWS[3].id, ""),
    ]
    assert lines[1]["ttft_p50_ms"] == "91.0"
    assert lines[1]["ttft_n"] == "40.0"
    assert lines[1]["build_s"] == "1.25"
    assert lines[1]["accuracy_contains"] == "0.75"
    assert lines[4]["output_tokens_per_s"] == ""
    assert lines[4]["reason"] == "build: was killed | by <somebody>"
    assert to_csv(()) == "cell\n"


def rated(precision: str, *, closed: bool) -> CellResult:
    goodput = Goodput({"ttft": 50.0}, share=0.875, requests_per_s=2.2)
    rates = [
        dataclasses.replace(level(1, ttft_ms, 200.0), concurrency=None, request_rate=rate, goodput=goodput)
        for rate, ttft_ms in ((2.5, 20.5), (10.0, 44.0))
    ]
    return row(precision, levels=(*((level(1, 30.4, 80.0),) if closed else ()), *rates))


def test_request_rates_and_goodput_are_shown() -> None:
    open_loops = (rated("fp16", closed=False), rated("int8_wo", closed=False))
    text = to_markdown(Report(rows=open_loops))
    head = next(line for line in text.splitlines() if line.startswith("| cell"))
    assert [part in head for part in ("TTFT ms @10/s", "tok/s @10/s", "goodput @10/s")] == [True] * 3
    assert "- goodput @10/s: requests that met every objective / requests scheduled" in text
    assert " 0.88 |" in text
    lines = list(csv.DictReader(io.StringIO(to_csv(open_loops))))
    assert [(line["concurrency"], line["request_rate"], line["goodput_share"]) for line in lines] == [
        ("", rate, "0.875") for rate in ("2.5", "10.0", "2.5", "10.0")
    ]
    both = to_markdown(Report(rows=(rated("fp16", closed=True), rated("int8_wo", closed=True))))
    assert "tok/s @1 |" in both, "an open loop's throughput is what was offered"
    assert "goodput @10/s |" in both
    assert "request_rate" not in to_csv(ROWS).splitlines()[0], "nobody asked for one"


def test_markdown_escapes_and_defines() -> None:
    text = to_markdown(Report(rows=ROWS, run_id="r1", matrix="/home/me/m.yaml"))
    assert "| `fp16/bs4` | done ! | 91.0 | 251 | of 40 requests | 2.00 | 0.50 | 0.75 | 270.0 | 1.25 |" in text
    assert r"build: was killed \| by &lt;somebody>" in text
    assert "/home/me" not in text
    assert "- TTFT ms @4: time to first token: first content - sent; the median (p50) is shown" in text
    columns = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 1


def test_of_a_thousand_rows_a_table_lists_what_people_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row("fp16", batch) for batch in range(1000))
    shown = table(rows, 80, monkeypatch)
    assert shown.startswith("1000 cells: 1000 done")
    assert "bs199 " in shown
    assert "bs200 " not in shown
    assert "\nand 800 more cells: see pipeline report --format csv\n" in shown


def test_of_very_many_rows_those_are_listed_that_something_has_come_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run of a large matrix said "interrupted" in 200 lines."""
    rows = [dataclasses.replace(row("fp16", batch), status=CellStatus.INTERRUPTED, levels=()) for batch in range(300)]
    assert table(tuple(rows), 80, monkeypatch).splitlines()[:2] == [
        "300 cells: 300 interrupted; all: smollm2-135m-instruct fp16 tp1pp1 isl128-osl64",
        "no cell has finished: see pipeline report --format csv",
    ]
    rows[250] = row("fp16", 250)
    shown = table(tuple(rows), 80, monkeypatch)
    assert "bs250 " in shown
    assert "bs249 " not in shown
    assert "and 299 more cells" in shown
    assert "bs199 " in table(tuple(rows[:200]), 80, monkeypatch)


def test_short_names() -> None:
    assert shared_parts(["m/fp16/tp1/bs4", "m/int8/tp1/bs8"]) == ("m", "tp1")
    assert shared_parts(["m/fp16"]) == ()
    flow = (
        ("get", "convert", "build", "serve"),
        ("get", "quantize", "build", "check", "serve"),
        ("get", "serve", "score"),
    )
    assert merged(flow) == ("get", "quantize", "convert", "build", "check", "serve", "score")
    cells = ["m/fp16/bs1", "m/fp16/bs2", "m/fp8/bs1", "m/fp8/bs2", "n/fp8/bs1"]
    assert groups(cells, 4) == ["m/fp16", "m/fp16", "m/fp8", "m/fp8", "n/fp8"]
    assert groups(cells, 2) == ["m", "m", "m", "m", "n"]
    assert groups(cells, 1) is groups(["bs1", "bs2"], 9) is groups([], 9) is None
    assert groups(["m/bs1", "m/bs2"], 9) is None, "one group says nothing"
    assert without("m/fp16/tp1", ("m", "tp1")) == "fp16"
    assert without("m", ("m",)) == "m"
    assert shorten("abcdefghij", 7) == "abc…hij"
    assert shorten("abc", 3) == "abc"
    assert [len(shorten("x" * 50, width)) for width in range(8)] == list(range(8))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.99, "10.0 s"), (12.4, "12 s"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_amounts() -> None:
    assert amount(12_300_000, 270_100_000, "bytes") == "12.3/270.1 MB"
    assert amount(5, None, "bytes") == "5 B"
    assert amount(12, 40, "requests") == "12/40 requests"
    assert amount(67_257_504, 134_515_008, "parameters") == "67.3/134.5 M parameters"
    assert amount(0.5, None, "steps") == "0.5 steps"


def test_symbols_tell_statuses_apart_without_colour() -> None:
    for name in ("symbol", "ascii"):
        assert len({getattr(look, name) for look in LOOKS.values()}) == len(LOOKS)
    assert all(look.ascii.isascii() for look in LOOKS.values())


@pytest.mark.parametrize("width", range(20, 160, 7))
def test_a_grid_fits_its_width(width: int) -> None:
    plan = fabricated.plan(fabricated.cell(model="a-model-with-quite-a-long-name"))
    stages = tuple(dict.fromkeys(run.stage.name for run in plan.stage_runs.values()))
    statuses = dict(zip(stages, LOOKS, strict=False))
    lines = grid([(plan.cells[0].id, statuses)], stages, width=width, ascii_only=True)
    assert max(line.cell_len for line in lines) <= width
    assert lines[-1].plain.split()[1:] == [LOOKS[status].ascii for status in statuses.values()]


MEASURED = dataclasses.replace(
    row("fp16", conditions=CONDITIONS),
    levels=(
        dataclasses.replace(
            level(4, 91.0, 251.3),
            lengths={
                "input_tokens_per_request": {"n": 40, "mean": 61.25, "max": 80},
                "output_tokens_per_request": {"n": 40, "mean": 64.0, "max": 64},
            },
        ),
    ),
)


def test_every_form_says_on_what_and_under_which_load(tmp_path: Path) -> None:
    moved = row("int8_wo", conditions=other("system", cpu="Intel Xeon", gpus=[], server_on="another machine"))
    rows = (MEASURED, moved, failed("int4_wo"))
    (tmp_path / "report.json").write_text("\n".join(report_json(rows, "r", "m.yaml")))
    read = read_report(tmp_path / "report.json")[0]
    assert read == rows
    cell = json.loads((tmp_path / "report.json").read_text())["cells"][0]
    assert cell["conditions"]["system"]["driver"] == "570.86.15"
    assert cell["conditions"]["workload"]["levels"][2]["warmup_requests"] == 8
    assert cell["perf"][0]["input_tokens_per_request"]["mean"] == 61.25
    first, *_, last = csv.DictReader(io.StringIO(to_csv(rows)))
    told = ("measured_at", "system_cpu", "system_gpus", "workload_prompts_digest", "workload_max_tokens")
    assert [first[name] for name in told] == [
        *("2026-09-21T14:13:20+00:00", "AMD EPYC 9654", "NVIDIA H200, 140 GiB", "sha256:" + "ab" * 32, "64")
    ]
    numbers = ("warmup_requests", "repeats", "input_tokens_per_request_mean", "output_tokens_per_request_max")
    assert [first[name] for name in numbers] == ["8", "3", "61.25", "64"]
    assert {last[name] for name in (*told, *numbers)} == {""}, "the failed cell was not measured"
    text = to_markdown(Report(rows=rows))
    assert "- measured: 2026-09-21 14:13:20 UTC" in text
    assert (
        "- system of 1 cell: AMD EPYC 9654, 16 cores, 128 GiB; 1 x NVIDIA H200, 140 GiB; driver 570.86.15; server"
        in text
    )
    assert (
        "- system of 1 cell: server on another machine (unknown system); client on Intel Xeon, 16 cores, 128 GiB; driver"
        in text
    )
    assert (
        "- load: 24 prompts, digest abababababab; max_tokens 64; temperature 0; grpc; concurrency 1, 2, 4, 8, 16: 40 requests after 2 to 32 of warmup, 3 times"
        in text
    )
    assert "- tokens per request: input mean 61.25, at most 80; output mean 64, at most 64" in text


@pytest.mark.parametrize(
    "data", [None, 3, {"system": 3, "workload": []}, {"workload": {"levels": [3, {"x": 1}]}, "measured_s": 1e300}]
)
def test_conditions_that_are_none_are_not_recorded(data: object) -> None:
    found = Conditions.read(data)
    assert found.system is None
    assert found.level(1, None) == {}
    assert to_markdown(Report(rows=[row("fp16", conditions=found)]))


def test_a_report_of_trtllm_bench_has_a_column_a_place_in_csv_and_a_note_where_the_load_was_another() -> None:
    row = fabricated_run.run(1)[0][0]
    told = {"output_tokens_per_s": 812.4, "ttft_ms": 9.5, "not_the_same": ["input tokens 64 here, 256 there"]}
    row = dataclasses.replace(row, trtllm_bench=told)
    assert {each.head: each.value(row) for each in columns([row])}["trtllm-bench tok/s"] == "812"
    (first, *_) = flat([row])
    assert (first["trtllm_bench_output_tokens_per_s"], first["trtllm_bench_ttft_ms"]) == (812.4, 9.5)
    assert "trtllm_bench_tpot_ms" not in first
    assert ("trtllm-bench used a different load than the server: input tokens 64 here, 256 there", 1) in notes_of([row])
    assert CellResult.from_json(row.to_json()).trtllm_bench == told


def with_p99(*, known: bool = True) -> LevelResult:
    latencies = {name: {"n": 100.0, "p50": 20.0, **({"p99": 55.0} if known else {})} for name in ("ttft_ms", "tpot_ms")}
    return dataclasses.replace(level(8, 1.0, 300.0), latencies=latencies)


def test_p99_is_shown_if_it_is_known() -> None:
    many, few = (to_markdown(Report(rows=(row("fp16", levels=(with_p99(known=known),)),))) for known in (True, False))
    assert "TTFT p99 @8 | TPOT ms @8 | TPOT p99 @8" in many
    assert "55.0" in many
    assert "p99 @" not in few


def test_rates_are_for_each_gpu_and_each_user() -> None:
    one = row("fp16", levels=(with_p99(),))
    two = dataclasses.replace(one, axes={**one.axes, "tp": 2})
    text = to_markdown(Report(rows=(one, two)))
    assert "tok/s @8 | tok/s/GPU @8 | tok/s/user @8" in text
    assert "| 300 | 150 | 50.0 |" in text
    assert "tok/s/GPU" not in to_markdown(Report(rows=(one,)))
    assert "- tok/s/user @8: " in text


def loaded(inputs: float, outputs: float, **workload: object) -> CellResult:
    """A row whose load had these mean lengths."""
    lengths = {"input_tokens_per_request": {"mean": inputs}, "output_tokens_per_request": {"mean": outputs}}
    levels = tuple(
        dataclasses.replace(each, lengths=lengths, requests=requests)
        for each, requests in zip(row("fp16").levels, (32, 128), strict=True)
    )
    return row("fp16", levels=levels, conditions=Conditions(workload={"max_tokens": [512, 512], **workload}))


def test_a_row_states_the_load_that_was_measured() -> None:
    synthetic = {"input_tokens": 2048}
    exact = loaded(2048.0, 512.0, synthetic=synthetic, sampling={"exact_length": True})
    assert load_of(exact) == "2048 in, 512 out, 1/4 in flight, 32 to 128 requests"
    ends_early = loaded(2048.0, 301.4, synthetic=synthetic, sampling={})
    assert load_of(ends_early).startswith("2048 in, 301 out on average (output up to 512), 1/4 in flight")
    own = loaded(87.2, 140.6, synthetic=None, sampling={})
    assert load_of(own).startswith("87 in, 141 out on average, 1/4"), "those of the data, not of the cell"
    assert load_of(row("fp16")) == "1/4 in flight, 40 requests", "lengths that nobody recorded are left out"
    assert loads_of([own, exact, own, row("fp8", levels=())])[0] == f"{load_of(own)} (2 cells)"
    assert loads_of([exact]) == [load_of(exact)]
    fewer = dataclasses.replace(
        exact, levels=tuple(dataclasses.replace(level, requests=30 + place) for place, level in enumerate(exact.levels))
    )
    assert loads_of([exact, fewer]) == ["2048 in, 512 out, 1/4 in flight, 30 to 128 requests"]
