"""How long a load continues, and what it asks, against servers whose behaviour is known."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.helpers import metrics_pages
from tests.helpers.nvml import GIB, Board, nvml
from tests.helpers.scripted_server import Script, config, running
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.load import counters, dcgm
from trtllm_pipeline.measure.load.engine_report import write_dataset
from trtllm_pipeline.measure.load.load import Load
from trtllm_pipeline.measure.load.load_run import LoadPlan, record
from trtllm_pipeline.measure.load.metrics import analyze
from trtllm_pipeline.measure.load.objectives import Objectives
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.requests import read_run
from trtllm_pipeline.measure.load.result import LoadResult
from trtllm_pipeline.measure.load.stopping import LEAST_REPEATS, StopRule
from trtllm_pipeline.measure.load.target import Target
from trtllm_pipeline.measure.load.workloads import CORPUS, Openings, Workload, made
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.show.report.load_tables import to_text

PROMPTS = tuple(Prompt(str(number), f"prompt number {number} of some") for number in range(64))
TOKENS = 4


class Slots:
    """A server with so many places, each of which takes so long for an answer: what comes meanwhile waits."""

    def __init__(self, slots: int, service_s: float, *, cold: int = 0) -> None:
        self._free_at = [0.0] * slots
        self._service_s = service_s
        self._cold = cold
        self.asked: list[Mapping[str, Any]] = []

    def __call__(self, _model: str, values: Mapping[str, Any]) -> Script:
        self.asked.append(values)
        now_s = time.monotonic()
        place = self._free_at.index(min(self._free_at))
        start_s = max(now_s, self._free_at[place])
        slow_s = self._service_s + (0.2 if len(self.asked) <= self._cold else 0.0)
        self._free_at[place] = start_s + slow_s
        first_s = start_s - now_s + slow_s - self._service_s
        events = tuple((first_s + self._service_s * part / TOKENS, " word") for part in range(1, TOKENS + 1))
        return Script(events, counts=(1,) * TOKENS)


def measured(
    respond: Callable[[str, Mapping[str, Any]], Script],
    load: Load,
    folder: Path,
    *,
    prompts: tuple[Prompt, ...] = PROMPTS,
    openings: Openings | None = None,
    tokenizer: Tokenizer | None = None,
    settings: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
    **plan: Any,
) -> tuple[LoadResult, list[dict[str, Any]]]:
    """The result of a load, and its events. `plan` has other fields of the LoadPlan."""
    path = folder / "events.jsonl"
    with running(respond, {"ensemble": config("ensemble", counts=True)}) as (_, raw):
        service = Service(raw["http"], raw["grpc"], None, None, "ensemble", None)
        asked = replace(Target("grpc", service, "ensemble", 20.0, TOKENS), **(target or {}))
        searches = {name: plan.get(name) for name in ("find_rate", "find_concurrency")}
        recorded = {**searches, "exact_length": asked.exact_length, **(settings or {})}
        whole = LoadPlan(target=asked, load=load, settings=recorded, **{"processes": 1, **plan})
        record(whole, prompts, path, lambda _done, _total: None, tokenizer, openings)
    return analyze(path, tokenizer, whole.objectives), records_of(path)


def records_of(events: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in events.read_text().splitlines()]


def bench_load(capsys: pytest.CaptureFixture[str], events: Path, *words: str) -> dict[str, Any]:
    """The JSON that the command prints."""
    main(["bench", "load", *words, "--format", "json", "--event-file", str(events)])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.timing
def test_a_server_that_falls_behind_is_measured_as_saturated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_pipeline.measure.load.load.SATURATED_S", 2.0)
    load = Load(request_rate=(100.0,), requests=400, max_in_flight=12, warmup_requests=4)
    result, records = measured(Slots(4, 0.1), load, tmp_path)
    (level,) = result.levels
    assert level.saturated_rps == pytest.approx(40, rel=0.1), "four places, a tenth of a second each"
    assert level.schedule is not None
    assert level.schedule.most_in_flight == 12
    (unsent,) = [each["requests"] for each in records if each["type"] == "unsent"]
    assert level.schedule.unsent == unsent
    assert unsent + (level.requests or 0) == 400
    (finding,) = [each for each in result.findings if each.check == "saturation"]
    assert "the server fell behind the requested 100" in finding.message
    requests = [each for each in read_run(tmp_path / "events.jsonl", None).requests if each.measured]
    held_ms, lag_ms = [each.held_ms for each in requests], [each.lag_ms for each in requests]
    assert max(held_ms) > 500, "some waited for a place"
    # A machine that stalls sends late too, so no verdict of the gate: what was late is nearly all held.
    assert fmean(lag_ms) - fmean(held_ms) < 0.1 * fmean(held_ms), "which is not the client's lateness"


@pytest.mark.seam
def test_requests_in_flight_are_searched_for_up_to_saturation(tmp_path: Path) -> None:
    load = Load(concurrency=(2,), requests=12, warmup_requests=2)
    search = {"find_concurrency": 0.9, "objectives": Objectives({"e2e": 20_000.0})}
    result, records = measured(Slots(4, 0.2), load, tmp_path, **search)
    assert [level.concurrency for level in result.levels] == [2], "what was tried is no level"
    found = result.highest_concurrency
    assert found is not None
    assert found.missed_at is None
    assert found.saturated_at is not None, "four places: more requests only wait"
    assert found.concurrency in {8, 16, 32}
    assert {"2", "4", "8"} <= found.tried.keys()
    assert {each["concurrency"] for each in records if each["type"] == "probed"} == {
        int(key) for key in found.tried
    } - {2}
    assert f"{found.concurrency} requests in flight meet e2e 20000 ms for 90% of requests" in to_text(result)
    assert LoadResult.read(json.loads(json.dumps(result.to_json()))).highest_concurrency == found


def test_a_level_lasts_as_long_as_was_asked_for(tmp_path: Path) -> None:
    result, records = measured(Slots(4, 0.02), Load(concurrency=(4,), requests=8, interval_s=1.5), tmp_path)
    (level,) = result.levels
    assert (level.requests or 0) > 8, "the time decides, not the number of requests"
    requests = [each for each in records if each["type"] == "request" and each["phase"] == "measured"]
    scheduled = [each["scheduled_ns"] for each in requests]
    assert max(scheduled) - min(scheduled) < 1.5e9
    (repeat,) = level.repeats
    whole = repeat.windows["whole"]
    assert whole is not None
    assert whole.duration_s > 1


def test_a_warm_up_goes_on_while_the_server_is_cold(tmp_path: Path) -> None:
    load = Load(concurrency=(2,), requests=12, warmup_requests=4, until_flat=True)
    _, records = measured(Slots(2, 0.02, cold=14), load, tmp_path)
    warm = [each for each in records if each["type"] == "request" and each["phase"] == "warmup"]
    assert len(warm) >= 16, "no cold request is measured"


@pytest.mark.timing
def test_a_warm_up_of_a_rate_ends_early_too_and_the_rate_is_kept(tmp_path: Path) -> None:
    load = Load(request_rate=(50.0,), requests=40, warmup_requests=16, until_flat=True, distribution="constant")
    result, records = measured(Slots(4, 0.02), load, tmp_path)
    requests = [each for each in records if each["type"] == "request"]
    warm = [each for each in requests if each["phase"] == "warmup"]
    assert 16 <= len(warm) < 40
    due = sorted(each["scheduled_ns"] for each in requests)
    gaps_ms = [(later - earlier) / 1e6 for earlier, later in pairwise(due)]
    assert max(gaps_ms) == pytest.approx(20, abs=0.1)
    assert min(gaps_ms) == pytest.approx(20, abs=0.1)
    assert (result.levels[0].requests, result.levels[0].failures) == (40, 0)


@pytest.mark.timing
def test_processes_end_their_warm_up_together(tmp_path: Path) -> None:
    asked = 0

    def respond(_model: str, values: Mapping[str, Any]) -> Script:
        """Slow, but ever less so, to the prompts of the first of two processes; the other finds the server warm."""
        nonlocal asked
        number = int(str(values["text_input"]).split("number ")[1].split()[0])
        asked += number % 2 == 0
        first_s = max(0.01, 0.3 * 0.9**asked) if number % 2 == 0 else 0.01
        return Script(tuple((first_s + 0.001 * part, " word") for part in range(TOKENS)), counts=(1,) * TOKENS)

    load = Load(request_rate=(50.0,), requests=24, warmup_requests=16, until_flat=True)
    _, records = measured(respond, load, tmp_path, processes=2)
    requests = [each for each in records if each["type"] == "request"]
    warm_ns = [
        [each["sent_ns"] for each in requests if (each["worker"], each["phase"]) == (of, "warmup")] for of in (0, 1)
    ]
    measured_ns = [each["sent_ns"] for each in requests if each["phase"] == "measured"]
    assert len(measured_ns) == 24
    assert 40 < sum(map(len, warm_ns)) < 128, "as long as the slower one takes, but no longer"
    beside = [sent_ns for of in warm_ns for sent_ns in of if sent_ns > min(measured_ns)]
    assert len(beside) <= 2, "what one process measures is not beside what another warms up with"


def test_repeats_go_on_until_intervals_are_narrow(tmp_path: Path) -> None:
    stop = StopRule(precisions={"e2e_p50": 20}, max_repeats=9)  # wide: five repeats are enough on a busy machine
    settings = {"stop_when": dict(stop.precisions)}
    result, _ = measured(Slots(2, 0.02), Load(concurrency=(2,), requests=6), tmp_path, stop=stop, settings=settings)
    assert len(result.levels[0].repeats) == LEAST_REPEATS
    assert result.conditions.level(2, None)["repeats"] == "until e2e_p50 within 20"
    assert "stop_when" not in {each.check for each in result.findings}


@pytest.mark.timing
def test_the_highest_rate_that_keeps_an_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places of 0.03 s: 67/s at most; 200 ms from the schedule are kept for most requests up to somewhat below."""
    monkeypatch.setattr("trtllm_pipeline.measure.load.metrics.LEAST_SEARCHED", 40)
    objectives = Objectives({"e2e": 200.0})
    load = Load(concurrency=(2,), requests=40, warmup_requests=4)
    result, _ = measured(Slots(2, 0.03), load, tmp_path, find_rate=0.9, objectives=objectives)
    found = result.highest_rate
    assert found is not None
    assert found.rate is not None
    assert 20 < found.rate < 120, "a level of forty requests may end before its queue is long"
    assert len(result.levels) == 1, "rates that were tried are no levels"
    shares = [each["share"] for _, each in sorted(found.tried.items(), key=lambda item: float(item[0]))]
    assert shares[0] > shares[-1]
    assert LoadResult.read(json.loads(json.dumps(result.to_json()))).highest_rate == found
    assert [each.check for each in result.findings if each.check == "rate_search"] == ["rate_search"]


