"""The client against a server whose timeline is known."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripted_server import Script, ScriptedServer, config, running, server_process
from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.measure.client.openai import OpenAiClient
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.client.session import Answer, GenerationRequest
from trtllm_pipeline.measure.client.triton import PROTOCOLS, STREAMING, Client
from trtllm_pipeline.measure.load.load import EventFile, Level, run_level
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.target import OPENAI, Target

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
    service: Service, protocol: str, *prompts: str, model: str | None = None, timeout_s: float = 60.0
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


@pytest.mark.timing
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
    failed, good, late, again = ask(server[1], protocol, "error", "plain", "hang", "plain", timeout_s=5.0)
    assert failed.error is not None
    assert "the reason" in failed.error
    assert (late.error or "").startswith("no complete response within 5 s: ")
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
        async with Client(service, "ensemble", "grpc", timeout_s=60) as client:
            session = client.session()
            first = asyncio.ensure_future(session.generate(GenerationRequest("x", 5)))
            await asyncio.sleep(0.1)
            os.kill(int(service.pid or 0), signal.SIGKILL)
            return [await first, await session.generate(GenerationRequest("x", 5))]

    with server_process(Path("/dev/null"), "first_ms=3600000") as service:
        assert service.pid is not None
        for answer in asyncio.run(run(service)):
            assert answer.error is not None
            assert "UNAVAILABLE" in answer.error


async def _load(target: Target, level: Level, events: EventFile) -> None:
    async with target.client() as client:
        await run_level(client, level, target.generation, events, lambda: None)


SENT: Mapping[str, Mapping[str, Any]] = {
    # name -> what the server does with an answer of 6 events
    "plain": {},
    "merged": {"merge": 3},
    "cut": {"cut": True},
    "stalled": {"stall_ms": 150},
    "error": {"error": "scripted failure"},
    "empty": {"events": 0},
    "dropped": {"drop": True},
}


@pytest.mark.parametrize("protocol", [*sorted(STREAMING), *(name for name, (_, stream) in OPENAI.items() if stream)])
def test_each_request_records_the_fault_of_its_answer(tmp_path: Path, protocol: str) -> None:
    prompts = {
        name: json.dumps({"name": name, "first_ms": 20, "gap_ms": 10, "events": 6, **SENT[name]}) for name in SENT
    }
    log = tmp_path / "log"
    with server_process(log) as service, EventFile(tmp_path / "events.jsonl") as events:
        target = Target(protocol, service, "ensemble", 30.0, 6)
        level = Level(len(SENT), 0, (), tuple(Prompt(name, text) for name, text in prompts.items()))
        asyncio.run(_load(target, level, events))
    lines = map(json.loads, log.read_text().splitlines())
    truth = {record["prompt"]: (record["received_ns"], record["sent_ns"]) for record in lines}
    records = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    found = {record["prompt"]: record for record in records if record["type"] == "request"}
    assert {name: record["error"] is not None for name, record in found.items()} == {
        name: name in {"error", "dropped"} for name in SENT
    }
    assert "scripted failure" in found["error"]["error"]
    assert found["empty"]["events"] == []
    for name in ("plain", "merged", "cut", "stalled", "error"):
        received_ns, sent_ns = truth[prompts[name]]
        times_ns = [event[0] for event in found[name]["events"]]
        assert found[name]["sent_ns"] < received_ns
        assert "".join(event[1] for event in found[name]["events"]) == " word" * 6
        assert all(got > sent for got, sent in zip(times_ns, sent_ns, strict=True)), (
            "no event is earlier than it was sent"
        )
    stalled = found["stalled"]
    assert stalled["events"][-1][0] - stalled["sent_ns"] >= (20 + 5 * 10 + 150) * 1e6


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
            session = OpenAiClient(url, "m", "completions", stream=False, timeout_s=60).session()
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
