"""Each gate on two runs that hardly differ: in one it has to speak, in the other it must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.unit.measure.load.test_perf_metrics import ALIVE, Words, analyze, client, due, moved, request, write
from tests.unit.measure.load.test_validity import answer, at_once, late, probes, reported, roofline, silent
from trtllm_pipeline.measure.load.counters import LEAST_READINGS
from trtllm_pipeline.measure.load.validity import ENOUGH_REQUESTS, GATES


@dataclass(frozen=True)
class Run:
    """An event file."""

    records: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    server_at_end: dict[str, Any] = field(default_factory=lambda: ALIVE)
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts by id, in addition to those of `write`."""
    made_for: int | None = None
    """Length that the prompt `p`, of four tokens, was made for."""

    def findings(self, folder: Path, gate: str) -> list[dict[str, Any]]:
        texts = [{"type": "prompt", "id": id_, "text": text} for id_, text in self.prompts.items()]
        server = ({**ALIVE, "at": "start"}, {**self.server_at_end, "at": "end"})
        prompt = {} if self.made_for is None else {"input_tokens": self.made_for}
        path = write(folder / "e", *texts, *self.records, server=server, prompt=prompt, settings=self.settings)
        return [each for each in analyze(path, Words())["findings"] if each["check"] == gate]


