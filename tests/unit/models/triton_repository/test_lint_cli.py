"""`pipeline models lint`: what it prints, and its exit code."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.broken_repositories import BROKEN, Case, write_engine
from trtllm_pipeline.show.cli.app import main


def run(*words: object) -> int:
    return main(["models", "lint", *map(str, words)])


def test_a_good_one(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(case.repository, "--release", "0.16.0") == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "no problems found\n")


def test_errors_with_lines_and_hints(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    BROKEN["TRT503"](case)
    BROKEN["TRT216"](case)
    assert run(case.repository) == 1
    out, err = capsys.readouterr()
    path = case.repository / "tensorrt_llm" / "config.pbtxt"
    lines = out.splitlines()
    assert lines[0].startswith(str(case.repository / "postprocessing" / "config.pbtxt"))
    assert ": warning TRT216 queue-delay: requests may wait 2 s to be batched" in lines[0]
    assert lines[1].startswith("    the unit is microseconds")
    assert lines[2].startswith(f"{path}:")
    assert ": error TRT503 fraction: kv_cache_free_gpu_mem_fraction is '90'" in lines[2]
    assert err == "errors: 1, warnings and notes: 1\n"


def test_warnings_alone_are_no_failure(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    BROKEN["TRT216"](case)
    assert run(case.repository) == 0
    assert "TRT216" in capsys.readouterr().out


def test_json(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    BROKEN["TRT404"](case)
    assert run(case.repository, "--format", "json") == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["errors"]) == (1, 1)
    (finding,) = said["findings"]
    assert finding["line"] > 0
    assert finding["file"] == str(case.repository / "tensorrt_llm" / "config.pbtxt")
    assert {key: finding[key] for key in ("rule", "name", "severity")} == {
        "rule": "TRT404",
        "name": "batch-size",
        "severity": "error",
    }


def test_annotations_of_github(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    BROKEN["TRT504"](case)
    assert run(case.repository, "--format", "github") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"::notice file={case.repository}/tensorrt_llm/config.pbtxt,line=")
    assert ",title=TRT504 two-kv-limits::max_tokens_in_paged_kv_cache and " in out
    assert out.count("\n") == 1


def test_select_and_ignore(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    BROKEN["TRT503"](case)
    BROKEN["TRT404"](case)
    assert run(case.repository, "--select", "TRT4") == 1
    assert "TRT503" not in capsys.readouterr().out
    assert run(case.repository, "--ignore", "TRT404,fraction") == 0
    assert capsys.readouterr().out == ""


def test_engine_and_release(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    engine = write_engine(case.folder / "engine-0.17", "0.17.0")
    assert run(case.repository, "--engine", engine, "--release", "0.16.0") == 1
    assert "was built by 0.17.0, but 0.16.0 will serve it" in capsys.readouterr().out
    assert run(case.repository, "--engine", engine, "--release", "0.17.0") == 0


def test_what_cannot_be_linted(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(case.folder / "nowhere") == 2
    assert "no such directory" in capsys.readouterr().err
    assert run(case.repository, "--engine", case.folder) == 2
    assert re.search("--engine: .* is not an engine directory: config.json: it is missing", capsys.readouterr().err)
    assert run(case.repository, "--ignore", "TRT9") == 2
    assert "unknown rule 'TRT9'" in capsys.readouterr().err