def test_a_search_needs_no_other_level(tmp_path: Path) -> None:
    objectives = Objectives({"e2e": 400.0})
    stop = StopRule(budget_s=2)
    result, _ = measured(Slots(2, 0.02), Load(requests=8), tmp_path, find_rate=0.9, objectives=objectives, stop=stop)
    assert result.highest_rate is not None
    assert result.highest_rate.tried
    assert (result.highest_rate.rate, result.highest_rate.low, result.highest_rate.high) == (None, None, None)
    assert result.highest_rate.reason == "8 requests at a rate, 300 are needed"


@pytest.mark.parametrize(
    ("load", "more", "processes"),
    [
        (Load(concurrency=(2, 4), requests=12), {"stop": StopRule(precisions={"e2e_p50": 0.01}, max_repeats=6)}, 2),
        (Load(concurrency=(4,), requests=8, interval_s=1.0), {}, 1),
        (
            Load(concurrency=(2,), requests=12),
            {"find_rate": 0.9, "objectives": Objectives({"e2e": 200.0}), "stop": StopRule(budget_s=3)},
            1,
        ),
    ],
    ids=["stop_when", "interval", "find_rate"],
)
def test_made_up_prompts_are_sent_once(tmp_path: Path, load: Load, more: dict[str, Any], processes: int) -> None:
    tokenizer = trained()
    prompts = made(tokenizer, Workload(input_tokens=24, prompts=12))
    server = Slots(4, 0.01)
    result, records = measured(
        server, load, tmp_path, prompts=prompts, openings=Openings(tokenizer, 0), tokenizer=tokenizer,
        processes=processes, **more,
    )  # fmt: skip
    asked = [str(values["text_input"]) for values in server.asked]
    assert len({*asked}) == len(asked) > len(prompts), "more than were made"
    assert {each.input_tokens for each in read_run(tmp_path / "events.jsonl", tokenizer).requests if each.measured} == {
        24
    }
    assert not [each for each in result.findings if each.check in {"prompt_lengths", "repeated_prompts", "warmup"}]
    assert sum("opening" in each for each in records if each["type"] == "request") == len(asked)