def answers(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [moved(answer(0, **changes), 100 * number) for number in range(count)]


def failing(failed: int, of: int) -> Run:
    return Run(
        [*answers(of - failed), *(moved(request(0, [], error="boom"), 100 * at) for at in range(of - failed, of))]
    )


def saying(text: str, prompt: str = "three word prompt") -> Run:
    return Run([request(0, [(10, text)], prompt="q")], prompts={"q": prompt})


def scheduled(late_ms: float) -> Run:
    times = [(number * 100, number * 100 + late_ms) for number in range(4)]
    return Run([due(at, sent, [(sent + 20, " a")]) for at, sent in times])


def queued(model: str, ms: float = 9.0, *, streamed: bool = True) -> Run:
    """A request of 40 ms, or of 30 ms in one response, with its wait in front of a model."""
    counts = {model: {"requests": 1, "queue_us": ms * 1e3}}
    record = answer(0) if streamed else at_once()
    return Run([record, {"type": "triton", "concurrency": 1, "repeat": 0, "models": counts}])


def tried(requests: int) -> Run:
    """A rate of a search, with four more requests of the warm-up."""
    rate = {"concurrency": None, "request_rate": 100.0}
    probed = {"type": "probed", **rate, "repeat": 0}
    warm = [moved(answer(0, phase="warmup", prompt="w", **rate), 100 * number) for number in range(4)]
    return Run([probed, *warm, *(moved(answer(0, **rate), 100 * number) for number in range(4, 4 + requests))])


def held(waiting: int, of: int) -> Run:
    """Requests of an open loop, of which some waited for a place."""
    rate = {"concurrency": None, "request_rate": 10.0}
    return Run([moved(answer(0, **rate), 100 * at) | {"held_ns": int(at < waiting)} for at in range(of)])


def built_for(input_tokens: int, output_tokens: int) -> Run:
    """A prompt of 4 tokens and an output of 3, on a server built for these lengths."""
    declared = {"max_input_len": input_tokens, "max_seq_len": input_tokens + output_tokens}
    return Run([answer(0)], {"declared": declared})


def ended_early(max_tokens: int, made_for: int | None = 4, **settings: bool) -> Run:
    """An output of 3 tokens to a prompt that was made for a length, or to one of a file."""
    return Run([answer(0, finish_reason="stop") | {"max_tokens": max_tokens}], settings, made_for=made_for)


def repeats(latencies_ms: list[int]) -> Run:
    records = [moved(request(0, [(ms, " a")], repeat=at), 200 * at) for at, ms in enumerate(latencies_ms)]
    return Run(records, settings={"stop_when": {"e2e_p50": 0.03}})


def exported(readings: int, *problems: str) -> Run:
    """So many new readings of a GPU by its exporter, after the first one."""
    samples = [[at, 300.0, 5.0, 1755.0, 97.0, 58.0, float(at)] for at in range(readings + 1)]
    device = {"name": "G", "uuid": "u", "exporter": "here:9400", "samples": samples}
    gpu = {"type": "gpu", "concurrency": 1, "repeat": 0, "devices": [device], "problems": [*problems]}
    return Run([answer(0), gpu])


def sent(*texts: str, phases: str = "") -> Run:
    """Prompts one after another. A `w` in `phases` is a warmup request."""
    phase = {"w": "warmup", "m": "measured"}
    names = [phase[each] for each in phases or "m" * len(texts)]
    records = [moved(answer(0, prompt=f"id {at}", phase=name), 100 * at) for at, name in enumerate(names)]
    return Run(records, prompts={f"id {at}": text for at, text in enumerate(texts)})


def paused(pause_ms: float, repeats: int = 1, **changes: Any) -> Run:
    """Each repeat has 20 responses, one after another, with a first token after 20 ms. In the first repeat, one takes longer."""
    slow = answer(pause_ms, **changes) | {"scheduled_ns": 0, "sent_ns": 0}
    records = []
    for repeat in range(repeats):
        for number in range(20):
            waited_ms = pause_ms if repeat == 0 and number > 10 else 0
            record = slow if (repeat, number) == (0, 10) else answer(0)
            records.append(moved(record, 2000 * repeat + 41 * number + waited_ms) | {"repeat": repeat})
    return Run(records, prompts={"long": "a prompt of twice as many words"})


CHECK: Final = {"setting": "max_batch_size", "asked": 8, "asked_by": "the matrix", "got_from": "the server"}
BOTH_WAYS: Final[dict[str, tuple[Run, Run]]] = {
    "server": (Run([answer(0)], server_at_end={**ALIVE, "since": 10}), Run([answer(0)])),
    "beside": (Run([answer(0)], {"exclusive": "none"}), Run([answer(0)], {"exclusive": "machine"})),
    "adapters": (
        Run([answer(0)], {"lora_names": ["sql", "chat"], "lora": None}),
        Run([answer(0)], {"lora_names": ["sql"], "lora": None}),
    ),
    "settings": (
        Run([answer(0), {"type": "settings", "at": "end", "checks": [{**CHECK, "got": 4}]}]),
        Run([answer(0), {"type": "settings", "at": "end", "checks": [{**CHECK, "got": 8}]}]),
    ),
    "client_cpu": (Run([answer(0), client(cpu=0.81)]), Run([answer(0), client(cpu=0.79)])),
    "client_lag": (Run([answer(0), client(lag_ms=(6,) * 100)]), Run([answer(0), client(lag_ms=(4,) * 100)])),
    "schedule": (scheduled(1.1), scheduled(0.9)),  # 5% of a TTFT of 20 ms
    "failures": (failing(1, 4), failing(0, 4)),
    "empty_answers": (Run([*answers(2), moved(silent(), 200)]), Run(answers(3))),
    "prompt_echo": (saying(" three word prompt and more"), saying(" three words, then more")),
    "stop_reasons": (Run([answer(0, 2, finish_reason="length")]), Run([answer(0, 2, finish_reason="stop")])),
    "token_count": (
        Run([answer(0) | {"max_tokens": 2}]),
        Run([answer(0) | {"max_tokens": 3}]),
    ),
    "unseen_text": (Run([late(50, 4)]), Run([late(50, 3)])),
    "texts": (Run([reported(20, 39)]), Run([reported(20, 38)])),
    "one_response": (Run([at_once()]), Run([answer(0)])),
    "usage": (
        Run([answer(0, input_tokens=4, total_tokens=8)]),
        Run([answer(0, input_tokens=4, total_tokens=7)]),
    ),
    "exported_gpus": (exported(LEAST_READINGS - 1), exported(LEAST_READINGS)),
    "rows_left_out": (
        Run([answer(0)], {"rows_left_out": "p.jsonl: rows left out: 1 of 2"}),
        Run([answer(0)], {"rows_left_out": ""}),
    ),
    "server_queue": (queued("preprocessing", 4.5), queued("preprocessing", 3.5)),
    "roofline": (
        Run([answer(0, 9) | {"max_tokens": 9}, roofline(10.1)]),
        Run([answer(0, 9) | {"max_tokens": 9}, roofline(9.9)]),
    ),
    "kv_cache_reuse": (
        Run([answer(0), *probes(*[(40, 5), (41, 6)] * 8)]),
        Run([answer(0), *probes(*[(40, 39), (41, 40)] * 8)]),
    ),
    "pause": (paused(81), paused(79)),  # five times as long
    "prompt_lengths": (Run([answer(0)], made_for=5), Run([answer(0)], made_for=4)),
    "far_lengths": (built_for(9, 6), built_for(8, 6)),
    "level_budget": (
        Run([answer(0), {"type": "over_budget", "concurrency": 1, "repeat": 0, "requests": 3}]),
        Run([answer(0)]),
    ),
    "saturation": (held(6, 10), held(5, 10)),
    "rate_search": (tried(ENOUGH_REQUESTS - 1), tried(ENOUGH_REQUESTS)),
    "stop_when": (repeats([100, 150, 100, 150, 100]), repeats([100, 101, 100, 101, 100])),
    "warmup": (sent("the same", "the same", phases="wm"), sent("the same", "not the same", phases="wm")),
    "repeated_prompts": (sent("one", "another", "one"), sent("one", "another", "one more")),
}


@pytest.mark.parametrize("gate", [gate.id for gate in GATES])
def test_a_gate_speaks_and_is_silent(tmp_path: Path, gate: str) -> None:
    speaking, silence = BOTH_WAYS[gate]
    assert speaking.findings(tmp_path, gate)
    assert silence.findings(tmp_path, gate) == []


@pytest.mark.parametrize(
    ("gate", "run", "severity"),
    [
        ("beside", lambda: BOTH_WAYS["beside"][0], "warning"),
        ("beside", lambda: Run([answer(0)], {"exclusive": "gpu"}), "info"),
        ("adapters", lambda: BOTH_WAYS["adapters"][0], "info"),
        ("rows_left_out", lambda: BOTH_WAYS["rows_left_out"][0], "warning"),
        ("rows_left_out", lambda: Run([answer(0)], {"unsent_of_trace": "t.jsonl: the last 9 requests"}), "info"),
        ("exported_gpus", lambda: exported(LEAST_READINGS, "here:9400: cannot be read"), "warning"),
        ("far_lengths", lambda: BOTH_WAYS["far_lengths"][0], "warning"),
        ("far_lengths", lambda: ended_early(7), "warning"),
        ("warmup", lambda: BOTH_WAYS["warmup"][0], "warning"),
        ("schedule", lambda: scheduled(2), "warning"),
        ("schedule", lambda: scheduled(60), "invalid"),
        ("failures", lambda: failing(1, 100), "warning"),
        ("failures", lambda: failing(2, 100), "invalid"),
        ("client_cpu", lambda: Run([answer(0), client(cpu=0.81, wall_ms=900)]), "warning"),
        ("prompt_echo", lambda: saying(" Hello, how can I help?", prompt="Hello"), "warning"),
        ("prompt_echo", lambda: saying(" say it again: yes", prompt="say it again"), "invalid"),
    ],
)
def test_where_a_gate_turns(tmp_path: Path, gate: str, run: Callable[[], Run], severity: str) -> None:
    assert [each["severity"] for each in run().findings(tmp_path, gate)] == [severity]


@pytest.mark.parametrize(
    ("run", "times"),
    [
        (paused(81, repeats=2), 1),
        (paused(81, repeats=3), 0),  # medians leave it out
        (paused(170, prompt="long"), 0),
        (paused(190, prompt="long"), 1),
        (Run([moved(answer(0), 500 * number) for number in range(20)]), 0),  # nothing was in flight
    ],
)
def test_a_pause_is_more_than_a_long_prompt_or_no_request(tmp_path: Path, run: Run, times: int) -> None:
    assert len(run.findings(tmp_path, "pause")) == times


def test_requests_sent_during_a_pause_do_not_end_it(tmp_path: Path) -> None:
    rate = {"concurrency": None, "request_rate": 20.0}
    early = [moved(answer(0, **rate), 50 * number) for number in range(20)]
    late = [moved(answer(400 - 40 * number, **rate), 1000 + 40 * number) for number in range(10)]
    waiting = [
        record | {"slot": number, **dict.fromkeys(("scheduled_ns", "sent_ns"), (1000 + 40 * number) * 1_000_000)}
        for number, record in enumerate(late)
    ]
    after = [moved(answer(0, **rate), 1450 + 50 * number) for number in range(20)]
    (finding,) = Run([*early, *waiting, *after]).findings(tmp_path, "pause")
    assert "for 0.42 s" in finding["message"]


@pytest.mark.parametrize(("gate", "changes"), [("client_lag", "lag_ms"), ("client_cpu", "cpu")])
def test_a_slow_client_is_named_once_for_all_repeats(tmp_path: Path, gate: str, changes: str) -> None:
    """With the worst value. One warning for each repeat would not say which."""
    values: list[Any] = [(6,) * 100, (4,) * 100, (9,) * 100] if changes == "lag_ms" else [0.9, 0.5, 0.95]
    slow = [client(**{changes: value}) | {"repeat": at} for at, value in enumerate(values)]
    records = [moved(answer(0, repeat=at), 100 * at) for at in range(3)]
    (finding,) = Run([*records, *slow]).findings(tmp_path, gate)
    assert ("9.0 ms" if changes == "lag_ms" else "95%") in finding["message"]
    assert finding["message"].endswith("; in 2 of 3 repeats")
    (finding,) = Run([records[0], slow[0]]).findings(tmp_path, gate)
    assert "repeats" not in finding["message"]


CLOSED: Final = "the connection closed in the middle of the response: after"


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (["boom", "boom", "bang"], "3 of 3 requests failed, 2 of them with: boom"),
        (
            [f"{CLOSED} 1636 bytes of the body", f"{CLOSED} 12 bytes of the body", "boom"],
            f"3 of 3 requests failed, 2 of them with errors such as: {CLOSED} 1636 bytes of the body",
        ),
        (
            [
                "not an HTTP response: b'one'",
                "not an HTTP response: b'two'",
                "request req_1f of user u is over its limit",
            ],
            "3 of 3 requests failed, 2 of them with errors such as: not an HTTP response: b'one'",
        ),
        (["HTTP status 429: no", "HTTP status 500: no"], "2 of 2 requests failed, 1 of them with: HTTP status 429: no"),
    ],
)
def test_errors_of_one_cause_are_counted_together(tmp_path: Path, errors: list[str], words: str) -> None:
    records = [moved(request(0, [], error=error), 100 * at) for at, error in enumerate(errors)]
    (finding,) = Run(records).findings(tmp_path, "failures")
    assert finding["message"] == words


