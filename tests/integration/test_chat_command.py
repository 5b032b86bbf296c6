"""`pipeline chat` as it is typed: in a pipe and on a terminal, against a server whose answers are known."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.embedded_engines import script_engine
from tests.helpers.gateways import listening
from tests.helpers.scripted_server import Script, config, running
from tests.helpers.terminals import Terminal
from trtllm_pipeline.base.processes.guardian import proc_file, process_table
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel

PIPELINE = [sys.executable, "-m", "trtllm_pipeline", "chat"]


def respond(_model: str, values: Mapping[str, Any]) -> Script:
    """An answer that says what was asked."""
    messages = values["messages"]
    told = f"{len(messages)} messages, {messages[0]['role']}: {values['text_input']!r}"
    match values["text_input"]:
        case "think":
            events = ((0.0, "Well, "), (0.02, "hm.\n"), (0.04, "It "), (0.06, "is."))
            return Script(events, reasoning=2, counts=(1, 1, 1, 1))
        case "error":
            return Script(((0.0, "Now"),), error="the engine died")
        case "drop":
            return Script(((0.0, "Now"),), drop=True)
        case "cut off":
            return Script(((0.0, "Now"), (0.01, " and")), finish_reason="length", counts=(1, 1))
        case "escapes":
            return Script(((0.0, "\x1b]0;title\x07a\x1b"), (0.01, "[31mb")))
        case "long":
            return Script(tuple((at / 20, f" {at}") for at in range(600)), counts=(1,) * 600)
    return Script.of(told)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(respond) as (_, service):
        yield service["http"]


def piped(url: str, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PIPELINE, url, *more], input=text, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.seam
def test_lines_from_a_pipe(url: str) -> None:
    typed = 'one\n\ntwo\n/system Be brief.\nthree\n"""\nfour\nfive\n"""\n//six\nthink\n/reset\nescapes\n/exit\nnever\n'
    done = piped(url, typed)
    assert done.stdout.splitlines() == [
        "1 messages, user: 'one'",
        "3 messages, user: 'two'",
        "2 messages, system: 'three'",
        "4 messages, system: 'four\\nfive'",
        "6 messages, system: '/six'",
        "It is.",
        "a\\u001b[31mb",
    ]
    assert done.stderr.splitlines() == ["system prompt: Be brief.", "conversation cleared"]
    assert done.returncode == 0


def test_what_goes_wrong_in_a_pipe(url: str) -> None:
    for text, words in (("error", "the server failed: the engine died"), ("drop", "the response broke off")):
        done = piped(url, f"{text}\nmore\n")
        assert (done.returncode, done.stdout) == (1, "Now\n")
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    done = piped(url, "x\n", "--model", "none")
    assert done.returncode == 2
    assert "has no model 'none'; it has ensemble" in done.stderr


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("http://127.0.0.1:9", "Connect call failed"),
        ("http://", "is not http://HOST:PORT"),
        ("http://a..b", "'http://a..b/v1': there can be no host 'a..b'"),
        ("grpc", "this is Triton's gRPC port"),
    ],
)
def test_addresses_where_nobody_talks(where: str, words: str) -> None:
    with running(respond) as (_, service):
        done = piped(service["grpc"] if where == "grpc" else where, "x\n")
    assert done.returncode in {1, 2}
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_in_a_pipe_ends_it_all(url: str) -> None:
    process = subprocess.Popen([*PIPELINE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("long\nmore\n")
        process.stdin.flush()
        assert process.stdout.read(4) == " 0 1"
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        assert process.wait(60) == 130
        assert "messages" not in process.stdout.read()


def test_bytes_that_are_no_text(url: str) -> None:
    done = subprocess.run([*PIPELINE, url], input=b"a\xffb\n", capture_output=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"1 messages, user: 'a")


def test_several_models(url: str) -> None:
    with running(respond, {"a": config("a"), "b": config("b")}) as (_, service):
        done = piped(service["http"], "x\n")
        assert done.returncode == 2
        assert "has the models a, b" in done.stderr
        assert piped(service["http"], "x\n", "--model", "b").stdout == "1 messages, user: 'x'\n"


def test_an_adapter_is_chosen_by_its_name(tmp_path: Path) -> None:
    """The gateway in front of a scripted server, whose adapter is a model with a parent."""
    asked: list[Mapping[str, Any]] = []

    def answer(model: str, values: Mapping[str, Any]) -> Script:
        asked.append(values)
        return respond(model, values)

    with running(answer, {"a": config("a"), "b": config("b")}) as (_, service):
        adapters = {"sql": tmp_path / "sql"}
        models = tuple(OfferedModel(name=name, url=f"http://{service['http']}/v1", adapters=adapters) for name in "ab")
        with listening(tmp_path, GatewayConfig(models=models)) as url:
            assert piped(url, "x\n", "--model", "b", "--lora", "sql").stdout == "1 messages, user: 'x'\n"
            assert asked[-1]["lora_request"]["lora_path"] == str(tmp_path / "sql")
            assert piped(url, "x\n", "--model", "b").returncode == 0
            assert "lora_request" not in asked[-1]
            done = piped(url, "x\n", "--model", "b", "--lora", "law")
            assert done.returncode == 2
            assert "lists no LoRA adapter 'law' of b; it lists sql" in done.stderr
            assert "has the models a, a:sql, b, b:sql" in piped(url, "x\n", "--lora", "sql").stderr


class Conversation(Terminal):
    """A terminal with `pipeline chat` in it."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        super().__init__([*PIPELINE, url], {"TERM": "xterm", **environment})

    def interrupt_line(self, pattern: str) -> str:
        """Ctrl-C until `pattern` is shown, as a person does; what was shown up to it.

        Python may take one at the prompt and wait for the next key before it acts: it looks for signals, and then waits
        for input, which one that arrives in between does not end.
        """
        for _ in range(15):
            self.type("\x03")
            if self._shows(pattern, 2.0):
                break
        return self.wait(pattern)

    def wait(self, pattern: str) -> str:
        """What was shown up to `pattern`, since the last time."""
        found = self._shows(pattern, 240.0)
        assert found is not None, self.seen
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def _shows(self, pattern: str, timeout_s: float) -> re.Match[str] | None:
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.seen, re.DOTALL)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            self.look(left_s)
        return found


