"""Names of options that other tools have for the same thing, and what is wrong with values."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.unit.conftest import Refused
from tests.unit.measure.load.test_perf_metrics import request, write
from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.show.cli import stage_options
from trtllm_pipeline.show.cli.app import build, main
from trtllm_pipeline.tensorrt.stage.params import PerfParams

SERVER = ("-u", "localhost:1", "--model", "m")


def parsed(*words: str) -> dict[str, Any]:
    command: Any = get_command(build(["bench", "load"]))
    for word in ("bench", "load"):
        command = command.commands[word]
    return dict(command.make_context("load", [*SERVER, *words]).params)


def asked(*words: str) -> PerfParams:
    """The parameters of perf that were typed."""
    names = {each.name for each in fields(PerfParams)}
    typed = {name: value for name, value in parsed(*words).items() if name in names and value not in (None, [], ())}
    return stage_options.read_class(PerfParams, {name: value for name, value in typed.items() if name != "protocol"})


@pytest.mark.parametrize(
    ("own", "value", "others"),
    [
        ("--requests", "7", ("--request-count", "--num-requests")),
        ("--warmup-requests", "0", ("--warmup-request-count", "--num-warmup-requests")),
        ("--max-tokens", "9", ("--output-tokens-mean", "--osl")),
        ("--input-tokens", "512", ("--synthetic-input-tokens-mean", "--isl")),
        ("--input-tokens-stddev", "3", ("--synthetic-input-tokens-stddev", "--isl-stddev")),
        ("--output-tokens-stddev", "3", ("--osl-stddev",)),
        ("--measurement-interval-ms", "3", ("--measurement-interval",)),
        ("--request-distribution", "gamma", ("--arrival-pattern",)),
        ("--burstiness", "0.5", ("--arrival-smoothness",)),
        ("--request-timeout-s", "12.5", ("--request-timeout-seconds",)),
        ("--event-file", "e.jsonl", ("--profile-export-file",)),
        ("--tokenizer", "model", ("--tokenizer-path",)),
        ("--protocol", "openai", ("-i",)),
        ("--concurrency", "6:8:1", ("--concurrency-range",)),
    ],
)
def test_other_tools_names_mean_the_same(own: str, value: str, others: tuple[str, ...]) -> None:
    meant = parsed(own, value)
    assert meant != parsed()
    for other in others:
        assert parsed(other, value) == meant


@pytest.mark.parametrize(
    "words",
    [
        ("compare",),
        ("bench", "analyze", "e.jsonl"),
        ("eval", "answers", *SERVER, "--input-data", "rows.jsonl"),
        ("eval", "lm-eval", *SERVER, "--tasks", "arc_easy"),
    ],
)
def test_a_tokenizer_has_its_other_name_everywhere(words: tuple[str, ...]) -> None:
    names = words[: 1 if words == ("compare",) else 2]
    name, rest = names[-1], words[len(names) :]
    command: Any = get_command(build([*names]))
    for each in names:
        command = command.commands[each]
    for option in ("--tokenizer", "--tokenizer-path"):
        assert str(command.make_context(name, [*rest, option, "model"]).params["tokenizer"]) == "model"


@pytest.mark.parametrize(
    ("text", "levels"),
    [("1,4", (1, 4)), ("6:8:1", (6, 7, 8)), ("2:9:3", (2, 5, 8)), ("3:4", (3, 4)), ("1,4:8:4", (1, 4, 8))],
)
def test_levels_may_be_a_range(text: str, levels: tuple[int, ...]) -> None:
    assert asked("--concurrency", text).concurrency == levels


@pytest.mark.parametrize("text", ["8:6:1", "0:4:1", "1:4:0", "1:2:3:4", ":", "1:x", "1:-2", "1:999:1", "1:9999999999"])
def test_what_is_no_range_is_refused_in_words(text: str) -> None:
    with pytest.raises(
        UsageError, match="--concurrency: expected FIRST:LAST:STEP with at most 100 levels, such as 2:8:2"
    ):
        asked("--concurrency", text)


def test_names_that_are_the_same_everywhere() -> None:
    words = ("--concurrency", "1,4", "--endpoint-type", "chat", "--streaming", "--extra-inputs", "ignore_eos:true")
    found = parsed(*words, "--num-prompts", "8", "--random-seed", "1", "--tokenizer", "t", "--request-rate", "5")
    assert (found["concurrency"], found["extra_inputs"], found["num_prompts"]) == ("1,4", ["ignore_eos:true"], "8")
    assert asked(*words, "--extra-inputs", "top_k=4").extra_inputs == {"ignore_eos": True, "top_k": 4}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--concurrency 1,x", "--concurrency: 'x' is not a whole number"),
        ("--concurrency 1_0", "--concurrency: '1_0' is not a whole number"),
        ("--concurrency 4,4", "--concurrency 4 is given twice"),
        ("--concurrency 1,0", "should be greater than or equal to 1, not 0"),
        ("--request-rate nan", "--request-rate[0] should be a finite number"),
        ("--requests 0", "should be greater than or equal to 1"),
        ("--temperature=-1", "should be greater than or equal to 0, not -1"),
        ("--measurement-interval 0", "--measurement-interval-ms should be greater than 0"),
        ("--turn-delay-s inf", "--turn-delay-s: 'inf' is not a duration"),
        ("--slo ttft_p42=300ms", "--slo: 'ttft_p42=300ms' is not an objective"),
        ("--slo ttft=300ms,rps=4ms", "--slo: 'rps=4ms' is not an objective"),
        ("--slo tpot=9ms --no-streaming", "without streaming there is no TPOT"),
        (
            "--slo ttft=300ms --find-rate 0.9 --requests 64",
            "find_rate needs requests: 300 or more, better 1500, or a measurement_interval_ms: 64 requests end before",
        ),
        (
            "--find-rate 0.9",
            "--find-rate needs a limit on each request in --slo\n  try: give a limit on ttft, tpot or e2e, such as --slo ttft=300ms",
        ),
        (
            "--find-concurrency 0.9 --slo ttft_p99=300ms",
            "--find-concurrency needs a limit on each request in --slo; ttft_p99 limits a whole level\n  try: give",
        ),
        ("--extra-inputs top_k", "--extra-inputs: 'top_k' is not of the form NAME=VALUE"),
        ("--declare tp", "'tp': expected --declare NAME=VALUE"),
        ("--declare tp=1 --declare tp=2", "'tp=2': tp is given twice"),
        ("--isl 64 --input-data builtin:prompts", "need a tokenizer to count tokens\n  try: give --tokenizer DIR"),
        ("--workload isl_osl", "the input length of prompts is unknown"),
        ("--engine nowhere", "--engine nowhere: no such directory"),
        ("--tokenizer nowhere", "--tokenizer nowhere"),
        ("--input-data empty.jsonl", "no prompt in this file"),
        ("--event-file empty.jsonl", "already exists"),
        ("-u localhost/v2", "/v2: a Triton server has no path"),
        ("-u https://localhost:1", "grpc over https is not supported"),
        ("-m quickstart", "no such option: -m\n  try: --model NAME"),
        ("--concurency 4", "no such option: --concurency"),
    ],
)
def test_mistakes(words: str, told: str, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    assert told in refused("bench", "load", *SERVER, "--protocol", "grpc", *words.split())


@pytest.mark.parametrize(
    ("content", "code", "told"),
    [
        (None, 2, "no such file"),
        (b"\xff", 1, "is not an event file of a load run"),
        (b'{"type": "header"}', 1, "e.jsonl:1: not a record of a load run: schema: field required"),
    ],
)
def test_what_is_no_event_file_is_told_in_words(
    content: bytes | None, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "e.jsonl").write_bytes(content)
    assert main(["bench", "analyze", str(tmp_path / "e.jsonl")]) == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"), [("events.jsonl", "already exists"), ("no/d.jsonl", "there is no directory")]
)
def test_a_data_set_is_a_new_file(name: str, told: str, tmp_path: Path, refused: Refused) -> None:
    events = write(tmp_path / "events.jsonl", request(0, [(10, "a"), (20, " b")]))
    assert f"--trtllm-dataset {tmp_path / name}: {told}" in refused(
        "bench", "analyze", str(events), "--trtllm-dataset", str(tmp_path / name)
    )


@pytest.mark.parametrize(
    ("command", "option", "most"),
    [
        *(("bench load", f"--{name}", 1_000_000) for name in ("requests", "warmup-requests", "num-prompts")),
        *(("bench load", f"--{name}", 10_000_000) for name in ("input-tokens", "input-tokens-stddev", "max-tokens")),
        ("bench load", "--concurrency", 65_536),
        ("bench load", "--request-rate", 1_000_000),
        ("bench load", "--repeats", 1_000),
        ("bench load", "--processes", 1_024),
        *((f"eval {name}", "--concurrency", 65_536) for name in ("answers", "lm-eval")),
        ("eval answers", "--max-tokens", 10_000_000),
    ],
)
@pytest.mark.parametrize("more", [1, 10**20])
def test_counts_have_a_limit_that_is_told(
    command: str, option: str, most: int, more: int, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(*_given: object, **_named: object) -> None:
        raise AssertionError("what was asked for was about to begin")

    monkeypatch.setattr("trtllm_pipeline.measure.load.load_run.run", runs)
    needed = {
        "eval answers": (*SERVER, "--input-data", "builtin:accuracy"),
        "eval lm-eval": (*SERVER, "--tasks", "t", "--dry-run"),
        "bench load": (*SERVER, "--protocol", "grpc"),
    }
    told = refused(*command.split(), *needed.get(command, ()), option, str(most + more))
    assert option in told
    assert f"less than or equal to {most}" in told or f"up to {most}, got" in told
