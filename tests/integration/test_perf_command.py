"""`pipeline bench` against a server whose timeline is known: as a user types it."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import Done, pipeline
from tests.helpers.scripted_server import server_process
from tests.helpers.waiting import eventually
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.load.validity import SURE_PAIRS


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process(log, "first_ms=20", "gap_ms=5", "events=6") as service:
        yield service


def perf(folder: Path, *arguments: str) -> Done:
    return pipeline("bench", *(() if arguments[0] == "analyze" else ("load",)), *arguments, cwd=folder, code=None)


def loaded(folder: Path, *arguments: str) -> dict[str, Any]:
    """The result of a load that went well."""
    done = perf(folder, *arguments, "--max-tokens", "6", "--format", "json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_sweep_of_concurrencies_over_several_processes(service: Service, tmp_path: Path) -> None:
    words = ("--concurrency", "1,4", "--requests", "12", "--processes", "2", "--slo", "ttft=5s,e2e=1ms,ttft_p99=5s")
    result = loaded(tmp_path, "-u", service.grpc, "--model", "ensemble", *words, "--event-file", "e.jsonl")
    assert [level["concurrency"] for level in result["levels"]] == [1, 4]
    for level in result["levels"]:
        assert (level["requests"], level["failures"]) == (12, 0)
        assert level["ttft_ms"]["min"] > 19
        assert level["e2e_ms"]["min"] > 44
        assert [each["missed"] for each in level["objectives"]] == [None]
        assert level["goodput"]["share"] == 0.0, "nothing ends within a millisecond"
        assert level["as"]["vllm"]["ttft_ms"] == level["ttft_ms"]
    assert sorted({record["worker"] for record in result["client"]["levels"]}) == [0, 1]
    records = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    slots = {record["slot"] for record in records if record["type"] == "request" and record["concurrency"] == 4}
    assert slots == {0, 1, 2, 3}
    again = perf(tmp_path, "analyze", "e.jsonl", *words[-2:], "--format", "json")
    assert json.loads(again.stdout) == result


def test_every_load_run_says_on_what_and_under_which_load(service: Service, tmp_path: Path) -> None:
    openai = ("-u", f"http://{service.http}", "--protocol", "openai", "--endpoint-type")
    servers = {
        "grpc": ("-u", service.grpc),
        "http": ("-u", service.http, "--protocol", "http"),
        "chat": (*openai, "chat"),
        "completions": (*openai, "completions"),
    }
    found = {}
    for name, words in servers.items():
        asked = ("--model", "ensemble", "--requests", "6", "--event-file", f"{name}.jsonl")
        found[name] = loaded(tmp_path, *words, *asked)
    assert {result["system"]["server_on"] for result in found.values()} == {"this machine"}
    assert len({result["system"]["cpu"] for result in found.values()}) == 1
    assert {result["workload"]["levels"][0]["requests"] for result in found.values()} == {6}
    assert all(abs(result["measured_s"] - time.time()) < 600 for result in found.values())
    command = ("compare", "chat.jsonl", "completions.jsonl")
    words = "protocol: openai_completions in the baseline, openai_chat here"
    assert words in pipeline(*command, cwd=tmp_path, code=4).stderr
    pipeline(*command, "--allow", "protocol", cwd=tmp_path)


@pytest.mark.seam
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_an_open_loop_against_an_openai_server(service: Service, tmp_path: Path, endpoint: str) -> None:
    words = ("--request-rate", "40", "--requests", "20", "--request-distribution", "constant")
    where = ("-u", f"http://{service.http}", "--protocol", "openai", "--endpoint-type", endpoint, "--model", "ensemble")
    (level,) = (result := loaded(tmp_path, *where, *words, "--event-file", "e.jsonl"))["levels"]
    assert (level["concurrency"], level["request_rate"], level["failures"]) == (None, 40.0, 0)
    records = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    measured = [record for record in records if record["type"] == "request" and record["phase"] == "measured"]
    scheduled, sent = (sorted(record[at] for record in measured) for at in ("scheduled_ns", "sent_ns"))
    assert [after - before for before, after in pairwise(scheduled)] == pytest.approx([25e6] * 19, abs=1e3)
    assert level["schedule"]["achieved_rate"] == pytest.approx(19e9 / (sent[-1] - sent[0]), abs=1e-3)
    assert level["schedule"]["response_ms"]["min"] >= level["e2e_ms"]["min"]
    assert level["finish_reasons"] == {"stop": 20}
    assert result["token_count"]["source"] == "server"
    assert level["output_tokens_per_request"]["mean"] == 6
    # A chat starts with a message that only says who speaks: first content is not first message.
    first_message, first_content = level["as"]["vllm"]["ttft_ms"], level["ttft_ms"]
    assert first_message["mean"] < first_content["mean"] if endpoint == "chat" else first_message == first_content


@pytest.mark.parametrize("interface", ["http", "openai"])
def test_whole_answers(service: Service, tmp_path: Path, interface: str) -> None:
    where = ("-u", service.http, "--protocol", interface, "--model", "ensemble", "--no-streaming")
    (level,) = loaded(tmp_path, *where, "--requests", "4")["levels"]
    assert level["ttft_ms"] == level["e2e_ms"]
    assert level["tpot_ms"]["n"] == 0


def test_a_cache_said_to_be_off_is_tried(service: Service, tmp_path: Path) -> None:
    where = ("-u", service.grpc, "--model", "ensemble")
    words = ("--requests", "4", "--declare", "enable_kv_cache_reuse=false", "--event-file", "e.jsonl")
    result = loaded(tmp_path, *where, *words)
    records = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    probes = [record for record in records if record["type"] == "probe"]
    sent = [(record["pair"], record["send"]) for record in probes]
    assert sent == [(pair, send) for pair in range(len(probes) // 2) for send in (0, 1)]
    assert 2 <= len(probes) < 2 * SURE_PAIRS, "a prompt that takes as long again ends it"
    assert all(record["error"] is None and record["ttft_ms"] > 19 for record in probes)
    untold = [finding for finding in result["findings"] if finding["check"] == "settings"]
    assert [finding["message"] for finding in untold] == [
        "settings not reported by server or engine: enable_kv_cache_reuse"
    ]


def test_what_is_said_of_a_server_is_held_against_it(service: Service, tmp_path: Path) -> None:
    build = {"max_seq_len": 96}
    engine = tmp_path / "engine"
    engine.mkdir()
    config = {"build_config": build, "geometry": {"tie_word_embeddings": True}, "weights_bytes": 10**12}
    (engine / "config.json").write_text(json.dumps(config))
    words = ("--requests", "2", "--max-tokens", "6", "--format", "json", "--engine", "engine")
    declared = ("--declare", "accumulate_tokens=true", "--declare", "max_seq_len=64", "--declare", "decoupled=true")
    done = perf(tmp_path, "-u", service.grpc, "--model", "ensemble", *words, *declared)
    assert done.returncode == 1, done.stderr
    wrong = {
        each["check"]: each["message"] for each in json.loads(done.stdout)["findings"] if each["severity"] == "invalid"
    }
    assert wrong.keys() == {"settings", "roofline"}
    assert (
        "max_seq_len is 96 according to the engine's config.json, 64 according to the command line" in wrong["settings"]
    )
    assert (
        "ensemble: accumulate_tokens is false according to the server, true according to the command line"
        in wrong["settings"]
    )
    assert "reading the 1000000 MB" in wrong["roofline"]


def test_csv_has_every_figure(service: Service, tmp_path: Path) -> None:
    done = perf(tmp_path, "-u", service.grpc, "--model", "ensemble", "--requests", "4", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {"ttft_ms", "output_tokens_per_s", "e2e_ms as vllm"} <= {row["metric"] for row in rows}
    assert all(row["load"] == "concurrency 1" for row in rows)


@pytest.mark.seam
def test_ctrl_c_keeps_what_was_measured(service: Service, tmp_path: Path) -> None:
    words = ("-u", service.grpc, "--model", "ensemble", "--requests", "100000", "--format", "json", "--max-tokens", "6")
    command = [sys.executable, "-m", "trtllm_pipeline", "bench", "load", *words, "--event-file", "e.jsonl"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        events = tmp_path / "e.jsonl"
        assert eventually(lambda: events.exists() and events.read_text().count('"phase": "measured"') > 3)
        process.send_signal(signal.SIGINT)
        result = json.loads(process.communicate(timeout=280)[0])
        assert process.returncode == 130
    assert result["levels"][0]["requests"] >= 3
    assert not result["valid"]
    assert any("interrupted" in finding["message"] for finding in result["findings"])


@pytest.mark.seam
def test_failed_requests_do_not_stop_the_others(service: Service, tmp_path: Path) -> None:
    rows = [
        json.dumps({"input": json.dumps({"error": "refused"} if number == 1 else {"n": number})}) for number in range(8)
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    words = ("--input-data", "p.jsonl", "--requests", "6", "--max-tokens", "6", "--format", "json")
    done = perf(tmp_path, "-u", service.grpc, "--model", "ensemble", *words)
    assert done.returncode == 1
    (level,) = json.loads(done.stdout)["levels"]
    assert (level["requests"], level["failures"], level["ttft_ms"]["n"]) == (6, 1, 5)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("-u 127.0.0.1:9 --model x", 1, "UNAVAILABLE"),
        ("-u 127.0.0.1:9 --protocol http --model x", 1, "Connect call failed"),
        ("-u GRPC --model nope", 2, "'nope' is not found\n  try: --model names the model"),
        ("-u HTTP --protocol openai --model nope", 2, "has no model 'nope'; it has ensemble, plain"),
        ("-u GRPC --model ensemble --extra-inputs top_k:abc", 2, "ensemble is INT32, not 'abc'"),
        ("-u GRPC --model ensemble --metrics-url HTTP", 2, "no Triton metrics there"),
        ("-u GRPC --model ensemble --metrics-url http://:x", 2, "no Triton metrics there"),
    ],
)
def test_what_a_server_does_not_have_is_told_in_words(
    service: Service, tmp_path: Path, words: str, code: int, message: str
) -> None:
    places = {"GRPC": service.grpc, "HTTP": service.http}
    done = perf(tmp_path, *(places.get(word, word) for word in words.split()))
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
