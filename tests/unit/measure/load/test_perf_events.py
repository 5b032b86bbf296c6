"""Broken event files, and impossible ones."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz_wire import json_text
from tests.unit.measure.load.test_perf_metrics import Words
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.measure.load.metrics import analyze
from trtllm_pipeline.measure.load.objectives import of_load
from trtllm_pipeline.measure.load.result import LoadResult
from trtllm_pipeline.show.cli.output import emit_as
from trtllm_pipeline.show.report import load_tables

Rows = list[dict[str, Any]]
LEVEL = {"concurrency": 2, "request_rate": None, "repeat": 0}
OPEN = {"concurrency": None, "request_rate": 5.0, "repeat": 0}


def request(sent_ns: int, slot: int, **changes: Any) -> dict[str, Any]:
    return {
        "type": "request",
        **LEVEL,
        "phase": "measured",
        "worker": 0,
        "slot": slot,
        "prompt": "p",
        "max_tokens": 3,
        "scheduled_ns": sent_ns - 10,
        "connected_ns": sent_ns - 5,
        "sent_ns": sent_ns,
        "headers_ns": sent_ns + 10,
        "first_byte_ns": sent_ns + 10,
        "first_event_ns": sent_ns + 20,
        "role_ns": sent_ns + 20,
        "events": [[sent_ns + 20, " a", 1, True], [sent_ns + 30, " b", 2], [sent_ns + 40, " c", 3]],
        "usage_ns": sent_ns + 40,
        "output_tokens": 3,
        "input_tokens": 2,
        "cached_tokens": 0,
        "finish_reason": "length",
        "late_ns": 0,
        "end_ns": sent_ns + 50,
        "error": None,
        **changes,
    }


def good() -> Rows:
    """One record of everything there is, two levels."""
    alive = {"type": "server", "pid": 5, "since": 9, "ready": True}
    return [
        {
            "type": "header",
            "schema": 1,
            "anchor": {"monotonic_ns": 500, "unix_ns": 10**18},
            "protocol": "grpc",
            "model": "m",
            "tls": False,
            "settings": {"extra_inputs": {"ignore_eos": True}},
        },
        {"type": "prompt", "id": "p", "text": "three words here"},
        {"type": "prompt", "id": "p (warm-up)", "text": " words here"},
        {**alive, "at": "start"},
        {"type": "roofline", "at": "start", "pass_s": 1e-12, "weight_bytes": 10, "reason": "told"},
        {"type": "reused_blocks", "at": "start", "blocks": 1.0},
        request(1000, 0, phase="warmup", prompt="p (warm-up)"),
        request(1010, 1),
        request(1060, 0),
        {"type": "client", **LEVEL, "worker": 0, "wall_ns": 100, "cpu_ns": 5, "lag_ns": [1, 2]},
        {"type": "triton", **LEVEL, "models": {"m": {"requests": 3.0, "queue_us": 5.0}}},
        {"type": "gpu", **LEVEL, "devices": [{"name": "G", "uuid": "u", "samples": [[1000, 1.0, 2, None, 4, 5]]}]},
        request(2000, 0, **OPEN),
        request(2010, 1, **OPEN),
        {"type": "client", **OPEN, "worker": 0, "wall_ns": 100, "cpu_ns": 5, "lag_ns": []},
        {
            "type": "settings",
            "at": "end",
            "checks": [{"setting": "s", "asked": 1, "asked_by": "a", "got": 1, "got_from": "b"}],
            "unchecked": ["u"],
        },
        {"type": "probe", "pair": 0, "send": 0, "ttft_ms": 9.0, "cached_tokens": 0, "error": None},
        {"type": "probe", "pair": 0, "send": 1, "ttft_ms": 8.0, "cached_tokens": 0, "error": None},
        {"type": "of a later version", "x": [1]},
        {**alive, "at": "end"},
    ]


def write(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_everything_there_is_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = analyze(write(tmp_path / "e", good()), Words())
    assert result.valid, result.findings
    assert [level.requests for level in result.levels] == [2, 2]
    for form in ("table", "json", "csv"):
        emit_as(form, result, table=load_tables.to_text, csv=load_tables.to_csv, json=LoadResult.to_json)
    assert "of a later version" not in capsys.readouterr().err


def first(rows: Rows, kind: str = "request") -> dict[str, Any]:
    """The first measured request, or the first record of another type."""
    return next(row for row in rows if row["type"] == kind and row.get("phase") != "warmup")


def changed(kind: str = "request", **changes: Any) -> Callable[[Rows], object]:
    return lambda rows: first(rows, kind).update(changes)


def event(number: int, at: int, value: object) -> Callable[[Rows], object]:
    return lambda rows: first(rows)["events"][number].__setitem__(at, value)


def twice(kind: str) -> Callable[[Rows], object]:
    return lambda rows: rows.append(copy.deepcopy(first(rows, kind)))


@pytest.mark.parametrize(
    ("lie", "line", "told"),
    [
        # Times.
        (event(0, 0, 10), 8, "event 0 (TIME) is before first_event_ns (TIME)"),
        (event(1, 0, 1045), 8, None),
        (event(1, 0, 1055), 8, "event 2 (TIME) is before event 1 (TIME)"),
        (changed(end_ns=900), 8, "end_ns (TIME) is before event 2 (TIME)"),
        (changed(end_ns=1045), 8, "end_ns (TIME) is before event 2 (TIME)"),
        (changed(sent_ns=1004), 8, "sent_ns (TIME) is before connected_ns (TIME)"),
        (changed(scheduled_ns=1008), 8, "connected_ns (TIME) is before scheduled_ns (TIME)"),
        (changed(headers_ns=1009), 8, "headers_ns (TIME) is before sent_ns (TIME)"),
        (changed(first_byte_ns=1000), 8, "first_byte_ns (TIME) is before headers_ns (TIME)"),
        (changed(first_event_ns=1000), 8, "first_event_ns (TIME) is before first_byte_ns (TIME)"),
        (changed(role_ns=10), 8, "role_ns is not between sent_ns and end_ns"),
        (changed(usage_ns=10**9), 8, "usage_ns is not between sent_ns and end_ns"),
        (changed(scheduled_ns=400), 8, "scheduled_ns is before the header's anchor"),
        (changed(sent_ns=-1), 8, "sent_ns: input should be greater than or equal to 0, got -1"),
        (changed(sent_ns=1010.0), 8, "sent_ns: input should be a valid integer, got 1010.0"),
        # Counts.
        (changed(output_tokens=float("nan")), 8, "output_tokens: input should be a valid integer"),
        (changed(output_tokens=10**12), 8, "output_tokens: input should be less than 2147483648"),
        (changed(output_tokens=10**6), 8, "1000000 output tokens, but max_tokens is 3"),
        (changed(output_tokens=2), 8, "output_tokens is 2, and 3 came with its events"),
        (event(1, 2, 0), 8, "the tokens so far fall from 1 to 0"),
        (event(1, 1, ""), 8, "events.1.1: string should have at least 1 character"),
        (changed(max_tokens=0), 8, "max_tokens: input should be greater than 0"),
        # Places.
        (changed(slot=2), 8, "slot 2 of 2, counted from 0"),
        (changed(slot=0), 8, "slot 0 sent this while the request of line 7 was in flight there"),
        (changed(concurrency=None), 8, "a level has a concurrency or a request_rate, one of the two"),
        (changed(request_rate=5.0), 8, "a level has a concurrency or a request_rate, one of the two"),
        (changed(request_rate=float("inf")), 8, "request_rate"),
        (changed(repeat=1), 8, "its level starts before that of line 7 has ended"),
        (changed(prompt="q"), 8, "no prompt 'q' in this file"),
        (changed(phase="other"), 8, "phase: input should be 'warmup' or 'measured', got 'other'"),
        (changed(events=5), 8, "events: input should be a valid array, got 5"),
        (lambda rows: first(rows).pop("events"), 8, "events: field required"),
        (twice("request"), 21, "slot 1 sent this while the request of line 8 was in flight there"),
        (lambda rows: rows.extend(copy.deepcopy([row for row in rows if row["type"] == "request"])), 21, "in flight"),
        # Unique records.
        (twice("prompt"), 21, "a duplicate of the prompt record in line 2"),
        (changed("of a later version", type="conditions", system={}), 19, "workload: field required"),
        (twice("server"), 21, "a duplicate of the server record in line 4"),
        (twice("header"), 21, "a duplicate of the header record in line 1"),
        (twice("client"), 21, "a duplicate of the client record in line 10"),
        (twice("triton"), 21, "a duplicate of the triton record in line 11"),
        (twice("gpu"), 21, "a duplicate of the gpu record in line 12"),
        (twice("probe"), 21, "a duplicate of the probe record in line 17"),
        (lambda rows: rows.pop(0), 1, "not the header, with which an event file of a load run starts"),
        (lambda rows: rows.remove(first(rows, "prompt")), 7, "no prompt 'p' in this file"),
        (lambda rows: rows.insert(1, [1]), 2, "not a record of a load run"),  # type: ignore[arg-type]
        (lambda rows: rows.insert(1, {"type": []}), 2, "not a record of a load run"),
        (lambda rows: rows.insert(1, {}), 2, "not a record of a load run: it has no type"),
        # Values from other programs.
        (changed("client", lag_ns=[-1]), 10, "lag_ns.0: input should be greater"),
        (changed("triton", models={"m": {"queue_us": 5.0}}), 11, "a model that grew by no requests"),
        (changed("triton", models={"m": {"requests": 1e400}}), 11, "requests"),
        (changed("gpu", devices=[{"name": "G", "uuid": "u", "samples": [[None]]}]), 12, "samples.0.0"),
        (changed("roofline", pass_s=-1.0), 5, "pass_s: input should be greater than 0"),
        (changed("roofline", weight_bytes=None), 5, "pass_s without weight_bytes"),
        (changed("reused_blocks", blocks=float("nan")), 6, "blocks"),
        (changed("settings", checks=[{}]), 16, "checks.0.setting: field required"),
        (changed("server", at="middle"), 4, "at: input should be 'start' or 'end'"),
    ],
)
def test_what_cannot_have_happened_is_refused_with_its_line(
    tmp_path: Path, lie: Callable[[Rows], object], line: int, told: str | None
) -> None:
    rows = good()
    lie(rows)
    path = write(tmp_path / "e", rows)
    if told is None:
        analyze(path, Words())
        return
    with pytest.raises(StageError) as caught:
        analyze(path, Words())
    assert f"{path}:{line}: " in str(caught.value)
    assert told in re.sub(r"\(\d+\)", "(TIME)", str(caught.value))


def test_a_file_of_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e"
    with pytest.raises(StageError, match="no request in this event file"):
        analyze(write(path, [row for row in good() if row["type"] != "request"]), Words())
    with pytest.raises(StageError, match="not an event file of schema 1, but of 2"):
        analyze(write(path, [{**row, "schema": 2} if row["type"] == "header" else row for row in good()]), Words())
    path.write_bytes(b"\n\n")
    with pytest.raises(StageError, match="it is empty"):
        analyze(path, Words())
    write(path, good())
    path.write_text(path.read_text() + "[" * 5000 + "\n")
    with pytest.raises(StageError, match=r"e:21: not a record of a load run: invalid JSON: recursion"):
        analyze(path, Words())
    write(path, good())
    path.write_text(path.read_text() + "[" * 5000)
    assert analyze(path, Words()).valid, "cut off by a crash"


def test_a_level_of_warm_up_alone_is_not_valid(tmp_path: Path) -> None:
    rows = [{**row, "phase": "warmup"} if row["type"] == "request" and row["concurrency"] else row for row in good()]
    result = analyze(write(tmp_path / "e", rows), Words())
    assert not result.valid
    assert [finding.message for finding in result.findings if finding.check == "failures"] == [
        "no measured requests: all requests of this level are warmup"
    ]


def test_broken_files_are_read_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = refused = 0
    for number in range(500):
        draw = random.Random(f"events 20261122 {number}")
        lines = [json_text(draw, row) if draw.random() < 0.05 else json.dumps(row) for row in good()]
        how = draw.random()
        at = draw.randrange(len(lines))
        if how < 0.1:
            del lines[at]
        elif how < 0.2:
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif how < 0.3:
            lines[at] = lines[at][: draw.randrange(len(lines[at]))]
        elif how < 0.4:
            lines.insert(
                at, draw.choice(("", "null", "[]", "7", "{}", "{", "[" * 5000, '"x"', "\0", '{"type": "zzz"}'))
            )
        elif how < 0.45:
            draw.shuffle(lines)
        data = bytearray("\n".join(lines).encode("latin-1", "replace"))
        if how > 0.9:
            for _ in range(5):
                data[draw.randrange(len(data))] = draw.randrange(256)
        (tmp_path / "e").write_bytes(data)
        try:
            result = analyze(tmp_path / "e", Words() if number % 2 else None, of_load("ttft=5ms,ttft_p99=5ms"))
        except StageError as error:
            refused += error.message.startswith(str(tmp_path / "e"))
            continue
        read += 1
        for form in ("table", "json", "csv"):
            emit_as(form, result, table=load_tables.to_text, csv=load_tables.to_csv, json=LoadResult.to_json)
        capsys.readouterr()
    assert read > 50
    assert refused == 500 - read
