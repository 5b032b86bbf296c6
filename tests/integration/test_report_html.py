"""The HTML report as a person meets it: in a real browser, wide and narrow, light and dark, by keyboard and by ear.

Pictures go to the directory that PIPELINE_SCREENSHOTS names, else to pytest's own temporary directory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import needed
from tests.helpers.browser import Browser
from tests.helpers.fabricated_run import HOSTILE, START_S, run, to_html
from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.base.wording import shared_parts
from trtllm_pipeline.measure.load.result import Goodput, GpuUse, HighestRate, RepeatResult, Schedule, TritonUse
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus, references
from trtllm_pipeline.show.phrases import without
from trtllm_pipeline.show.report.comparable_loads import Workload
from trtllm_pipeline.show.report.measured import Measured, Side
from trtllm_pipeline.show.report.recommendation import Candidate, recommend
from trtllm_pipeline.show.report.record import Record, StageAttempt

pytest.importorskip("vl_convert", reason="the plots come from vl-convert-python")

READY = "document.documentElement?.dataset.ready !== undefined && !document.querySelector('.plot:empty:not([hidden] *):not([hidden])')"
LIMITS_BYTES = {2: 600_000, 40: 700_000, 1000: 1_600_000}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(needed.program("chromium"), tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Number of cells -> page. That of 40 has a hostile cell more."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for cells in LIMITS_BYTES:
        rows, record = run(cells, hostile=cells == 40)
        found[cells] = folder / f"{cells}.html"
        found[cells].write_text(to_html(rows, record, "matrices/my.yaml"), encoding="utf-8")
    return found


@pytest.fixture
def clean(browser: Browser) -> Iterator[Browser]:
    """The browser; afterwards the page must have complained of nothing and asked for nothing but itself."""
    browser.complaints.clear()
    browser.requests.clear()
    yield browser
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("file:", "about:", "data:"))] == []


def load(browser: Browser, page: Path, *, width: int = 1280, dark: bool = False, at: str = "") -> None:
    browser.emulate(width=width, dark=dark)
    browser.call("Page.navigate", url="about:blank")  # else a change of the fragment alone would not load it again
    browser.open(f"{page.as_uri()}{at}", READY)


def show(browser: Browser, folder: Path, rows: Sequence[CellResult], record: Record, **options: Any) -> None:
    """Write the page of these rows and load it."""
    shown = {name: options.pop(name) for name in ("width", "dark") if name in options}
    page = folder / "page.html"
    page.write_text(to_html(rows, record, **options), encoding="utf-8")
    load(browser, page, **shown)


def text(browser: Browser, id_: str) -> str:
    return str(browser.evaluate(f"document.getElementById({id_!r}).textContent"))


def open_details(browser: Browser, link: str = "#cells-table tbody a") -> None:
    browser.evaluate(f"document.querySelector({link!r}).click()")
    browser.wait("document.getElementById('details').open")


def set_value(browser: Browser, id_: str, value: str) -> None:
    """Type into a control; returns when the page has followed: its own timer, set before ours, is the shorter one."""
    browser.evaluate(
        f"(() => {{ const one = document.getElementById({id_!r}); one.value = {value!r};"
        " one.dispatchEvent(new Event('input', {bubbles: true}));"
        " return new Promise((done) => { setTimeout(done, 200); }); })()"
    )


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll({selector!r})].filter(e => e.checkVisibility()).map(e => e.textContent.trim())"
    )
    return found


@pytest.mark.parametrize(
    ("cells", "width", "dark"),
    [
        (2, 1280, False),
        (2, 390, True),
        (40, 1280, True),
        (40, 390, False),
        pytest.param(1000, 390, True, marks=pytest.mark.nightly),
    ],
)
def test_looks_right_and_complains_of_nothing(
    clean: Browser, pages: dict[int, Path], cells: int, width: int, dark: bool, tmp_path: Path
) -> None:
    load(clean, pages[cells], width=width, dark=dark)
    assert pages[cells].stat().st_size < LIMITS_BYTES[cells]
    assert clean.evaluate("document.documentElement.scrollWidth") == width, "the page must not scroll sideways"
    right = "getBoundingClientRect().right"
    hanging = f"one => one.{right} > document.getElementById('controls').{right}"
    assert (
        clean.evaluate(f"[...document.querySelectorAll('#controls input, #controls select')].filter({hanging}).length")
        == 0
    )
    assert len(texts(clean, "#cells-table tbody tr")) == min(200, cells + (cells == 40))
    plots = clean.evaluate(
        "[...document.querySelectorAll('svg.marks')].map(e => [e.clientWidth, e.querySelectorAll('.mark-symbol path, .mark-rect path, .mark-area path, .mark-line path').length])"
    )
    assert len(plots) >= 6, "front, three curves, accuracy, timeline"
    assert all(0 < drawn <= width and marks > 0 for drawn, marks in plots)
    background = clean.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert clean.evaluate("window.hacked") is None
    folder = Path(os.environ.get("PIPELINE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"report-{cells}-{width}-{'dark' if dark else 'light'}.png"
    clean.screenshot(picture)
    drawn_width, drawn_height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert drawn_width == width * (2 if width < 600 else 1)
    assert drawn_height > 2000


def test_tables_fit_a_window_of_1440_and_goals_have_cards(clean: Browser, tmp_path: Path) -> None:
    rows, record = run(40)
    # Two scores with intervals and changes, as the accuracy stage gives them by itself.
    rows = tuple(
        dataclasses.replace(
            row,
            accuracy_intervals=dict.fromkeys(row.accuracy, (0.11, 0.99)),
            accuracy_drift=row.accuracy_drift
            and dataclasses.replace(
                row.accuracy_drift, scores=dict.fromkeys(row.accuracy, next(iter(row.accuracy_drift.scores.values())))
            ),
        )
        for row in rows
    )
    show(clean, tmp_path, rows, record, width=1440)
    assert "exact change" in texts(clean, "#cells-table thead")[0]
    assert (
        clean.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        )
        == 0
    )
    cards = texts(clean, "#cards .card")
    assert len(cards) == 4
    assert all("next: " in card for card in cards[:1])
    assert texts(clean, "#cards .card a")[0] in texts(clean, "#verdict")[0]
    fp16 = {
        clean.evaluate(
            f"(() => {{ const at = [...document.querySelectorAll('{each}')].find(e => e.textContent.includes('fp16')); return getComputedStyle(at.querySelector('.dot') ?? at).getPropertyValue('--mine'); }})()"
        )
        for each in ("#cells-table tbody th", ".legend span")
    }
    assert len(fp16) == 1, "one color for a precision, wherever it is"


def test_the_best_of_any_accuracy_has_a_card_only_where_it_is_another(clean: Browser, tmp_path: Path) -> None:
    (row, _), record = run(2)
    show(clean, tmp_path, (row,), record)
    assert texts(clean, "#cards h3") == [
        "Highest throughput per GPU, accuracy preserved",
        "Lowest TTFT",
        "Highest accuracy, then throughput",
    ]
    assert not texts(clean, "#take table"), "no table repeats the cards"


def test_columns_that_do_not_fit_a_window_are_named_instead(clean: Browser, tmp_path: Path) -> None:
    """All that a cell can have, as of a GPU with objectives and trtllm-bench: the table is not cut off."""
    (first, *others), record = run(4)
    use = GpuUse(devices=1, power_w=125.0, memory_bytes=10**9)
    levels = [
        dataclasses.replace(level, tokens_per_joule=1.5, gpu_use=use, goodput=Goodput({"ttft": 300.0}, 0.97, 2.0))
        for level in first.levels
    ]
    bench = {"output_tokens_per_s": 333.0}
    searched = HighestRate(0.95, {"ttft": 300.0}, 7.2, 7.0, 7.6, {})
    whole = dataclasses.replace(first, levels=tuple(levels), highest_rate=searched, trtllm_bench=bench)
    intervals = [
        dataclasses.replace(each, accuracy_intervals=dict.fromkeys(each.accuracy, (0.11, 0.99)))
        for each in (whole, *others)
    ]
    cut = "(e => e.scrollWidth > e.clientWidth + 1)(document.querySelector('#cells .scroll'))"
    show(clean, tmp_path, intervals, record, width=1440)
    assert clean.evaluate(cut) is False
    heads, (caption,) = texts(clean, "#cells-table thead th"), texts(clean, "#cells-caption")
    assert "input tok/s @16" in caption.partition("Hidden for lack of space:")[2]
    assert not [head for head in heads if head.startswith("input tok/s")]
    assert [head for head in heads if head.startswith("SLO req/s")]
    load(clean, tmp_path / "page.html", width=2400)
    assert clean.evaluate(cut) is False
    assert len(texts(clean, "#cells-table thead th")) >= len(heads)


@pytest.mark.parametrize(("executor", "most"), [(None, 2), ("ray", 4)])
def test_servers_that_hand_over_hold_no_more_than_the_machine_has(
    clean: Browser, tmp_path: Path, executor: str | None, most: int
) -> None:
    """The next server is loaded beside the one that ends; on a cluster both may be there, each on a node of its own."""
    rows, record = run(2)
    servers = [each for each in record.stages if each.stage == "launch"]
    overlapping = tuple(
        dataclasses.replace(each, attempts=(StageAttempt(START_S + 10 * n, START_S + 10 * n + 13, "stopped"),))
        for n, each in enumerate(servers)
    )
    record = dataclasses.replace(record, stages=overlapping, request={**record.request, "executor": executor})
    show(clean, tmp_path, rows, record)
    said = clean.evaluate("document.querySelector('#cpus .plot').getAttribute('aria-label')")
    assert said == f"CPU slots held by stage runs over time, at most {most}."


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, True)])
def test_what_triton_says_stands_beside_ours(clean: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    (first, other), record = run(2)
    names = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble")
    times = {"requests": 512, "queue_ms": 12.5, "compute_input_ms": 0.1, "compute_infer_ms": 412.0}
    gauges = {"in_flight": 3.9, "in_flight_max": 4.0, "kv_cache_use": 0.41, "kv_cache_use_max": 0.5, "waiting": 0.0}
    use = TritonUse(models=dict.fromkeys(names, times), **gauges, in_flight_by_client=3.95)  # type: ignore[arg-type]
    levels = tuple(
        dataclasses.replace(
            level,
            triton_use=use,
            tokens_per_joule=1.5,
            gpu_use=GpuUse(devices=1, power_w=125.0, memory_bytes=10**9),
            goodput=Goodput({"ttft": 300.0}, 0.97, 2.0),
        )
        for level in first.levels
    )
    show(clean, tmp_path, (dataclasses.replace(first, levels=levels), other), record, width=width, dark=dark)
    clean.evaluate("document.querySelector('#definitions details').open = true")
    assert any(text.startswith("triton_use") for text in texts(clean, "#definitions dt"))
    open_details(clean)
    box = "document.querySelector('#details [aria-label=\"Triton\\'s own metrics\"]')"
    heads = clean.evaluate(f"[...{box}.querySelectorAll('thead th')].map(e => e.textContent)")
    assert heads[:4] == ["load", "model", "requests", "whole"]
    assert heads[-4:] == ["in flight: Triton", "in flight: client", "waiting", "KV cache %"]
    lines = clean.evaluate(f"[...{box}.querySelectorAll('tbody tr')].map(e => e.textContent)")
    assert len(lines) == len(names) * len(levels)
    assert "3.90, max 4.00" in lines[0]
    assert "41.0, max 50.0" in lines[0]
    cut = clean.evaluate(
        "[...document.querySelectorAll('#details .scroll')].map(e => e.scrollWidth > e.clientWidth + 1)"
    )
    assert cut == [False, False] if width == 1440 else cut[1], "it scrolls inside its box where there is no room"
    assert clean.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.getElementById('details'))")
    folder = Path(os.environ.get("PIPELINE_SCREENSHOTS", tmp_path))
    clean.screenshot(folder / f"triton-{width}-{'dark' if dark else 'light'}.png", whole=False)


def test_each_workload_has_plots_of_its_own(clean: Browser, pages: dict[int, Path]) -> None:
    load(clean, pages[1000])
    heads = texts(clean, "#pareto-plots h3")
    assert len(heads) == len(texts(clean, "#curve-plots h3")) == 6
    assert clean.evaluate("document.querySelectorAll('#pareto-plots svg').length") == 6
    assert "The first 6 of" in texts(clean, "#pareto-note")[0]
    set_value(clean, "words", "model-3 isl512")
    assert not texts(clean, "#pareto-plots h3"), "one workload needs no name"


def test_hostile_text_stays_text(clean: Browser, pages: dict[int, Path]) -> None:
    load(clean, pages[40])
    clean.evaluate(
        "[...document.querySelectorAll('#cells-table tbody a')].find(a => a.textContent.includes('a\\'b')).click()"
    )
    clean.wait("document.getElementById('details').open")
    assert HOSTILE in text(clean, "details")
    clean.evaluate("document.querySelectorAll('#details details').forEach(one => { one.open = true; })")
    assert clean.evaluate("document.querySelectorAll('img, script[src], [onerror], [onclick]').length") == 0
    assert clean.evaluate("window.hacked") is None


def test_limits_decide_what_to_take(clean: Browser, pages: dict[int, Path]) -> None:
    rows, _ = run(40)
    load(clean, pages[40])
    limit_ms = 40.0
    wanted: list[tuple[float, str, int]] = sorted(
        (
            ((level.output_tokens_per_s or 0) / int(str(row.axes["tp"])), str(row.id), level.concurrency)
            for row in rows
            for level in row.levels
            if (level.latency("ttft_ms", "p99") or 1e9) <= limit_ms and row.accuracy["exact"] >= 0.8
        ),
        reverse=True,
    )
    set_value(clean, "ttft", str(limit_ms))
    set_value(clean, "statistic", "p99")
    set_value(clean, "accuracy", "0.8")
    first = texts(clean, "#cards .card")[0]
    assert f"{wanted[0][1]} at concurrency {wanted[0][2]}" in first
    assert clean.evaluate("document.querySelectorAll('#pareto-plot .mark-text text').length") > 0
    assert "SLO 40" in text(clean, "pareto-plot")
    set_value(clean, "ttft", "0.001")
    assert "None of" in text(clean, "take-why")
    assert not texts(clean, "#cards .card")


def test_limits_of_an_open_loop_count_the_wait_to_be_sent(clean: Browser, tmp_path: Path) -> None:
    """As `pipeline recommend` does: each request was fast once sent, but late."""
    rows, record = run(4)
    late = {"n": 200, "mean": 2000.0, "p50": 2000.0, "p99": 3000.0}
    waited = Schedule(5.0, late, late, late, 3)
    rows = [
        dataclasses.replace(
            row,
            levels=tuple(
                dataclasses.replace(level, concurrency=None, request_rate=8.0, schedule=waited)
                for level in row.levels[:1]
            ),
        )
        for row in rows
    ]
    show(clean, tmp_path, rows, record)
    set_value(clean, "ttft", "2500")
    set_value(clean, "statistic", "p50")
    assert texts(clean, "#cards .card")
    set_value(clean, "ttft", "1900")
    assert not texts(clean, "#cards .card")
    assert "misses TTFT 2000 ms > 1900 ms from the schedule" in text(clean, "take-why")


def test_what_failed_is_seen_and_never_taken(clean: Browser, tmp_path: Path) -> None:
    rows, record = run(40)
    fastest = max(
        (row for row in rows if row.levels and row.axes["tp"] == 1),
        key=lambda row: row.levels[-1].output_tokens_per_s or 0,
    )
    why = {"failed_stage": "accuracy", "reason": "exact is 0.100, expected at least 0.9"}
    score = {"exact": 0.99}  # nor does it set the mark for the others
    bad = dataclasses.replace(fastest, status=CellStatus.FAILED, accuracy=score, accuracy_drift=None, **why)
    show(clean, tmp_path, [bad if row is fastest else row for row in rows], record)
    assert texts(clean, "#cards .card")
    name = without(bad.id, shared_parts([row.id for row in rows]))
    for places in ("#cards .card a", "#front tbody a"):
        clean.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        names = texts(clean, places)
        assert names
        assert name not in names
    assert "from failed or unfinished cells" in text(clean, "take-why")
    best = clean.evaluate(
        f"[...document.querySelectorAll('#cells-table tbody tr')].find(r => r.cells[0].textContent.trim().startsWith({name!r})).cells[1].textContent"
    )
    assert best == "", "it has no level that holds"
    set_value(clean, "words", " ".join(name.split("/")))
    assert "completed all its stages" in text(clean, "take-why")
    open_details(clean, "#cells-table tbody tr:not([hidden]) a")
    assert "expected at least 0.9" in text(clean, "details")


def test_filter_narrows_everything(clean: Browser, pages: dict[int, Path]) -> None:
    load(clean, pages[1000])
    set_value(clean, "words", "fp8 tp4 !bs8 model-3")
    names = texts(clean, "#cells-table tbody th")
    assert names
    assert all("fp8" in name and "tp4" in name and "bs8/" not in name and "model-3" in name for name in names)
    names = texts(clean, "#cards .card a:not(.badge)")
    assert names
    assert all("model-3" in name for name in names)


def test_all_of_many_cells_on_demand(clean: Browser, pages: dict[int, Path]) -> None:
    load(clean, pages[1000])
    clean.evaluate("document.getElementById('more').click()")
    clean.wait("[...document.querySelectorAll('#cells-table tbody tr')].filter(r => !r.hidden).length === 1000")


def test_sorting_and_details_by_keyboard(clean: Browser, pages: dict[int, Path]) -> None:
    load(clean, pages[40])
    clean.press("Tab")
    assert clean.evaluate("document.activeElement.textContent") == "Skip to the table of cells"
    for _ in range(80):
        clean.press("Tab")
        if clean.evaluate("document.activeElement.closest('#cells-table thead th:nth-child(2)') !== null"):
            break
    assert clean.evaluate("document.activeElement.tagName") == "BUTTON"
    clean.press("Enter")
    assert clean.evaluate("document.querySelector('#cells-table thead th:nth-child(2)').ariaSort") == "descending"
    best = [float(text.split()[0]) for text in texts(clean, "#cells-table tbody td:nth-child(2)") if text]
    assert best == sorted(best, reverse=True)
    clean.press(" ")
    assert clean.evaluate("document.querySelector('#cells-table thead th:nth-child(2)').ariaSort") == "ascending"
    for _ in range(40):
        clean.press("Tab")
        if clean.evaluate("document.activeElement.matches('#cells-table tbody a')"):
            break
    clean.press("Enter")
    clean.wait("document.getElementById('details').open")
    assert clean.evaluate("document.activeElement.closest('dialog') !== null"), "the focus is in the dialog"
    clean.press("Escape")
    clean.wait("!document.getElementById('details').open")
    assert clean.evaluate("document.activeElement.matches('#cells-table tbody a')"), "and comes back"


def test_what_a_screen_reader_is_told(clean: Browser, pages: dict[int, Path]) -> None:
    load(clean, pages[40])
    nodes: list[dict[str, Any]] = clean.call("Accessibility.getFullAXTree")["nodes"]
    told = [(node.get("role", {}).get("value"), node.get("name", {}).get("value", "")) for node in nodes]
    unnamed = [
        role
        for role, name in told
        if role in {"button", "link", "textbox", "spinbutton", "combobox", "searchbox", "image", "region", "table"}
        and not name
    ]
    assert unnamed == []
    assert any(role == "image" and "Pareto front" in name for role, name in told)
    assert sum(role in {"graphics-symbol", "graphics-object"} for role, _ in told) == 0, "plots are one image each"
    assert clean.evaluate(
        "[...document.querySelectorAll('table')].every(t => t.caption && t.querySelector('th[scope=col]'))"
    )
    assert clean.evaluate("document.documentElement.lang") == "en"


def test_printed(clean: Browser, pages: dict[int, Path]) -> None:
    clean.emulate(width=1280, dark=True)
    load(clean, pages[40], dark=True)
    clean.emulate(width=1280, dark=True, media="print")
    assert clean.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert clean.evaluate("getComputedStyle(document.querySelector('.tall')).maxHeight") == "none"
    assert clean.call("Page.printToPDF", printBackground=False)["data"]


def test_what_was_not_measured_is_left_out(clean: Browser, tmp_path: Path) -> None:
    rows, record = run(3)
    levels = [dataclasses.replace(rows[1].levels[0], latencies={"ttft_ms": {"p50": 3.0, "n": 2}})]
    bare = dataclasses.replace(rows[1], levels=tuple(levels), accuracy={}, accuracy_intervals={}, accuracy_drift=None)
    show(clean, tmp_path, [bare], record, limits={"ttft_ms": 5.0, "statistic": "p50"})
    assert clean.evaluate("document.getElementById('ttft').value") == "5"
    assert texts(clean, "#cards .card")
    set_value(clean, "ttft", "6")
    set_value(clean, "statistic", "p99")
    assert "No p99 is shown of fewer than 100 requests" in text(clean, "take-why")
    set_value(clean, "statistic", "p50")
    set_value(clean, "ttft", "1")
    assert "at concurrency 1 misses TTFT 3.00 ms > 1.00 ms." in text(clean, "take-why")
    before = clean.evaluate("document.getElementById('pareto-plot').hidden")
    set_value(clean, "latency", "tpot_ms")
    assert clean.evaluate("document.getElementById('pareto-plot').hidden")
    assert not before
    assert not texts(clean, "#precision")


def test_request_rates_are_levels_like_any_other(clean: Browser, tmp_path: Path) -> None:
    rows, record = run(3)
    goodput = Goodput({"ttft": 300}, share=0.875, requests_per_s=2.2)
    rated = [
        dataclasses.replace(
            one,
            levels=tuple(
                dataclasses.replace(level, concurrency=None, request_rate=2.5 * 2**place, goodput=goodput)
                for place, level in enumerate(one.levels)
            ),
        )
        for one in rows
    ]
    show(clean, tmp_path, rated, record)
    assert re.search(r" at \d+ requests/s", texts(clean, "#cards .card")[0])
    assert "Scaling with requests/s" in texts(clean, "#curves h2")
    ticks = texts(clean, "#curve-out .role-axis-label text")
    assert {"2.5", "40"} <= set(ticks)
    assert all(text.endswith("/s") for text in texts(clean, "#cells-table td:nth-child(2)"))
    open_details(clean)
    assert "0.88" in texts(clean, "#details-body td") or "0.88" in texts(clean, "#details-body table td")
    assert "2.5 requests/s" in texts(clean, "#details-body tbody th")


def test_the_page_and_recommend_take_the_same(clean: Browser, tmp_path: Path) -> None:
    made, record = run(150)
    scored = {row.id for row in made if row.accuracy}
    reference = references({row.id: row.axes for row in made})
    rows = [row for row in made if reference.get(row.id, row.id) in scored]
    best: dict[Workload, Candidate] = {}
    found = recommend(Side("r", tuple(map(Measured.of, rows))), (), None, "throughput")
    assert any(each.reason and "significantly (95%) below" in each.reason for each in found)
    for each in found:
        best.setdefault(each.workload, each)
    assert len(best) > 3
    show(clean, tmp_path, rows, record)
    taken = texts(clean, "#cards .card > div:nth-child(3)")
    parts = shared_parts([row.id for row in rows])
    wanted = [f"{without(each.cell, parts)} at concurrency {each.level}" for each in best.values()]
    assert [text.startswith(each) for text, each in zip(taken, wanted, strict=True)] == [True] * len(wanted)


def test_the_first_recommendation_is_on_the_first_screen_of_a_phone(clean: Browser, pages: dict[int, Path]) -> None:
    for cells in (2, 40):
        load(clean, pages[cells], width=390)
        bottom = clean.evaluate("document.querySelector('#cards .card').getBoundingClientRect().bottom")
        assert bottom <= clean.evaluate("innerHeight")
        order = clean.evaluate("[...document.querySelectorAll('header, main > *')].map(e => e.id || e.tagName)")
        assert order[:5] == ["HEADER", "take", "choices", "pareto", "cells"]


def column(browser: Browser, head: str) -> list[str]:
    found: list[str] = browser.evaluate(
        f"(() => {{ const place = [...document.querySelectorAll('#cells-table thead th')].findIndex(e => e.textContent === {head!r});"
        " return [...document.querySelectorAll('#cells-table tbody tr')].map(row => row.cells[place].textContent); })()"
    )
    return found


def test_the_table_shows_the_chosen_level(clean: Browser, pages: dict[int, Path]) -> None:
    rows, _ = run(2)
    load(clean, pages[2])
    for wanted, place in (("highest", -1), ("lowest", 0), (rows[0].levels[1].key, 1)):
        set_value(clean, "level", wanted)
        shown = {
            name: dict(zip(column(clean, "cell"), column(clean, name), strict=True)) for name in heads_of(rows, place)
        }
        assert len(shown) == 2
        for name, values in shown.items():
            level = rows[0].levels[place]
            value = level.latency("ttft_ms", "p50") if name.startswith("TTFT") else level.output_tokens_per_s
            assert value is not None
            text = next(text for cell, text in values.items() if str(rows[0].axes["precision"]) in cell)
            assert float(text) == pytest.approx(value, rel=0.02), (name, values)


def heads_of(rows: Any, place: int) -> list[str]:
    return [f"{name} @{rows[0].levels[place].key}" for name in ("TTFT ms", "tok/s")]


def test_a_link_keeps_filters_level_and_cell(clean: Browser, pages: dict[int, Path]) -> None:
    rows, _ = run(40)
    load(clean, pages[40])
    assert clean.evaluate("location.hash") == ""
    key = rows[0].levels[0].key
    for control, value in (("words", "fp8 tp1"), ("ttft", "300"), ("statistic", "p99"), ("level", key)):
        set_value(clean, control, value)
    open_details(clean, "#cells-table tbody tr:not([hidden]) a")
    kept = clean.evaluate("location.hash")
    names = texts(clean, "#cells-table tbody th")
    load(clean, pages[40], at=kept)
    assert clean.evaluate("document.getElementById('details').open")
    state = {
        each: clean.evaluate(f"document.getElementById({each!r}).value")
        for each in ("words", "ttft", "statistic", "level")
    }
    assert state == {"words": "fp8 tp1", "ttft": "300", "statistic": "p99", "level": key}
    assert names
    assert texts(clean, "#cells-table tbody th") == names
    clean.press("Escape")
    clean.wait("!document.getElementById('details').open")
    clean.wait("!location.hash.includes('cell=')")  # the close event follows
    assert "ttft=300" in clean.evaluate("location.hash")


def test_warnings_are_badges_on_cards_and_rows(clean: Browser, tmp_path: Path) -> None:
    rows, record = run(2)
    late = tuple(dataclasses.replace(row, findings=("warning: the client was late", "info: a note")) for row in rows)
    show(clean, tmp_path, late, record, width=390)
    badges = texts(clean, "#cards .badge"), texts(clean, "#cells-table .badge")
    assert [set(each) for each in badges] == [{"1 warning"}] * 2
    open_details(clean, "#cards .badge")
    assert "the client was late" in texts(clean, "#details-body")[0]


def test_a_card_says_that_its_figures_are_those_of_several_cells(clean: Browser, tmp_path: Path) -> None:
    rows, record = run(2)
    small = dataclasses.replace(rows[0], status=CellStatus.DONE)
    large = dataclasses.replace(
        small, id=CellId(f"{small.id}/large"), axes={**small.axes, "max_batch_size": 999}, engine_size_bytes=10**12
    )
    for cells, words in (([small, large], True), ([small], False)):
        show(clean, tmp_path, cells, record)
        (throughput, *_) = texts(clean, "#cards .card")
        assert ("medians of 2 cells that do the same work" in throughput) is words


def test_a_tie_names_the_cheapest_and_lost_accuracy_is_never_the_highest(clean: Browser, tmp_path: Path) -> None:
    rows, record = run(2)
    accurate, other = rows
    level = dataclasses.replace(accurate.levels[0], repeats=(), intervals={"output_tps": (90.0, 110.0)})
    alike = [
        dataclasses.replace(
            row,
            levels=(dataclasses.replace(level, output_tokens_per_s=rate),),
            engine_size_bytes=size,
            accuracy={"exact": score},
            accuracy_intervals={"exact": (score - 0.01, score + 0.01)},
            accuracy_drift=None,
            status=CellStatus.DONE,
            gpu_hour=2.5,
        )
        for row, rate, size, score in ((accurate, 102.0, 900, 0.5), (other, 98.0, 500, 0.495))
    ]
    show(clean, tmp_path, alike, record)
    (throughput, *_) = texts(clean, "#cards .card")
    assert "(tie of 2, the cheapest)" in throughput
    assert "fp8" in throughput
    assert "95%: 90.0 to 110" in throughput, "as in the table"
    assert text(clean, "verdict").startswith("Tie of 2, the cheapest: ")
    assert "per million tokens" in throughput
    lost = [
        alike[0],
        dataclasses.replace(alike[1], accuracy={"exact": 0.3}, accuracy_intervals={"exact": (0.28, 0.32)}),
    ]
    slow = dataclasses.replace(
        lost[0], levels=(dataclasses.replace(level, latencies={"ttft_ms": {"p50": 900.0, "n": 200}}),)
    )
    show(clean, tmp_path, [slow, lost[1]], record, limits={"ttft_ms": 800.0})
    assert not [text for text in texts(clean, "#cards .card") if text.startswith("Highest accuracy")]
    assert "None of them preserves the accuracy" in text(clean, "take-why")


def test_page_and_recommendation_find_the_same_ties(clean: Browser, tmp_path: Path) -> None:
    """With three repeats, the intervals of both overlap, and their difference is beyond noise."""
    rows, record = run(2)
    one = dataclasses.replace(rows[0].levels[0], requests=30)
    for gap, tied in ((0.035, False), (0.02, True)):
        cells = [
            dataclasses.replace(
                row,
                levels=(
                    dataclasses.replace(
                        one,
                        output_tokens_per_s=100 * by,
                        repeats=tuple(RepeatResult(output_tokens_per_s=by * each) for each in (99, 100, 101)),
                    ),
                ),
                accuracy={},
                accuracy_intervals={},
                accuracy_drift=None,
                status=CellStatus.DONE,
            )
            for row, by in zip(rows, (1.0, 1 + gap), strict=True)
        ]
        (best, *_) = recommend(Side("r", tuple(map(Measured.of, cells))), (), None, "throughput")
        assert best.tied is tied
        show(clean, tmp_path, cells, record)
        assert ("(tie of 2, the cheapest)" in texts(clean, "#cards .card")[0]) is tied


def test_opens_at_a_cell(clean: Browser, pages: dict[int, Path]) -> None:
    load(clean, pages[2], at="#cell=model-0%2Ffp8%2Ftp1pp1%2Fbs8%2Fisl512-osl256")
    assert clean.evaluate("document.getElementById('details').open")
    assert "trtllm_pipeline build" in text(clean, "details")


def test_tables_without_the_plotting_library_and_without_scripts(browser: Browser, tmp_path: Path) -> None:
    rows, record = run(5)
    page = tmp_path / "plain.html"
    page.write_text(to_html(rows, record, plots=False), encoding="utf-8")
    browser.complaints.clear()
    browser.emulate(width=1280)
    browser.open(page.as_uri(), "document.documentElement?.dataset.ready !== undefined")
    assert texts(browser, "#cards .card")
    assert not texts(browser, "#pareto, #curves")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.reload")
        browser.wait("document.querySelectorAll('#cells-table tbody tr').length === 5")
        assert not texts(browser, ".needs-script")
        assert any("need JavaScript" in text for text in texts(browser, "noscript"))
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.complaints == []


def test_a_level_has_its_samples_over_time(clean: Browser, tmp_path: Path) -> None:
    rows, record = run(2)
    key = rows[0].levels[-1]
    out = tmp_path / "perf" / "out"
    out.mkdir(parents=True)
    samples = [[second * 10**9, 3.5, 0.5 * second, 0.1] for second in range(8)]
    event = {"type": "gauges", "concurrency": key.concurrency, "request_rate": None, "samples": samples}
    (out / "events.jsonl").write_text(json.dumps(event) + "\n")
    stages = tuple(
        dataclasses.replace(each, folder=out.parent) if each.stage == "perf" else each for each in record.stages
    )
    show(clean, tmp_path, rows, dataclasses.replace(record, stages=stages))
    clean.evaluate("document.querySelector('#cells-table tbody a').click()")
    clean.wait("document.querySelectorAll('#series svg').length === 3")
    labels = clean.evaluate("[...document.querySelectorAll('#series .plot[role=img]')].map(e => e.ariaLabel)")
    assert [label.partition(" at ")[0] for label in labels] == ["requests in flight", "requests waiting", "KV cache %"]
    assert labels[1].endswith("0.00 to 3.50.")
