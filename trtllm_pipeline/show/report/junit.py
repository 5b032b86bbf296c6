"""A run as JUnit XML for CI systems: one test suite, with a test case per stage run and per infeasible cell.

A shared stage run is one case, so that one broken download is one failure. The elements are those that Jenkins,
GitLab and GitHub's test reporters read: suites, suite, case, failure, skipped, system-out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Final
from xml.etree import ElementTree as Xml

from trtllm_pipeline.base import Json, terminal
from trtllm_pipeline.measure import Conditions, conditions
from trtllm_pipeline.orchestrate import CellResult, CellStatus
from trtllm_pipeline.show.report.record import Ending, Record, StageRecord
from trtllm_pipeline.show.report.report_formats import Report
from trtllm_pipeline.show.report.writers import moment

_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot represent."""
_UNEXPECTED: Final = "unexpected_failure"
_SKIPPED: Final = {
    Ending.NOT_RUN: "not run: a stage it needs failed, or the run ended before",
    Ending.SKIPPED: "not needed in this run",
    Ending.INTERRUPTED: "interrupted",
    Ending.RUNNING: "still running",
}


def write(report: Report) -> None:
    report.stream.write(terminal.clean(to_junit(report.rows, report.record(), report.matrix)))


def to_junit(rows: Sequence[CellResult], record: Record, matrix: str = "") -> str:
    """The run as an XML document. Times are seconds spent in this run, so up-to-date stages have 0."""
    findings = {row.id: row.warnings for row in rows}
    of_cell = {row.id: row.conditions for row in rows if row.levels}
    shared = conditions.common(list(of_cell.values()))
    cases = [_case(stage, [text for cell in stage.cells for text in findings.get(cell, ())]) for stage in record.stages]
    for stage, case in zip(record.stages, cases, strict=True):
        if stage.stage == "perf" and (own := next((of_cell[cell] for cell in stage.cells if cell in of_cell), None)):
            _properties(
                case,
                {name: own.value(conditions.BY_NAME[name]) for name in conditions.BY_NAME.keys() - shared.keys()},
                own,
            )
    cases += [_impossible(row) for row in rows if row.status is CellStatus.INFEASIBLE]
    failures = sum(case.find("failure") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(stage.seconds for stage in record.stages)
    counts = {
        "tests": str(len(cases)),
        "failures": str(failures),
        "errors": "0",
        "skipped": str(skipped),
        "time": f"{seconds:.3f}",
    }
    suite = Xml.Element("testsuite", {"name": _clean(f"{matrix} {record.id}".strip()), **counts})
    if record.started_s is not None:
        began = datetime.fromtimestamp(record.started_s, timezone.utc)
        suite.set("timestamp", began.replace(tzinfo=None).isoformat(timespec="seconds"))
    _properties(suite, shared)
    suite.extend(cases)
    suites = Xml.Element("testsuites", {"name": "trtllm-pipeline", **counts})
    suites.append(suite)
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(suites, encoding="unicode") + "\n"


def _properties(element: Xml.Element, values: Mapping[str, Json], own: Conditions | None = None) -> None:
    """`system.cpu`, `workload.prompts` etc. as the first children of an element. A single measurement also has its time."""
    known = {
        f"{field.about}.{field.name}": field.shown(value)
        for field in conditions.FIELDS
        if (value := values.get(field.name)) not in (None, conditions.UNKNOWN)
    }
    if own is not None and (text := moment(own.measured_s)):
        known["measured"] = text
    if known:
        properties = Xml.Element("properties")
        for name, value in known.items():
            Xml.SubElement(properties, "property", {"name": name, "value": _clean(value)})
        element.insert(0, properties)


def _case(stage: StageRecord, findings: Sequence[str]) -> Xml.Element:
    case = Xml.Element(
        "testcase", {"classname": stage.stage, "name": _clean(stage.name), "time": f"{stage.seconds:.3f}"}
    )
    if stage.ending is Ending.FAILED:
        message = stage.message or "failed without a reason"
        failure = Xml.SubElement(
            case,
            "failure",
            {"type": _UNEXPECTED if stage.failure in {None, "bug"} else str(stage.failure), "message": _clean(message)},
        )
        hint = None if stage.hint is None else f"try: {stage.hint}"
        cells = "cells: " + ", ".join(stage.cells)
        failure.text = _clean("\n".join(filter(None, (message, hint, cells, stage.log))))
    elif stage.ending in _SKIPPED:
        Xml.SubElement(case, "skipped", {"message": _SKIPPED[stage.ending]})
    output = [stage.id, stage.ending.value.replace("_", " ")]
    output += [text for text in dict.fromkeys(findings) if stage.stage == "perf"]
    Xml.SubElement(case, "system-out").text = _clean("\n".join(output))
    return case


def _impossible(row: CellResult) -> Xml.Element:
    case = Xml.Element("testcase", {"classname": "plan", "name": _clean(row.id), "time": "0.000"})
    Xml.SubElement(case, "skipped", {"message": _clean(f"infeasible: {row.reason}")})
    return case


def _clean(text: str) -> str:
    return _NOT_XML.sub("", terminal.clean(text))
