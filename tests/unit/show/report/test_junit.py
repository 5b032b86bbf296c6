from __future__ import annotations

import dataclasses
from xml.etree import ElementTree as Xml

from tests.helpers.fabricated_conditions import other
from tests.helpers.fabricated_run import HOSTILE, run
from trtllm_pipeline.orchestrate.results.report_file import CellStatus
from trtllm_pipeline.show.report.junit import to_junit
from trtllm_pipeline.show.report.record import Ending


def test_a_case_for_each_stage_run_and_each_impossible_cell() -> None:
    rows, record = run(40)
    suite = Xml.fromstring(to_junit(rows, record, "my.yaml"))[0]
    infeasible = sum(row.status is CellStatus.INFEASIBLE for row in rows)
    failed = sum(stage.ending is Ending.FAILED for stage in record.stages)
    assert infeasible
    assert failed
    assert len(suite.findall("testcase")) == len(record.stages) + infeasible
    assert suite.get("tests") == str(len(record.stages) + infeasible)
    assert suite.get("failures") == str(failed) == str(len(suite.findall("testcase/failure")))
    assert suite.get("skipped") == str(infeasible) == str(len(suite.findall("testcase/skipped")))
    assert suite.get("timestamp") == "2026-09-21T14:13:20"


def test_a_failure_says_what_why_and_what_to_do() -> None:
    rows, record = run(12)
    suite = Xml.fromstring(to_junit(rows, record))[0]
    case = next(case for case in suite.findall("testcase") if case.find("failure") is not None)
    failure = case.find("failure")
    assert (case.get("classname"), failure.get("type")) == ("build", "out_of_memory")
    assert HOSTILE in (failure.get("message") or "")
    failed = [dataclasses.replace(stage, failure="bug") for stage in record.stages if stage.failure is not None]
    (other,) = Xml.fromstring(to_junit(rows, dataclasses.replace(record, stages=tuple(failed))))[0].iter("failure")
    assert other.get("type") == "unexpected_failure"
    assert "try: lower max_batch_size" in (failure.text or "")
    assert "build 84 started" in (failure.text or "") or "began" in (failure.text or "")


def test_times_are_those_of_this_run() -> None:
    rows, record = run(2)  # the first cell was up to date
    suite = Xml.fromstring(to_junit(rows, record))[0]
    times = {
        (case.get("classname"), case.get("name")): float(case.get("time") or -1) for case in suite.findall("testcase")
    }
    assert times["build", rows[0].id] == 0.0
    assert times["build", rows[1].id] == round(record.stages[-6].seconds, 3) > 0
    assert abs(float(suite.get("time") or 0) - sum(times.values())) < 0.01


def test_control_characters_of_logs_do_not_break_the_document() -> None:
    rows, record = run(11)
    stages = tuple(dataclasses.replace(stage, log="\x00\x1b[1m\ud800 end") for stage in record.stages)
    text = to_junit(rows, dataclasses.replace(record, stages=stages))
    failure = Xml.fromstring(text.encode())[0].find("testcase/failure")
    assert (failure.text or "").endswith("\\u0000\\ud800 end")


def test_what_was_not_done_is_skipped() -> None:
    rows, record = run(2)
    stages = tuple(dataclasses.replace(stage, ending=Ending.NOT_RUN, attempts=()) for stage in record.stages)
    suite = Xml.fromstring(to_junit(rows, dataclasses.replace(record, stages=stages)))[0]
    assert suite.get("skipped") == str(len(stages))
    assert suite.get("failures") == "0"


def test_the_suite_says_on_what_it_was_measured_and_a_case_what_differs() -> None:
    rows, record = run(4)
    moved = dataclasses.replace(rows[1], conditions=other("system", cpu="Intel <Xeon>", commit=None))
    suite = Xml.fromstring(to_junit([rows[0], moved, *rows[2:]], record))[0]

    def told(element: Xml.Element) -> dict[str, str]:
        return {str(one.get("name")): str(one.get("value")) for one in element.findall("properties/property")}

    assert told(suite)["system.driver"] == "570.86.15"
    assert told(suite)["workload.prompts_digest"] == "abababababab"
    assert "system.cpu" not in told(suite)
    perf = {case.get("name"): told(case) for case in suite.findall("testcase[@classname='perf']")}
    assert perf[rows[1].id] == {"system.cpu": "Intel <Xeon>", "measured": "2026-09-21 14:13:20 UTC"}
    assert perf[rows[2].id]["system.cpu"] == "AMD EPYC 9654"
    assert suite[0].tag == "properties", "as the dialect wants it"