@pytest.mark.seam
def test_turns_follow_the_answers_before_them(tmp_path: Path) -> None:
    talks = tuple(
        Prompt(f"{talk}, turn {turn}", f"talk {talk} " + "and on " * turn, turn=turn)
        for talk in range(6)
        for turn in (1, 2, 3)
    )
    load = Load(concurrency=(3,), requests=18, warmup_requests=0, turn_delay_s=0.05)
    result, records = measured(Slots(4, 0.02), load, tmp_path, prompts=talks)
    requests = {each["prompt"]: each for each in records if each["type"] == "request"}
    assert len(requests) == 18
    for talk in range(6):
        first, second, third = (requests[f"{talk}, turn {turn}"] for turn in (1, 2, 3))
        assert first["slot"] == second["slot"] == third["slot"]
        for before, after in ((first, second), (second, third)):
            assert after["sent_ns"] - before["end_ns"] >= 50e6
    assert "ttft_ms turn 3" in result.levels[0].details.summaries  # type: ignore[union-attr]


def test_the_same_requests_for_trtllm_bench(tmp_path: Path) -> None:
    measured(Slots(4, 0.01), Load(concurrency=(1, 3), requests=10, repeats=2), tmp_path)
    assert write_dataset(tmp_path / "events.jsonl", tmp_path / "dataset.jsonl") == 10
    rows = [json.loads(line) for line in (tmp_path / "dataset.jsonl").read_text().splitlines()]
    assert [row["task_id"] for row in rows] == list(range(10))
    assert {row["prompt"] for row in rows} == {prompt.text for prompt in PROMPTS[:10]}
    assert {row["output_tokens"] for row in rows} == {TOKENS}


