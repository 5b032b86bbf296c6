"""The client against a server whose timeline is known."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.bench.load import EventFile, Level, run_level
from trtllm_pipeline.bench.prompts import Prompt
from trtllm_pipeline.bench.scripted_server import Script, ScriptedServer, config, running
from trtllm_pipeline.bench.stats import summary
from trtllm_pipeline.client.openai import OpenAiClient
from trtllm_pipeline.client.service import Service
from trtllm_pipeline.client.session import Answer, GenerationRequest
from trtllm_pipeline.client.triton import PROTOCOLS, STREAMING, Client
from trtllm_pipeline.errors import FailureClass, ServerError

TEXT = "héllo wörld again 😀 done"
SCRIPTS = {
    "plain": Script.of(TEXT, gap_s=0.002),
    "empty parts": Script(((0, ""), (0.01, "a"), (0.01, ""), (0.02, "b"))),
    "cut": Script(((0, "é"), (0.005, " ü"), (0.01, "😀 x")), cut=True),
    "merged": Script(tuple((0, part) for part in "abcde"), merge=2),
    "error": Script(((0, "x"),), error="the reason"),
    "hang": Script(((0, "x"),), hang=True),
    "grows": Script(((0, "a"), (0.001, "ab\ufffd"), (0.002, "ab😀c")), counts=(1, 2, 4)),
    "held": Script(((0, ""), (0.001, "a"), (0.002, "b"), (0.003, "")), counts=(2, 1, 3, 1)),
}
MODELS = {
    "ensemble": config("ensemble"),
    "plain": config("plain", decoupled=False),
    "accumulating": config("accumulating", accumulate_tokens=True, counts=True),
    "counting": config("counting", counts=True),
    "plain counting": config("plain counting", decoupled=False, counts=True),
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ScriptedServer, Service]]:
    with running(lambda _model, values: SCRIPTS[values["text_input"]], MODELS) as (server, raw):
        yield server, Service(raw["http"], raw["grpc"], None, raw["pid"], "ensemble", None)


def ask(
    service: Service, protocol: str, *prompts: str, model: str | None = None, timeout_s: float = 5.0
) -> list[Answer]:
    """Answers to `prompts`, one after the other in one session."""

    async def run() -> list[Answer]:
        name = model or ("plain" if protocol == "grpc_unary" else "ensemble")
        async with Client(service, name, protocol, timeout_s=timeout_s) as client:
            session = client.session()
            return [await session.generate(GenerationRequest(prompt, 5, {"top_k": 1})) for prompt in prompts]

    return asyncio.run(run())


@pytest.mark.seam
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_text_arrives_whole_and_in_parts(server: tuple[ScriptedServer, Service], protocol: str) -> None:
    for answer in ask(server[1], protocol, "plain", "plain"):
        assert answer.error is None
        assert answer.text == TEXT
        assert len(answer.events) == (5 if protocol in STREAMING else 1)
        times = [event.time_ns for event in answer.events]
        assert answer.output_tokens is None
        assert answer.first_byte_ns is not None
        assert [answer.sent_ns, answer.first_byte_ns, *times, answer.end_ns] == sorted(
            [answer.sent_ns, answer.first_byte_ns, *times, answer.end_ns]
        )


@pytest.mark.seam
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_model_that_is_not_decoupled_sends_one_response(
    server: tuple[ScriptedServer, Service], protocol: str
) -> None:
    for answer in ask(server[1], protocol, "plain", "empty parts", "plain", model="plain"):
        assert answer.error is None
        assert len(answer.events) == 1
        assert answer.text in {TEXT, "ab"}
        assert answer.first_byte_ns == answer.events[0].time_ns


@pytest.mark.seam
@pytest.mark.parametrize("protocol", sorted(STREAMING))
def test_responses_without_text_are_no_content(server: tuple[ScriptedServer, Service], protocol: str) -> None:
    (answer,) = ask(server[1], protocol, "empty parts")
    assert [event.text for event in answer.events] == ["a", "b"]
    assert answer.first_byte_ns is not None
    assert answer.events[0][0] - answer.first_byte_ns > 5_000_000


@pytest.mark.seam
def test_cut_and_merged_server_sent_events(server: tuple[ScriptedServer, Service]) -> None:
    cut, merged = ask(server[1], "http", "cut", "merged")
    assert [event.text for event in cut.events] == ["é", " ü", "😀 x"]
    assert merged.text == "abcde"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_failures_are_answers_and_the_next_request_is_fine(
    server: tuple[ScriptedServer, Service], protocol: str
) -> None:
    failed, good, late, again = ask(server[1], protocol, "error", "plain", "hang", "plain", timeout_s=2.0)
    assert failed.error is not None
    assert "the reason" in failed.error
    assert (late.error or "").startswith("no complete answer within 2 s: ")
    assert [failed.text, late.text] == (["x", "x"] if protocol in STREAMING else ["", ""])
    assert (good.text, good.error, again.text, again.error) == (TEXT, None, TEXT, None)


@pytest.mark.seam
@pytest.mark.parametrize("protocol", sorted(STREAMING))
def test_accumulated_text_becomes_new_text(server: tuple[ScriptedServer, Service], protocol: str) -> None:
    (answer,) = ask(server[1], protocol, "grows", model="accumulating")
    assert [(event.text, event.tokens) for event in answer.events] == [("a", 1), ("b", 3), ("😀c", 7)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_counts_is_asked_to(server: tuple[ScriptedServer, Service], protocol: str) -> None:
    model = "plain counting" if protocol == "grpc_unary" else "counting"
    held, again, uncounted = ask(server[1], protocol, "held", "held", "merged", model=model)
    for answer in (held, again):
        assert answer.error is None
        assert answer.output_tokens == 7
        got = [(event.text, event.tokens) for event in answer.events]
        assert got == ([("a", 3), ("b", 6)] if protocol in STREAMING else [("ab", 7)])
    assert (uncounted.text, uncounted.output_tokens) == ("abcde", None)
    assert all(event.tokens is None for event in uncounted.events)


def test_unary_requests_to_a_decoupled_model_are_refused_in_words(server: tuple[ScriptedServer, Service]) -> None:
    (answer,) = ask(server[1], "grpc_unary", "plain", model="ensemble")
    assert answer.error is not None
    assert "decoupled" in answer.error


def test_a_model_or_a_server_that_is_not_there(server: tuple[ScriptedServer, Service]) -> None:
    with pytest.raises(ServerError, match="'nope' is not found"):
        ask(server[1], "grpc", "plain", model="nope")
    nobody = Service("127.0.0.1:9", "127.0.0.1:9", None, None, "ensemble", None)
    with pytest.raises(ServerError, match=r"ensemble.*127\.0\.0\.1:9") as caught:
        ask(nobody, "grpc", "plain")
    assert caught.value.failure is FailureClass.TRANSIENT
    with pytest.raises(ServerError, match="unknown protocol"):
        ask(nobody, "carrier pigeon", "plain")


@pytest.mark.seam
def test_a_server_that_dies_fails_the_requests_it_had() -> None:
    async def run(service: Service) -> list[Answer]:
        async with Client(service, "ensemble", "grpc", timeout_s=5) as client:
            session = client.session()
            return [await session.generate(GenerationRequest("x", 5)) for _ in range(2)]

    with scripted("first_ms=300", die_after_s=0.15) as service:
        for answer in asyncio.run(run(service)):
            assert answer.error is not None
            assert "UNAVAILABLE" in answer.error


@pytest.mark.timing
@pytest.mark.parametrize("protocol", sorted(STREAMING))
def test_times_are_what_happened(tmp_path: Path, protocol: str) -> None:
    """16 streams of 20 events a second against a server in another process, which notes when it sent what."""
    log, sessions = tmp_path / "log", 16
    with scripted("events=6", log=log) as service, EventFile(tmp_path / "events.jsonl") as events:
        asyncio.run(_load(service, protocol, sessions, events))
    truth = {}
    for line in log.read_text().splitlines():
        record = json.loads(line)
        truth[record["prompt"]] = record
    late_ms, records = [], [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    requests = [record for record in records if record["type"] == "request"]
    assert len(requests) == len(truth) == 2 * sessions
    for record in requests:
        sent_ns = truth[record["prompt"]]["sent_ns"]
        times_ns = [event[0] for event in record["events"]]
        assert len(times_ns) == len(sent_ns) == 6
        late_ms += [(got - sent) / 1e6 for got, sent in zip(times_ns, sent_ns, strict=True)]
        assert record["sent_ns"] < truth[record["prompt"]]["received_ns"]
    late = summary(late_ms)
    assert late["min"] is not None
    assert late["p50"] is not None
    # Nothing arrives before it was sent; the bound is generous, since tests share their cores with others.
    assert late["min"] > 0
    assert late["p50"] < 5


async def _load(service: Service, protocol: str, sessions: int, events: EventFile) -> None:
    prompts = tuple(Prompt(str(number), str(number)) for number in range(2 * sessions))
    async with Client(service, "ensemble", protocol, timeout_s=20) as client:
        level = Level(sessions, 0, (), prompts)
        await run_level(client, level, lambda prompt, _: GenerationRequest(prompt.text, 6), events, lambda: None)


@contextmanager
def scripted(*timeline: str, log: Path = Path("/dev/null"), die_after_s: float | None = None) -> Iterator[Service]:
    """A scripted server in a process of its own, ended in order so that it writes its log."""
    command: list[str] = [sys.executable, "-m", "trtllm_pipeline.bench.scripted_server", str(log), *timeline]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            raw: dict[str, Any] = json.loads(process.stdout.readline())
            if die_after_s is not None:
                import threading

                threading.Timer(die_after_s, process.kill).start()
            yield Service(raw["http"], raw["grpc"], None, raw["pid"], "ensemble", None)
            process.communicate("", timeout=60)
        finally:
            process.kill()


@pytest.mark.seam
@pytest.mark.parametrize(("answers", "errors"), [(1, [None, None]), (0, ["the server closed the connection"] * 2)])
def test_a_connection_that_was_kept_may_be_closed(answers: int, errors: list[str | None]) -> None:
    """A server that answers so many requests on a connection and closes it on the next, as it is entitled to."""
    body = b'{"choices": [{"text": " a", "finish_reason": "stop"}]}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(answers):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.read(1)
        writer.close()

    async def run() -> list[Answer]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            session = OpenAiClient(url, "m", "completions", stream=False, timeout_s=5).session()
            await session.open()
            found = [await session.generate(GenerationRequest("x", 5)) for _ in range(2)]
            await session.close()
        return found

    first, second = asyncio.run(run())
    for answer, error in zip((first, second), errors, strict=True):
        assert (answer.error is None) if error is None else (answer.error or "").endswith(error)
    assert (first.connected_ns is None) == bool(answers), (
        "a connection of its own was needed where the first was no good"
    )
    assert second.connected_ns is not None
    assert second.connected_ns <= second.sent_ns