@pytest.mark.parametrize("run", [ended_early(6), ended_early(99, made_for=None), ended_early(99, exact_length=True)])
def test_short_outputs_are_natural_for_real_prompts(tmp_path: Path, run: Run) -> None:
    """Outputs of a fixed length are the subject of another gate."""
    assert run.findings(tmp_path, "far_lengths") == []


@pytest.mark.parametrize(
    ("run", "waited", "advice"),
    [
        (queued("preprocessing"), "requests waited 9.0 ms", "raise settings.repository.preprocessing_instances"),
        (queued("postprocessing", streamed=False), "requests waited 9.0 ms", "postprocessing_instances"),
        (queued("postprocessing"), "the chunks of a response waited 9.0 ms in total", "would reorder them"),
    ],
)
def test_a_queue_is_told_with_what_helps(tmp_path: Path, run: Run, waited: str, advice: str) -> None:
    """Chunks of a response wait at the same time, so the sum of their waits is not the wait of a request."""
    (finding,) = run.findings(tmp_path, "server_queue")
    assert finding["severity"] == "warning"
    assert finding["message"].startswith(waited)
    assert finding["message"].endswith(advice)


def test_requests_may_wait_for_a_place_in_the_batch(tmp_path: Path) -> None:
    assert queued("tensorrt_llm", 50.0).findings(tmp_path, "server_queue") == []