def trained() -> Tokenizer:
    """A tokenizer for English text."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train([str(CORPUS)], trainers.BpeTrainer(vocab_size=900, special_tokens=["?"], show_progress=False))
    return tokenizer


@pytest.mark.seam
@pytest.mark.parametrize("exact", [False, True])
def test_a_server_by_its_url_gets_the_load_of_a_cell(
    exact: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts have exactly the requested length. Outputs have one too if the model has an input for it."""
    trained().save(str(tmp_path / "tokenizer.json"))
    model, server = config("ensemble", counts=True), Slots(4, 0.02)
    if exact:
        model.input.add(name="min_tokens", data_type="TYPE_INT32", dims=[1])
    words = ("--input-tokens", "24", "--max-tokens", str(TOKENS), "--declare", "max_batch_size=4")
    events = tmp_path / "events.jsonl"
    with running(server, {"ensemble": model}) as (_, raw):
        where = ("-u", raw["grpc"], "--model", "ensemble", "--tokenizer", str(tmp_path / "tokenizer.json"))
        levels = bench_load(capsys, events, *where, *words)["levels"]
    assert [(each["concurrency"], each["requests"]) for each in levels] == [(1, 32), (4, 32)]
    assert {each["input_tokens_per_request"]["mean"] for each in levels} == {24}
    assert {values.get("min_tokens") for values in server.asked} == {TOKENS if exact else None}
    assert records_of(events)[0]["settings"]["exact_length"] is exact


@pytest.mark.seam
def test_a_trace_is_replayed_at_its_own_times_and_at_a_concurrency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(1000, 530, 2, [7, 8]), (1100, 530, 3, [7, 9]), (1100, 40, 1, [5]), (1400, 530, 2, [7, 8])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace, events = tmp_path / "trace.jsonl", tmp_path / "events.jsonl"
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    trained().save(str(tmp_path / "tokenizer.json"))
    model, server = config("ensemble", counts=True), Slots(4, 0.02)
    model.input.add(name="min_tokens", data_type="TYPE_INT32", dims=[1])
    words = ("--input-data", str(trace), "--concurrency", "2", "--trace-speed", "1,2", "--warmup-requests", "2")
    with running(server, {"ensemble": model}) as (_, raw):
        where = ("-u", raw["grpc"], "--model", "ensemble", "--tokenizer", str(tmp_path / "tokenizer.json"))
        result = bench_load(capsys, events, *where, *words)
    closed, *replayed = result["levels"]
    assert (closed["concurrency"], closed["requests"]) == (2, 32)
    assert [(level["request_rate"], level["requests"]) for level in replayed] == [(7.5, 4), (15.0, 4)]
    assert [level["trace_speed"] for level in result["workload"]["levels"]] == [None, 1, 2]
    for level in replayed:
        assert level["input_tokens_per_request"]["mean"] == 407.5, "the trace's own lengths"
    sent = [each for each in records_of(events) if each["type"] == "request" and each["phase"] == "measured"]
    for rate, speed in ((7.5, 1), (15.0, 2)):
        due = {each["prompt"]: each["scheduled_ns"] for each in sent if each["request_rate"] == rate}
        offsets_s = [(due[name] - due["1"]) / 1e9 for name in "1234"]
        assert offsets_s == pytest.approx([at / speed for at in (0, 0.1, 0.1, 0.4)], abs=1e-6)
    requests = read_run(events, trained()).requests
    assert {
        (each.record["prompt"], each.input_tokens, each.record["max_tokens"]) for each in requests if each.measured
    } == {(str(number), tokens, output) for number, (_, tokens, output, _) in enumerate(rows, 1)}
    assert {int(values["min_tokens"]) for values in server.asked} == {1, 2, 3}, "exactly the recorded lengths"
    texts: dict[Any, dict[str, str]] = {}
    for each in requests:
        if each.measured:
            texts.setdefault(each.record.get("request_rate"), {})[each.record["prompt"]] = each.prompt
    for text in texts.values():
        block = " ".join(text["1"].split()[:200])
        assert [text[name].startswith(block) for name in "1234"] == [True, True, False, True]
        assert text["1"] == text["4"] != text["2"]
    assert len({text for level in texts.values() for text in level.values()}) == 9, (
        "no level finds another one's blocks"
    )


