"""Managed servers: started by one command, found by others, killed in every way, stopped without anything left.

Mostly trtllm-serve's stand-in is kept, which starts in a second; each other kind of server once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import command_line
from tests.helpers.embedded_engines import script_engine
from tests.helpers.launched import still_running
from tests.helpers.trtllm_runs import LARGER, PLAIN, Lane
from tests.helpers.waiting import eventually
from tests.unit.orchestrate.provenance.test_provenance import write_key
from trtllm_pipeline.base.processes.guardian import process_table, with_descendants
from trtllm_pipeline.serve.kept.servers import boot_id, folder_of, look
from trtllm_pipeline.tensorrt.servers.triton_server import busy_ports

FRONTEND = ("--set", "settings.serve.frontend=trtllm_serve")
MEASURING = """
from trtllm_pipeline.base.domain import Exclusive
from trtllm_pipeline.orchestrate.store.claims import lease_machine
held = lease_machine((), exclusive=Exclusive.MACHINE)
print(held is not None, flush=True)
input()
"""
JUMPING = """
import time
real = time.time
def jumped():
    with open({!r}) as file:
        return real() + float(file.read() or 0)
time.time = jumped
"""
STARTS_NOTHING = {("serve", name) for name in ("ps", "status", "stop")}
POWERLESS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()


class Host:
    """A machine on which `pipeline serve` is typed. What it starts can be told by a variable in its environment.

    Commands that start nothing are no processes of their own, unless `processes` says so.
    """

    def __init__(self, folder: Path, environment: dict[str, str], marker: str, *, processes: bool = False) -> None:
        self.folder, self.environment, self.marker, self.processes = folder, environment, marker, processes
        self.workspace = folder / "w"

    def start(self, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*before, sys.executable, "-m", "trtllm_pipeline", *words],
            cwd=self.folder,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def variables(self) -> dict[str, str]:
        return {**self.environment, "PIPELINE_WORKSPACE": str(self.workspace), "COLUMNS": "200"}

    def pipeline(self, *words: str, code: int = 0, before: tuple[str, ...] = ()) -> tuple[str, str]:
        if words[:2] in STARTS_NOTHING and not before and not self.processes:
            done = command_line.pipeline(*words, cwd=self.folder, code=code, **self.variables())
            return done.stdout, done.stderr
        process = self.start(*words, before=before)
        out, err = process.communicate(timeout=280)
        assert process.returncode == code, f"{words}: exit code {process.returncode}, expected {code}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return out, err

    def serve(self, *words: str) -> dict[str, Any]:
        """A server that was started and is ready."""
        found = json.loads(self.pipeline("serve", "start", *words, "--format", "json")[0])
        assert isinstance(found, dict)
        return found

    def status(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self.pipeline("serve", "status", name, "--format", "json")[0])["servers"]
        assert isinstance(found, dict)
        return found

    def left(self) -> list[str]:
        return [words for words in still_running(self.marker) if "trtllm_pipeline serve" not in words]

    def becomes(self, name: str, state: str, *, restarts: int = 0) -> dict[str, Any]:
        folder = folder_of(self.workspace, name)

        def so() -> bool:
            found = look(folder)
            return found.state.value == state and found.record is not None and found.record.restarts >= restarts

        assert eventually(so), self.status(name)
        return self.status(name)


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Lane:
    """A GPU machine with four GPUs, on which three cells are built for trtllm-serve."""
    lane = Lane(tmp_path_factory.mktemp("kept") / "lane", "1.2.0")
    lane.run(*FRONTEND, "--until", "repository")
    return lane


@contextmanager
def kept(host: Host) -> Iterator[Host]:
    """A host on which nothing is kept afterwards, however the test ends."""
    try:
        yield host
    finally:
        host.pipeline("serve", "stop", "--all", "--remove")
    assert host.left() == []


@pytest.fixture
def host(lane: Lane) -> Iterator[Host]:
    with kept(Host(lane.folder, lane.environment, lane.marker)) as host:
        yield host


@pytest.fixture
def other_host(tmp_path: Path) -> Iterator[Host]:
    """A host with a workspace of its own."""
    marker = f"TEST_MARKER_{uuid.uuid4().hex}"
    with kept(Host(tmp_path, {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), marker: "1"}, marker)) as host:
        yield host


def generated(server: dict[str, Any], text: str) -> str:
    """What the model of a Triton continues `text` with."""
    body = {"text_input": text, "max_tokens": 4, "bad_words": "", "stop_words": ""}
    answer = httpx.post(f"http://{server['endpoints']['http']}/v2/models/ensemble/generate", json=body, timeout=60)
    assert answer.is_success, answer.text
    return str(answer.json()["text_output"])


def free(port: int) -> bool:
    return not busy_ports([port])


def processes(keeper: int) -> dict[str, int]:
    """The processes of a kept trtllm-serve."""
    found = {"keeper": keeper}
    table = process_table()
    for name in ("guardian", "worker"):
        (found[name],) = (pid for pid, each in table.items() if each.parent == keeper)
        keeper = found[name]
    # Below the worker is the group of the server, with a guardian of its own.
    (inner,) = (pid for pid, each in table.items() if each.parent == found["worker"])
    found["server"] = min(with_descendants({inner}, table) - {inner})
    return found


def test_a_server_outlives_its_command_and_leaves_nothing(host: Host) -> None:
    said = host.serve(PLAIN, "--name", "one")
    assert (said["name"], said["state"], said["cell"]) == ("one", "ready", PLAIN)
    url = said["endpoints"]["openai"]
    assert httpx.get(f"{url}/models", timeout=60).json()["data"][0]["id"] == said["endpoints"]["model"]
    table = host.pipeline("serve", "ps")[0]
    assert "ready" in table
    assert PLAIN in table
    _, err = host.pipeline("serve", "start", PLAIN, "--name", "one", code=2)
    assert "server one already exists: ready" in err
    assert "pipeline serve restart one" in err
    port = said["ports"]["http"]
    out, _ = host.pipeline("serve", "stop", "one")
    assert out == "one\n"
    assert host.left() == []
    assert free(port)
    ended = host.status("one")
    assert (ended["state"], ended["reason"], ended["endpoints"]) == ("stopped", "it was stopped", None)
    assert not {"service.json", "links"} & {path.name for path in Path(ended["folder"]).iterdir()}
    again = json.loads(host.pipeline("serve", "restart", "one", "--format", "json")[0])["servers"][0]
    assert again["endpoints"]["openai"] == url, "clients know the port"


@pytest.mark.parametrize("killed", ["keeper", "guardian", "worker", "server"])
def test_what_is_killed_takes_all_of_its_server_with_it(host: Host, killed: str) -> None:
    said = host.serve(PLAIN, "--name", killed)
    os.kill(processes(said["keeper_pid"])[killed], signal.SIGKILL)
    ended = host.becomes(killed, "failed")
    assert eventually(lambda: not host.left()), host.left()  # its keeper writes the state, then ends
    reason = {
        "keeper": f"its keeper (process {said['keeper_pid']}) was killed",
        "guardian": "above the server was killed, and the server with it",
        "worker": "was ended by SIGKILL",
        "server": "trtllm-serve",
    }
    assert reason[killed] in ended["reason"]
    assert free(said["ports"]["http"])


def test_ports_that_nobody_asked_for_are_given_up_when_they_are_taken(host: Host) -> None:
    """Also when it has had them over a restart."""
    keys = host.folder / "keys.txt"
    keys.write_text("abcdefgh-1\n", encoding="utf-8")
    host.serve(PLAIN, "--name", "one", "--openai", "--api-keys", str(keys))
    ports = json.loads(host.pipeline("serve", "restart", "one", "--format", "json")[0])["servers"][0]["ports"]
    host.pipeline("serve", "stop", "one")
    with socket.socket() as other, socket.socket() as third:
        for taken, name in ((other, "openai"), (third, "http")):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", ports[name]))
            taken.listen()
        host.pipeline("serve", "restart", "one")
        now = host.status("one")["ports"]
        assert not set(now.values()) & set(ports.values())
        keys.unlink()
        _, err = host.pipeline("serve", "restart", "one", code=2)
        assert f"{keys}: there is no such file" in err
        assert host.status("one")["ports"] == now, "it goes on"
        _, err = host.pipeline(
            "serve", "start", PLAIN, "--name", "two", "--openai", "--port", str(ports["openai"]), code=1
        )
        assert f"cannot listen on 127.0.0.1 port {ports['openai']}" in err


@pytest.mark.parametrize("part", ["server", "gateway"])
def test_what_hangs_is_unresponsive_and_started_again_if_that_was_asked(host: Host, part: str) -> None:
    pytest.importorskip("uvicorn")
    asked = ("--openai", "--restart", "--unresponsive-timeout-s", "8")
    said = host.serve(PLAIN, "--name", "one", *asked)
    file = Path(said["folder"], {"server": "service.json", "gateway": "gateway.json"}[part])
    os.kill(json.loads(file.read_text())["pid"], signal.SIGSTOP)
    found = host.becomes("one", "unresponsive")
    # The second is the reason while it is stopped, to be started again.
    assert found["reason"].startswith((f"the {part} has not responded since ", f"the {part} did not respond for 8 s: "))
    assert found["endpoints"] is None
    again = host.becomes("one", "ready", restarts=1)
    assert again["ports"] == said["ports"]
    assert httpx.get(f"{again['endpoints']['openai']}/models", timeout=60).is_success
    assert "did not respond for 8 s" in Path(said["folder"], "log").read_text()


def test_a_guardian_that_is_halted_is_woken_by_its_keeper(host: Host) -> None:
    """Whoever may be waiting for it."""
    keeper = host.serve(PLAIN, "--name", "one")["keeper_pid"]
    of = processes(keeper)
    os.kill(of["guardian"], signal.SIGSTOP)
    os.kill(of["worker"], signal.SIGKILL)
    assert "was ended by SIGKILL" in host.becomes("one", "failed")["reason"]
    assert eventually(lambda: not host.left()), host.left()  # its keeper writes the state, then ends


@pytest.mark.parametrize("killed", ["guardian", "server"])
def test_what_died_is_started_again_on_its_ports_if_that_was_asked(host: Host, killed: str) -> None:
    said = host.serve(PLAIN, "--name", "again", "--restart")
    follower = host.start("serve", "logs", "again", "-f", "--part", "keeper")
    assert follower.stdout is not None
    assert "keeper: process" in follower.stdout.readline()
    os.kill(processes(said["keeper_pid"])[killed], signal.SIGKILL)
    again = host.becomes("again", "ready", restarts=1)
    assert again["ports"] == said["ports"]
    assert again["keeper_pid"] == said["keeper_pid"]
    assert httpx.get(f"{again['endpoints']['openai']}/models", timeout=60).is_success
    assert follower.stderr is not None
    told = list(takewhile(lambda line: not line.endswith("again: ready\n"), follower.stderr))
    follower.send_signal(signal.SIGINT)
    out, err = follower.communicate(timeout=280)
    assert follower.returncode == 0, err
    assert "restarting in 1 s" in out
    assert any("again: restarting: " in line for line in told)


def test_a_gateway_that_dies_is_started_again_alone(host: Host) -> None:
    pytest.importorskip("uvicorn")
    keys = host.folder / "keys"
    keys.write_text("secret-key\n")
    asked = ("--openai", "--restart", "--model-name", "mine", "--api-keys", str(keys))
    _, err = host.pipeline("serve", "start", PLAIN, "--name", "chat", *asked, "--end-id", "3", code=2)
    assert "--end-id: the server has no such input" in err
    of_matrix = ("--set", "settings.gateway.end_id=3")
    out, err = host.pipeline(
        "serve", "start", PLAIN, "--name", "chat", *asked, *of_matrix, "--max-tokens", "3", "--format", "json"
    )
    assert "note: settings.gateway.end_id is not used: the server has no such input" in err
    assert "pad_id" not in err
    said = json.loads(out)
    assert said["endpoints"]["model"] == "mine"
    url, body = said["endpoints"]["openai"], {"model": "mine", "prompt": "abc"}
    assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 401

    def answer() -> str:
        found = httpx.post(f"{url}/completions", json=body, headers={"Authorization": "Bearer secret-key"}, timeout=60)
        return str(found.json()["choices"][0]["text"])

    assert answer() == "cabc"
    gateway = Path(said["folder"], "gateway.json")
    os.kill(json.loads(gateway.read_text())["pid"], signal.SIGKILL)
    again = host.becomes("chat", "ready", restarts=1)
    assert again["endpoints"] == said["endpoints"], "the server has not noticed"
    assert answer() == "cabc"
    host.pipeline("serve", "stop", "chat")
    assert host.left() == []
    assert free(said["ports"]["openai"])
    assert not gateway.exists()


def test_of_two_starts_of_one_name_one_wins(host: Host) -> None:
    starts = [host.start("serve", "start", PLAIN, "--name", "one") for _ in range(2)]
    errors = [process.communicate(timeout=280)[1] for process in starts]
    codes = [process.returncode for process in starts]
    assert sorted(codes) == [0, 2], errors
    assert "server one already exists" in errors[codes.index(2)]


def test_ctrl_c_while_it_starts_ends_it(host: Host) -> None:
    process = host.start("serve", "start", PLAIN, "--name", "one")
    assert eventually(lambda: any("kept.keeper" in each for each in host.left()))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 130, err
    assert host.left() == []
    assert host.status("one")["state"] == "stopped"


def test_a_server_that_is_not_waited_for_can_be_stopped_at_once(host: Host) -> None:
    assert host.serve(PLAIN, "--name", "one", "--no-wait")["state"] == "starting"
    host.pipeline("serve", "stop", "one")
    assert host.left() == []


def test_what_is_not_as_it_was_signed_is_not_started_again(host: Host, tmp_path: Path) -> None:
    key = write_key(tmp_path, "me")
    trusted = str(tmp_path / "trusted")
    strict = ("--require-signed", "--trusted-keys", trusted)
    _, err = host.pipeline("serve", "start", PLAIN, "--name", "signed", *strict, code=2)
    assert "is not signed" in err
    host.pipeline("store", "provenance", "--sign", str(key))
    said = host.serve(PLAIN, "--name", "signed", "--restart", *strict)
    record = look(Path(said["folder"])).record
    assert record is not None
    config = next(path for path in (Path(each, "config.json") for each in record.served_from) if path.exists())
    before, mode = config.read_bytes(), config.stat().st_mode
    config.chmod(0o644)
    try:
        config.write_bytes(before + b" ")
        _, err = host.pipeline("serve", "restart", "signed", code=2)
        assert "config.json: differs from the signed file" in err
        assert host.status("signed")["keeper_pid"] == said["keeper_pid"], "it continues as it was"
        os.kill(processes(said["keeper_pid"])["server"], signal.SIGKILL)
        assert "config.json: differs from the signed file" in host.becomes("signed", "failed")["reason"]
        assert eventually(lambda: host.left() == [])
    finally:
        config.write_bytes(before)
        config.chmod(mode)
    host.pipeline("serve", "restart", "signed")
    assert host.status("signed")["state"] == "ready"


def test_chat_has_a_key_of_the_kept_server_it_talks_with(host: Host, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("abcdefgh-1\n", encoding="utf-8")
    url = host.serve(PLAIN, "--name", "locked", "--openai", "--api-keys", str(keys))["endpoints"]["openai"]
    assert httpx.get(f"{url}/models", timeout=60).status_code == 401
    asked = subprocess.run(
        [sys.executable, "-m", "trtllm_pipeline", "chat", "locked", "--max-tokens", "4"],
        input="hello\n",
        cwd=host.folder,
        env={**host.environment, "PIPELINE_WORKSPACE": str(host.workspace)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    assert "try: set OPENAI_API_KEY" in host.pipeline("chat", url, code=2)[1], "an address alone says nothing of keys"


def test_a_clock_that_jumps_changes_nothing(host: Host, tmp_path: Path) -> None:
    """Forwards by a year, then back by more than that: the wall clock of all processes, not what counts since the boot."""
    clock = tmp_path / "clock"
    clock.write_text("0", encoding="utf-8")
    paths = host.environment["PYTHONPATH"]
    of_standins = Path(paths.split(os.pathsep)[0], "sitecustomize.py")
    text = of_standins.read_text(encoding="utf-8") + JUMPING.format(str(clock))
    (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
    paths = os.pathsep.join((str(tmp_path), paths))
    jumping = Host(host.folder, {**host.environment, "PYTHONPATH": paths}, host.marker, processes=True)
    jumping.serve(PLAIN, "--name", "jumps", "--openai", "--restart", "--unresponsive-timeout-s", "600")
    for days in (365, -400):
        clock.write_text(f"{days * 86400}", encoding="utf-8")
        for _ in range(2):  # questions after its health in between
            time.sleep(2)
            for seen in (jumping, host):
                now = seen.status("jumps")
                assert (now["state"], now["restarts"], now["reason"]) == ("ready", 0, None)
        assert "jumps" in jumping.pipeline("serve", "ps")[0]
        assert httpx.get(f"{now['endpoints']['openai']}/models", timeout=60).is_success
    again = json.loads(jumping.pipeline("serve", "restart", "jumps", "--format", "json")[0])["servers"][0]
    assert abs(again["started_s"] - time.time() + 400 * 86400) < 600, "the clock did jump"
    assert again["state"] == "ready"
    jumping.pipeline("serve", "stop", "jumps")
    assert host.status("jumps")["state"] == "stopped"


def test_after_a_restart_of_the_machine_it_is_stopped_and_starts_on_its_ports(host: Host) -> None:
    # Not one of those that the system hands out: between the two starts it could go to another test.
    port = next(port for port in range(20000 + os.getpid() % 10000, 32000) if free(port))
    said = host.serve(PLAIN, "--name", "one", "--http-port", str(port))
    assert said["ports"] == {"http": port}
    folder = Path(said["folder"])
    for pid in processes(said["keeper_pid"]).values():
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: host.left() == [])
    for name in ("server.json", "lock"):  # as if all that had been before the machine was started
        path = folder / name
        path.write_text(path.read_text().replace(boot_id(), "00000000-0000-0000-0000-000000000000"))
    found = host.status("one")
    assert (found["state"], found["reason"]) == ("stopped", "the machine was rebooted")
    host.pipeline("serve", "restart", "one")
    assert host.status("one")["ports"] == said["ports"]


def test_gpus_are_shared_with_nobody(host: Host) -> None:
    gpus = [host.serve(LARGER, "--name", name)["gpus"] for name in ("one", "two")]
    assert len({gpu for each in gpus for gpu in each}) == 4
    _, err = host.pipeline("serve", "start", PLAIN, "--name", "three", code=1)
    assert "needs 1 GPU; of 4 on this machine, other servers and runs hold 4" in err
    assert host.status("three")["state"] == "failed"


def test_nothing_is_kept_where_a_run_measures(host: Host) -> None:
    measuring = subprocess.Popen(
        [sys.executable, "-c", MEASURING],
        env=host.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert measuring.stdout is not None
    assert measuring.stdout.readline() == "True\n"
    try:
        _, err = host.pipeline("serve", "start", PLAIN, "--name", "one", code=1)
    finally:
        measuring.communicate("\n")
    assert "a run is measuring on this machine now" in err
    assert f"wait for its end: process {measuring.pid} (" in err


def test_a_damaged_record_keeps_nobody_from_stopping_the_server(host: Host) -> None:
    said = host.serve(PLAIN, "--name", "one")
    path = Path(said["folder"], "server.json")
    path.write_bytes(os.urandom(99))
    found = host.status("one")
    assert (found["state"], found["keeper_pid"]) == ("ready", said["keeper_pid"])
    assert "server.json is damaged" in found["reason"]
    host.pipeline("serve", "stop", "one")
    assert host.left() == []
    assert host.status("one")["state"] == "stopped", "the keeper wrote it anew"


def test_in_a_moved_workspace_it_is_told_what_to_type(host: Host) -> None:
    host.serve(PLAIN, "--name", "one")
    host.pipeline("serve", "stop", "one")
    moved = host.workspace.rename(host.folder / "moved")
    host.workspace = moved
    try:
        assert host.status("one")["state"] == "stopped"
        _, err = host.pipeline("serve", "restart", "one", code=2)
        assert "is missing: removed, or the workspace was moved" in err
        assert f"pipeline serve start {PLAIN} --name one" in err
    finally:
        host.workspace = moved.rename(host.folder / "w")


def test_a_cell_that_is_not_built_is_told_with_the_command_that_builds_it(host: Host) -> None:
    _, err = host.pipeline("serve", "start", PLAIN, "--set", "settings.build.max_num_tokens=300", code=2)
    assert "is not built" in err
    assert "try: pipeline run --matrix" in err
    _, err = host.pipeline("serve", "start", "tiny/fp8", code=2)
    assert "2 cells are selected, expected one" in err


def test_a_workspace_that_cannot_be_written_is_told(host: Host) -> None:
    folder = host.workspace / "serve"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o555)
    try:
        _, err = host.pipeline("serve", "start", PLAIN, "--name", "one", code=2, before=POWERLESS)
        assert f"{folder / 'one'} cannot be written: Permission denied" in err
        assert host.pipeline("serve", "ps", before=POWERLESS)[0] == "this workspace has no managed servers\n"
    finally:
        folder.chmod(0o755)


def test_a_full_disk_is_told(host: Host, lane: Lane) -> None:
    limited, (folder, *_) = ("prlimit", "--fsize=100"), lane.outputs("repository")
    _, err = host.pipeline("serve", "start", str(folder), "--name", "one", code=2, before=limited)
    assert "cannot be written: files are limited to 100 B here" in err
    assert host.left() == []


# ------------------------------------------------------------------------------------------------- other kinds of servers


def test_ranks_of_an_engine_are_kept_and_started_again(host: Host, lane: Lane) -> None:
    lane.run("--until", "repository", "--cells", LARGER)
    said = host.serve(LARGER, "--name", "ranks", "--restart")
    folder = Path(said["folder"])
    ranks = json.loads((folder / "service.json").read_text())["ranks"]
    assert len(ranks) == len(said["gpus"]) == 2
    os.kill(ranks[1], signal.SIGKILL)
    again = host.becomes("ranks", "ready", restarts=1)
    assert again["ports"] == said["ports"]
    assert generated(again, "abc")
    host.pipeline("serve", "stop", "ranks")
    assert host.left() == []


def test_an_engine_on_one_gpu_is_kept_without_mpirun(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "0.16.0", gpus=1)
    lane.hide("mpirun")
    lane.run("--until", "repository", "--cells", PLAIN)
    with kept(Host(lane.folder, lane.environment, lane.marker)) as host:
        said = host.serve(PLAIN, "--name", "one", "--restart")
        (rank,) = json.loads((Path(said["folder"]) / "service.json").read_text())["ranks"]
        os.kill(rank, signal.SIGKILL)
        again = host.becomes("one", "ready", restarts=1)
        assert generated(again, "abc")


def test_weights_in_triton_are_kept(lane: Lane, tmp_path: Path) -> None:
    other = Lane(tmp_path / "lane", "1.2.0")
    weights = ("--toolchain", "tensorrt_llm_pytorch")
    other.run(*weights, "--cells", PLAIN, "--until", "repository")
    with kept(Host(other.folder, other.environment, other.marker)) as host:
        said = host.serve(PLAIN, "--name", "weights")
        assert (said["toolchain"], said["endpoints"]["server_model"]) == ("tensorrt_llm_pytorch", "tensorrt_llm")
        (repository,) = other.outputs("repository")
        folder = host.serve(str(repository), "--name", "folder")
        assert (folder["cell"], folder["served_folder"]) == (None, str(repository))
        assert folder["gpus"] != said["gpus"]


def shared_memory(*servers: dict[str, Any]) -> set[Path]:
    """Files in shared memory of these servers; their names have the process that made them."""
    pids = with_descendants({each["keeper_pid"] for each in servers}, process_table())
    found = {path for path in Path("/dev/shm").glob("trtllm-pipeline-*") if int(path.name.split("-")[3]) in pids}
    assert found
    return found


@pytest.mark.seam
def test_an_engine_of_the_embedded_toolchain_is_kept(other_host: Host, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    said = other_host.serve(str(script_engine(tmp_path / "engine")), "--name", "one", "--threads", "1")
    assert generated(said, "s") == "top-"
    files = shared_memory(said)
    other_host.pipeline("serve", "stop", "one")
    assert other_host.left() == []
    assert not [path for path in files if path.exists()]
    assert not list(tmp_path.glob("w/serve/*/links"))


def test_engines_of_the_embedded_toolchain_several_at_once(other_host: Host, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    host = other_host
    engine = script_engine(tmp_path / "engine")
    names = ("one", "two", "three")
    for name in names:
        host.pipeline("serve", "start", str(engine), "--name", name, "--no-wait", "--threads", "1")
    said = [host.becomes(name, "ready") for name in names]
    assert len({port for each in said for port in each["ports"].values()}) == 9
    files = shared_memory(*said)
    for each in said:
        assert generated(each, "s") == "top-"
    table = process_table()
    of_one = with_descendants({said[0]["keeper_pid"]}, table)
    stubs = [pid for pid in of_one if b"python_backend_stub" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(stubs[0], signal.SIGKILL)
    assert "died" in host.becomes("one", "restarting")["reason"]
    log = Path(said[0]["folder"], "log")
    assert eventually(lambda: log.read_text().count("ready: http") == 2), log.read_text()
    assert host.becomes("one", "ready")["ports"] == said[0]["ports"]
    files |= shared_memory(said[0])
    os.kill(said[1]["keeper_pid"], signal.SIGKILL)
    assert "was killed" in host.becomes("two", "failed")["reason"]
    assert generated(said[2], "s") == "top-"
    assert host.pipeline("serve", "stop", "--all")[0].split() == sorted(names)
    assert eventually(lambda: not host.left()), host.left()
    assert not [path for path in files if path.exists()]
    assert not list(tmp_path.glob("w/serve/*/links"))