@pytest.mark.parametrize(("echoes", "severity"), [(0, None), (1, "warning"), (2, "invalid"), (3, "invalid")])
def test_a_server_repeats_most_prompts_and_a_model_one(tmp_path: Path, echoes: int, severity: str | None) -> None:
    texts = ["say it", "a story", "the time"]
    records = [
        moved(request(0, [(10, f" {text}" if at < echoes else " no")], prompt=text), 100 * at)
        for at, text in enumerate(texts)
    ]
    findings = Run(records, prompts={text: text for text in texts}).findings(tmp_path, "prompt_echo")
    assert [each["severity"] for each in findings] == ([] if severity is None else [severity])
    assert all(f"{echoes} of 3 responses start with their prompt" in each["message"] for each in findings)


def test_other_first_words_make_another_prompt(tmp_path: Path) -> None:
    """The same row of a workload is sent repeatedly, each time with another prefix."""

    def opened(*openings: str) -> Run:
        records = [moved(answer(0, opening=each) if each else answer(0), 100 * at) for at, each in enumerate(openings)]
        return Run(records)

    assert opened("some new", "or other", "").findings(tmp_path, "repeated_prompts") == []
    (finding,) = opened("some new", "or other", "", "", "").findings(tmp_path, "repeated_prompts")
    assert finding["message"].startswith("2 of 5 requests repeat an earlier prompt; ")
    warm = Run([answer(0, phase="warmup", opening="some new"), moved(answer(0, opening="or other"), 100)])
    assert warm.findings(tmp_path, "warmup") == []


def test_images_make_another_prompt_of_the_same_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "e",
        *({"type": "prompt", "id": id_, "text": "what is this", "images": 1} for id_ in ("dog", "cat")),
        answer(0, prompt="dog"),
        moved(answer(0, prompt="cat"), 100),
    )
    assert [each for each in analyze(path, Words())["findings"] if each["check"] == "repeated_prompts"] == []
