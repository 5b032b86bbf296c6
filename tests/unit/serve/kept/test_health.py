from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from trtllm_pipeline.measure.client.transport.http import HttpError
from trtllm_pipeline.serve.kept import health
from trtllm_pipeline.serve.kept.health import Health, gateway_health, server_health

Answer = Callable[[], tuple[int, bytes]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Health]]:
    """Starts to ask a server that answers so."""
    started: list[Health] = []

    def start(answer: Answer) -> Health:
        async def fetch(_address: str, _path: str, **_limits: Any) -> tuple[int, bytes]:
            return answer()

        monkeypatch.setattr(health.http, "fetch", fetch)
        started.append(Health("127.0.0.1:1", "/health", every_s=0.001))
        return started[-1]

    yield start
    for each in started:
        each.close()
    for thread in threading.enumerate():  # else one that is about to ask would ask the next test's server
        if thread.name == "health":
            thread.join(60)


def refuse() -> tuple[int, bytes]:
    raise HttpError("no complete answer within 3 s")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (refuse, "GET /health: no complete answer within 3 s"),
        (lambda: (503, b""), "GET /health returned HTTP status 503"),
    ],
)
def test_what_gives_no_good_answer_is_unresponsive(asked: Callable[[Answer], Health], answer: Answer, why: str) -> None:
    found = asked(answer)
    assert eventually(lambda: found.unresponsive() is not None)
    assert (found.unresponsive() or (0, ""))[1] == why


def test_one_missed_answer_says_nothing_and_an_answer_is_believed_at_once(asked: Callable[[Answer], Health]) -> None:
    answers = iter([False, True, False, True, False, False, True])
    seen: list[bool] = []
    given: list[bool] = []
    began = threading.Event()

    def answer() -> tuple[int, bytes]:
        began.wait()
        seen.append(found.unresponsive() is not None)
        given.append(next(answers, True))
        return (200, b"") if given[-1] else refuse()

    found = asked(answer)
    began.set()  # else the thread may ask before `found` is there
    assert eventually(lambda: len(given) > 8)
    assert seen[:8] == [False, False, False, False, False, False, True, False]


def test_an_address_that_nobody_could_ask_says_nothing(asked: Callable[[Answer], Health]) -> None:
    count: list[int] = []

    def answer() -> tuple[int, bytes]:
        count.append(1)
        raise ValueError("no address")

    found = asked(answer)
    assert eventually(lambda: len(count) > 3)
    assert found.unresponsive() is None


@pytest.mark.parametrize(
    ("service", "where"),
    [
        ({"http": "127.0.0.1:1", "grpc": "h:2", "model": "m"}, ("127.0.0.1:1", "/v2/health/ready")),
        ({"http": "::1:8000", "grpc": "h:2", "model": "m"}, ("[::1]:8000", "/v2/health/ready")),
        (
            {"kind": "openai", "url": "http://h:5/", "http": "h:5", "grpc": "", "model": "m"},
            ("http://h:5", "/health"),
        ),
    ],
)
def test_each_kind_of_server_is_asked_by_its_own_path(
    tmp_path: Path, service: dict[str, str], where: tuple[str, str]
) -> None:
    assert server_health(tmp_path) is None
    (tmp_path / "service.json").write_text(json.dumps(service))
    assert server_health(tmp_path) == where


def test_a_gateway_is_asked_whether_it_lives_itself(tmp_path: Path) -> None:
    assert gateway_health(tmp_path) is None
    (tmp_path / "gateway.json").write_text('{"url": "http://0.0.0.0:4"}')
    assert gateway_health(tmp_path) == ("http://127.0.0.1:4", "/health/live")