@pytest.mark.seam
def test_a_terminal(url: str) -> None:
    with closing(Conversation(url, {})) as terminal:
        assert "/help shows the commands" in terminal.wait("> ")
        terminal.type("one\n")
        assert "1 messages, user: 'one'\n[4 tokens" in terminal.wait(r"ms\]\n.*> ")
        terminal.type("think\n")
        shown = terminal.wait(r"ms\]\n.*> ")
        assert "\x1b[2mWell, hm.\n\x1b[0mIt is.\n" in shown.replace("\x1b[0m\x1b[0m", "\x1b[0m")
        assert "tokens/s, first after" in shown
        terminal.type("cut off\n")
        assert "Now and\n[cut off at the length limit, 2 tokens" in terminal.wait(r"ms\]\n.*> ")
        # Ctrl-C ends the answer, and what came of it stays said
        terminal.type("long\n")
        terminal.wait(" 3 4 5")
        terminal.type("\x03")
        assert "[stopped, " in terminal.wait(r"ms\]\n.*> ")
        terminal.type("next\n")
        assert "9 messages" in terminal.wait(r"ms\]\n.*> ")
        terminal.type("error\n")
        assert "Now\nerror: the server failed: the engine died\n" in terminal.wait(r"died\n.*> ")
        terminal.type("next\n")
        assert "11 messages" in terminal.wait(r"ms\]\n.*> ")
        # at the prompt it drops the line
        terminal.type("half")
        terminal.wait("half")
        terminal.interrupt_line(r"Ctrl-D or /exit ends\)\n.*> ")
        terminal.type("/nothing\n")
        assert "unknown command /nothing" in terminal.wait(r"several lines\n.*> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0


def test_no_colours_where_none_are_wanted(url: str) -> None:
    with closing(Conversation(url, {"NO_COLOR": "1", "TERM": "dumb"})) as terminal:
        terminal.wait("> ")
        terminal.type("think\n")
        assert "\x1b[" not in terminal.wait(r"ms\]\n")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0


def test_an_engine_is_served_for_as_long_as_one_talks(tmp_path: Path) -> None:
    """With a real Triton: the engine continues a fixed text, whatever it is asked."""
    engine = script_engine(tmp_path / "engine")
    (engine / "chat_template.jinja").write_text("{{ messages[-1].content }}", encoding="utf-8")
    workspace = ["--workspace", str(tmp_path / "ws")]
    done = subprocess.run(
        [*PIPELINE, str(engine), *workspace, "--temperature", "0", "--max-tokens", "10"],
        input="A\ns\n",
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout.splitlines() == ["BCDEFGHIJK", "top-世界"], done.stderr
    assert "it stops with this chat" in done.stderr
    assert done.returncode == 0
    assert not (tmp_path / "ws" / "serve").exists()
    assert not [line for pid in process_table() if str(tmp_path).encode() in (line := proc_file(pid, "cmdline"))]


def test_a_workspace_without_servers(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PIPELINE, "--workspace", str(tmp_path)], input="x\n", capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 2
    assert "no server is ready" in done.stderr