@pytest.mark.seam
def test_a_recorded_conversation_is_sent_turn_by_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [
        ("human", "Where is it?"),
        ("gpt", "Here."),
        ("human", "And now?"),
        ("gpt", "A long way behind the other one."),
    ]
    entries = [{"from": speaker, "value": words} for speaker, words in talk]
    data, events = tmp_path / "sharegpt.json", tmp_path / "events.jsonl"
    data.write_text(json.dumps([{"id": name, "conversations": entries} for name in ("a", "b", "c")]))
    trained().save(str(tmp_path / "tokenizer.json"))
    with running(Slots(4, 0.02)) as (_, raw):
        where = f"-u http://{raw['http']} --protocol openai --model ensemble --input-data {data}".split()
        words = (
            f"--tokenizer {tmp_path}/tokenizer.json --turns 4 --max-tokens 9 --requests 6 --warmup-requests 0".split()
        )
        (level,) = bench_load(capsys, events, *where, *words)["levels"]
    assert level["failures"] == 0
    sent = {each["prompt"]: each for each in records_of(events) if each["type"] == "request"}
    assert [*sent] == [f"{name}, turn {turn}" for name in "123" for turn in (1, 2)]
    tokens = [len(trained().encode(words).ids) for words in ("Here.", "A long way behind the other one.")]
    for name in "123":
        first, second = (sent[f"{name}, turn {turn}"] for turn in (1, 2))
        assert second["sent_ns"] >= first["end_ns"], "a turn follows the answer before it"
        assert [first["max_tokens"], second["max_tokens"]] == [tokens[0], min(9, tokens[1])]


@pytest.mark.seam
@pytest.mark.parametrize("load", [Load(concurrency=(2,), warmup_requests=2), Load(request_rate=(50.0,))])
def test_a_level_starts_no_request_after_its_time_limit(load: Load, tmp_path: Path) -> None:
    load = replace(load, requests=400, budget_s=1.5)
    result, records = measured(Slots(2, 0.05), load, tmp_path)
    (level,) = result.levels
    assert level.requests
    (left_out,) = [each["requests"] for each in records if each["type"] == "over_budget"]
    assert level.requests + left_out == 400
    assert not level.failures, "requests in flight ended normally"
    (finding,) = [each for each in result.findings if each.check == "level_budget"]
    assert finding.message == f"the time limit of the level ended it after {level.requests} of 400 requests"


def test_tokens_per_joule_of_a_gpu_whose_power_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml([Board("GPU-1", milliwatts=100_000, free=71 * GIB)]))
    monkeypatch.setattr(counters, "SAMPLE_S", 0.02)
    result, _ = measured(Slots(4, 0.05), Load(concurrency=(4,), requests=60, repeats=2), tmp_path)
    (level,) = result.levels
    assert level.gpu_use is not None
    assert (level.gpu_use.power_w, level.gpu_use.memory_bytes) == (100.0, 9 << 30)
    rates = [repeat.windows["whole"].output_tokens_per_s for repeat in level.repeats]  # type: ignore[union-attr]
    for repeat, rate in zip(level.repeats, rates, strict=True):
        assert repeat.tokens_per_joule == pytest.approx(rate / 100, rel=0.001), "tokens/s over watts"
    again = LoadResult.read(json.loads(json.dumps(result.to_json()))).levels[0]
    assert (again.tokens_per_joule, again.gpu_use) == (level.tokens_per_joule, level.gpu_use)


