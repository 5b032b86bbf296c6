from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import html
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.helpers.fabricated_conditions import other
from tests.helpers.fabricated_run import HOSTILE, hostile_row, run, to_html
from trtllm_pipeline.base.wording import shared_parts
from trtllm_pipeline.measure.load.conditions import Conditions
from trtllm_pipeline.measure.load.result import HighestRate
from trtllm_pipeline.orchestrate.memory.estimates import HOST, TIME
from trtllm_pipeline.orchestrate.results.report_file import CellStatus
from trtllm_pipeline.orchestrate.run.forecast import ForecastCheck, StageForecast
from trtllm_pipeline.show.phrases import without
from trtllm_pipeline.show.report.columns import columns
from trtllm_pipeline.show.report.comparison import compare
from trtllm_pipeline.show.report.measured import Measured, Side
from trtllm_pipeline.show.report.writers import main_load


def page(cells: int, *, hostile: bool = False, **options: Any) -> str:
    rows, record = run(cells, hostile=hostile)
    return to_html(rows, record, "matrices/my.yaml", plots=False, **options)


def data_of(text: str) -> dict[str, Any]:
    packed = re.search(r'<script type="application/gzip" id="data">([^<]*)</script>', text)
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return data


class Tags(HTMLParser):
    """Every element with its attributes; what stands open at the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "input", "wbr", "br", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_ends_with_a_line_end() -> None:
    assert page(2).endswith("</html>\n")


def test_the_head_has_the_time_and_its_estimate() -> None:
    stages = (
        StageForecast("build", TIME, 2, 50_000, 10_000),
        StageForecast("launch", HOST, 1, 970_000_000, 1_000_000_000),
    )
    forecast = ForecastCheck(114, 150, stages)
    assert "time <b>Took 2:30 (estimate 1:54)</b>" in page(2, forecast=forecast)
    assert "time <b>" not in page(2)


def test_every_cell_has_a_row_with_its_figures() -> None:
    rows, _ = run(40)
    parts = shared_parts([row.id for row in rows])
    text = page(40)
    body = re.search(r'<table id="cells-table">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    lines = [line for line in body[1].splitlines() if line.startswith("<tr")]
    assert len(lines) == 40
    for row, line in zip(rows, lines, strict=True):
        assert f'class="{row.status.value}"' in line
        said = html.unescape(re.sub(r"<[^>]+>", "|", line.replace("<wbr>", "")))
        assert without(row.id, parts) in said
        if row.levels:
            assert (
                f"|{row.levels[-1].output_tokens_per_s or 0:.0f}|" in said
                or f"{row.levels[-1].output_tokens_per_s:.1f}" in said
            )


def test_elements_are_closed_and_no_text_becomes_one() -> None:
    text = page(40, hostile=True)
    assert HOSTILE not in text
    assert hostile_row().id in [cell["id"] for cell in data_of(text)["cells"]]
    tags = Tags(text)
    assert tags.open == []
    assert not [tag for tag, _ in tags.found if tag in {"img", "iframe", "object", "embed"}]
    assert not [name for _, attributes in tags.found for name in attributes if name.startswith("on") or name == "style"]
    scripts = [attributes for tag, attributes in tags.found if tag == "script"]
    assert [script.get("type") for script in scripts] == ["application/gzip", None]


def test_policy_lets_only_the_pages_own_script_and_style_run() -> None:
    text = page(2)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = html.unescape(policy[1])
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
    assert "http" not in rules
    for element in ("script", "style"):
        own = re.search(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(own[1].encode()).digest()).decode() in rules


def test_nothing_is_fetched() -> None:
    links = [
        value
        for _, attributes in Tags(page(40)).found
        for name, value in attributes.items()
        if name in {"src", "href", "action", "srcset"}
    ]
    assert links
    assert all(value is not None and value.startswith(("#", "data:,")) for value in links)


def test_data_has_commands_as_they_are_typed_logs_and_provenance() -> None:
    data = data_of(page(2))
    build = next(stage for stage in data["stages"] if stage["stage"] == "build")
    assert "--engine '/data/my engines/" in build["commands"][0]
    assert build["log"].startswith("build ")
    assert build["key"]["identity"] == {"triton": "2.61", "gpu": "H100 80GB"}
    assert build["provenance"]["cpu_s"] == 20.0
    assert {data["stages"][place]["stage"] for place in data["runs"][data["cells"][1]["id"]]} >= {"download", "perf"}


def test_latencies_and_limits_reach_the_script() -> None:
    rows, _ = run(2)
    data = data_of(page(2, limits={"ttft_ms": 300.0, "statistic": "p99"}))
    assert data["limits"] == {"ttft_ms": 300.0, "statistic": "p99"}
    shown = data["cells"][1]["levels"][-1]["ttft_ms"]
    measured = rows[1].levels[-1].latencies["ttft_ms"]
    assert shown["n"] == measured["n"]
    assert abs(shown["p99"] / measured["p99"] - 1) < 1e-3


def test_no_figure_is_rounded_twice() -> None:
    rows, record = run(2)
    level = dataclasses.replace(rows[1].levels[0], output_tokens_per_s=20.346)
    rows = (rows[0], dataclasses.replace(rows[1], levels=(level,)))
    data = data_of(to_html(rows, record, "matrices/my.yaml", plots=False))
    shown = data["cells"][1]["levels"][0]["out"]
    assert f"{shown:.1f}" == "20.3", "as 20.35 it would be shown as 20.4"


def test_too_long_logs_are_left_out_but_those_of_failures() -> None:
    rows, record = run(12)
    stages = tuple(dataclasses.replace(stage, log="x" * 100_000) for stage in record.stages)
    data = data_of(to_html(rows, dataclasses.replace(record, stages=stages), plots=False))
    assert {stage["log"] is None for stage in data["stages"] if stage["ending"] != "failed"} == {True}
    failed = [stage["log"] for stage in data["stages"] if stage["ending"] == "failed"]
    assert failed
    assert None not in failed


def test_cache_hits_are_counted_with_the_time_they_saved() -> None:
    text = page(4)  # cells 0 and 3 were up to date, each of whose stage runs had taken 12.5 s
    line = re.search(r'<tr><th scope="row">build</th>(.*?)</tr>', text)
    assert re.findall(r"<td[^>]*>(.*?)</td>", line[1])[:3] == ["2", "2", ""]
    assert line[1].endswith('<td class="number">25 s</td>')


def test_failures_and_findings_are_told() -> None:
    text = html.unescape(page(12))
    assert "CUDA out of memory" in text
    assert "lower max_batch_size" in text
    assert "the client was late" in text


def test_a_run_without_any_result() -> None:
    rows, record = run(3)
    bare = [dataclasses.replace(row, status=CellStatus.NOT_RUN, levels=(), accuracy={}, seconds={}) for row in rows]
    text = to_html(bare, dataclasses.replace(record, stages=(), about=None), finished=False, plots=False)
    assert "The run has not finished" in text
    assert data_of(text)["stages"] == []
    assert Tags(to_html((), dataclasses.replace(record, stages=()), plots=False)).open == []


def test_the_head_and_each_cell_say_on_what_and_under_which_load() -> None:
    rows, record = run(4)
    moved = dataclasses.replace(rows[1], conditions=other("system", cpu=HOSTILE))
    text = to_html([rows[0], moved, *rows[2:]], record, "matrices/my.yaml", plots=False)
    head = html.unescape(text[text.index("<header>") : text.index("</header>")])
    assert f"load <b>{main_load(rows)}</b>" in head
    for fact in ("on <b>1 x NVIDIA H200, 140 GiB</b>", "measured <b>2026-09-21</b>", "matrix <b>my.yaml</b>"):
        assert fact in head
    assert "<h1>model-0</h1>" in head
    assert "digest" not in head
    head = html.unescape(text[text.index('<section id="environment">') : text.index('<section id="definitions">')])
    assert "<dt>measured</dt><dd>2026-09-21 14:13:20 UTC</dd>" in head
    assert "<dt>machine of 3 cells</dt><dd>AMD EPYC 9654, 16 cores, 128 GiB; 1 x NVIDIA H200, 140 GiB</dd>" in head
    assert "<dt>versions</dt><dd>driver" in head
    assert (
        "<dt>workload</dt><dd>24 prompts, digest abababababab; max_tokens 64; temperature 0; grpc; concurrency 1"
        in head
    )
    assert "output mean 250.5, at most 256" in head
    assert "<dt>machine of 1 cell</dt>" in head
    assert HOSTILE not in text
    data = data_of(text)
    told = [data["under"][cell["under"]] for cell in data["cells"]]
    assert [each["CPU"] for each in told] == ["AMD EPYC 9654", HOSTILE, "AMD EPYC 9654", "AMD EPYC 9654"]
    assert told[0]["prompts' digest"] == "abababababab"
    assert data["cells"][0]["measured"] == "2026-09-21 14:13:20 UTC"
    assert len({cell["workload"] for cell in data["cells"]}) == 2, "and so apart: no cell is held against it"
    assert data["apart"] == ["CPU"]


def test_only_what_occurs_is_defined() -> None:
    rows, record = run(2)
    terms = set(re.findall(r"<dt>(\w+)", page(2).partition('id="definitions"')[2]))
    assert terms >= {"ttft_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s", "steady", "headline"}
    assert not terms & {"itl_ms", "icl_ms", "acceptance", "whole", "chrf", "first_divergence", "highest_rate"}
    bare = [
        dataclasses.replace(row, levels=(), accuracy={}, accuracy_intervals={}, accuracy_drift=None) for row in rows
    ]
    text = to_html(bare, dataclasses.replace(record, stages=()), plots=False)
    assert set(re.findall(r"<dt>(\w+)", text.partition('id="definitions"')[2])) <= {"engine_size_bytes"}


def test_every_column_of_the_page_is_defined_there() -> None:
    rows, record = run(2)
    searched = HighestRate(0.95, {"ttft": 300.0}, 7.2, 7.0, 7.6, {})
    asked = dataclasses.replace(rows[0], highest_rate=searched, trtllm_bench={"output_tokens_per_s": 333.0})
    text = to_html([asked, rows[1]], record, plots=False)
    terms = set(re.findall(r"<dt>(\w+)", text.partition('id="definitions"')[2]))
    shown = {column.metric for column in columns([asked, rows[1]]) if column.formula is not None}
    assert shown >= {"highest_rate", "trtllm_bench", "ttft_ms"}
    assert shown <= terms


def test_each_cell_that_works_has_the_command_that_serves_it(tmp_path: Path) -> None:
    rows, record = run(12)
    cells = data_of(to_html(rows, record, plots=False, workspace=tmp_path / "my work"))["cells"]
    (first, *_), lacking = cells, [cell for cell in cells if cell["launch"] is None]
    assert first["launch"] == shlex.join(
        [
            "pipeline",
            "stage",
            "launch",
            "--matrix",
            "/data/matrix.yaml",
            "--cells",
            first["id"],
            "--workspace",
            str(tmp_path / "my work"),
        ]
    )
    assert lacking
    assert all(cell["unfit"] is not None for cell in lacking)
    assert {cell["launch"] for cell in data_of(to_html(rows, record, plots=False))["cells"]} == {None}


def test_a_run_before_that_is_not_comparable_is_told_in_a_sentence() -> None:
    rows, record = run(2)
    asked = {"prompts": 24, "levels": [{"concurrency": 1, "requests": 6}]}
    sides = [
        Side(name, (dataclasses.replace(Measured.of(rows[0]), conditions=Conditions(None, {"cpu": cpu}, asked)),))
        for name, cpu in (("run-1", "A <b>"), ("run-0", "B"))
    ]
    text = to_html(rows, record, plots=False, comparison=compare(*sides))
    assert (
        "<p>The previous run run-0 is not comparable with run-1: measured under different conditions: "
        "CPU: B in the baseline, A &lt;b&gt; here; the questions: not recorded on either side.</p>"
    ) in text
    text = to_html(rows, record, plots=False, comparison=compare(Side("run-1", ()), sides[1]))
    assert "is not comparable with run-1: model-0/" in text


def test_the_run_before_is_compared_with() -> None:
    rows, record = run(2)
    base = Side("run-0 <b>", tuple(map(Measured.of, rows)))
    faster = dataclasses.replace(
        rows[0], levels=tuple(dataclasses.replace(each, output_tokens_per_s=1e4) for each in rows[0].levels)
    )
    found = compare(Side("run-1", (Measured.of(faster), Measured.of(rows[1]))), base)
    text = to_html(rows, record, plots=False, comparison=found)
    told = text[text.index('<section id="compared">') :].partition("</section>")[0]
    assert "run-1 compared with run-0 &lt;b&gt;" in told
    assert re.search(r"<td[^>]*>\+\d+", told)
    assert Tags(text).open == []
    assert '<section id="compared">' not in page(2)