@pytest.mark.seam
@pytest.mark.parametrize(("often", "resolved"), [(True, True), (False, False)])
def test_gpus_of_another_machine_are_those_of_its_exporter(
    often: bool, resolved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that collects at each look, or never again."""
    monkeypatch.setattr(dcgm, "SAMPLE_S", 0.01)
    events, steps = tmp_path / "events.jsonl", count(1)
    answered = threading.Event()

    def respond(_model: str, _values: Mapping[str, Any]) -> Script:
        answered.wait(60 if often else 0)  # until the exporter has been read often enough
        return Script.of("four words of text")

    def page() -> str:
        step = next(steps)
        if step > 8:
            answered.set()
        return metrics_pages.dcgm(step if often else 1)

    with running(respond) as (_, raw), metrics_pages.served({"/metrics": page}) as url:
        where = ("-u", raw["grpc"], "--model", "ensemble", "--dcgm-url", f"http://{url}/metrics,127.0.0.1:1")
        result = bench_load(capsys, events, *where, "--requests", "4")
    (level,) = result["levels"]
    use = level["gpu_use"]
    assert (use["devices"], use["power_w"], use["memory_bytes"]) == (1, 350.5, 71_680 * 1024**2)
    assert (use["sm_clock_mhz"], use["busy_percent"], use["temperature_c"]) == (1755.0, 97.0, 58.0)
    messages = [each["message"] for each in result["findings"] if each["check"] == "exported_gpus"]
    assert "GPUs: 127.0.0.1:1: cannot be read" in messages[0]
    assert len(messages) == (1 if resolved else 2)
    (again,) = analyze(events, None).levels
    assert (use["energy_j"] is not None, again.tokens_per_joule is not None) == (resolved, resolved)
    if not resolved:
        assert "0 new readings of the DCGM exporter in a repeat, too few for its energy" in messages[1]
    assert not [each for each in result["findings"] if each["severity"] == "invalid"]


def test_the_first_text_is_the_first_in_any_known_field_and_others_are_noted(tmp_path: Path) -> None:
    """Three texts of reasoning, in a field that is known or not, before one of the answer."""
    chats = (Prompt("1", "Why?", messages=({"role": "user", "content": "Why?"},)),)
    found = {}
    for name in ("thinking", "inner_voice"):
        events = tuple((0.01 * place, " word") for place in range(TOKENS))
        script = Script(events, counts=(1,) * TOKENS, reasoning=3, reasoning_as=name)
        (tmp_path / name).mkdir()
        _, records = measured(
            lambda _model, _values, script=script: script,  # type: ignore[misc]
            Load(concurrency=(1,), requests=2, warmup_requests=0),
            tmp_path / name,
            prompts=chats,
            target={"protocol": "openai_chat"},
        )
        found[name] = next(each for each in records if each["type"] == "request")
    read, hidden = found.values()
    assert [event[3:] for event in read["events"]] == [[True], [True], [True], []]
    assert (read["silent"], read["unread"]) == (0, None)
    assert (len(hidden["events"]), hidden["silent"], hidden["unread"]) == (1, 3, "inner_voice")
    assert hidden["silent_ns"] < hidden["events"][0][0]


def test_what_a_row_asks_for_is_sent_and_a_call_of_a_tool_is_an_end(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}]
    messages = ({"role": "user", "content": "list files"},)
    request = {"tools": tools, "tool_choice": "auto", "temperature": 0.5}
    asked: list[Mapping[str, Any]] = []

    def respond(_model: str, values: Mapping[str, Any]) -> Script:
        asked.append(values)
        events = tuple((0.01 * place, " word") for place in range(TOKENS))
        return Script(events, counts=(1,) * TOKENS, finish_reason="tool_calls")

    result, _ = measured(
        respond,
        Load(concurrency=(1,), requests=2, warmup_requests=0),
        tmp_path,
        prompts=(Prompt("1", "list files", messages=messages, request=request),),
        target={"protocol": "openai_chat"},
    )
    assert {name: asked[0][name] for name in request} == request
    assert not [finding for finding in result.findings if finding.check == "stop_reasons"]
