"""Kill or halt processes of managed servers at random instants, repeat, and check the reported states and the remains.

    python benchmarks/kill_servers.py --workspace WORKSPACE --cell '*/int8_wo/*/bs4' --rounds 30

Two managed servers run behind OpenAI endpoints, one of them with --restart. Each round kills (-9) or halts one process of one
server, or all of them, at a random instant: while it is ready, starts, stops or is restarted. Then it checks that the server
reaches an allowed state, that `serve ps` and `serve status` report it, that the other server still responds, that `serve stop`
ends the server without leaving a process, port, shared memory, directory or lock, and that it can be started again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from kill_resume import processes

from trtllm_pipeline.base.processes.guardian import process_table, with_descendants
from trtllm_pipeline.orchestrate.store import claims
from trtllm_pipeline.serve.kept import servers
from trtllm_pipeline.serve.kept.servers import State
from trtllm_pipeline.tensorrt.servers.triton_server import busy_ports

PARTS = ("keeper", "guardian", "launch", "tritonserver", "stub", "gateway", "all")
MOMENTS = {"ready": 1.0, "start": 6.0, "stop": 2.5, "restart": 8.0}
"""When it is killed, and how many seconds later at most."""
SETTLED_S = 60.0
COMMAND_S = 120.0


@dataclass
class Rounds:
    """The servers, and what was found."""

    workspace: Path
    cell: str
    mark: str
    chance: random.Random
    faults: list[str] = field(default_factory=list)
    counts: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    launches: set[int] = field(default_factory=set)
    """Processes that have started a Triton: the names of its shared memory have them."""

    def command(self, *words: str) -> subprocess.Popen[str]:
        """`pipeline serve` in a separate process."""
        return subprocess.Popen(
            [sys.executable, "-m", "trtllm_pipeline", "serve", *words, "-w", str(self.workspace)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process: subprocess.Popen[str], *, may_fail: bool = False) -> str:
        """Output of a command. A failure, hang or crash is a fault."""
        words = " ".join(process.args[3:6]) if isinstance(process.args, list) else ""
        try:
            out, err = process.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            self.fault(f"{words} has not ended after {COMMAND_S:.0f} s")
            return ""
        if "Traceback" in err or (process.returncode and not may_fail):
            self.fault(f"{words} ended with {process.returncode}: {err.strip()[-600:]}")
        return out

    def fault(self, text: str) -> None:
        """Note what must not be."""
        self.faults.append(text)
        print(f"  FAULT {text}", flush=True)

    def starting(self, name: str) -> subprocess.Popen[str]:
        """Start a server, with its previous options if it is known."""
        if (servers.folder_of(self.workspace, name) / servers.SERVER_FILE).exists():
            return self.command("restart", name)
        options = ("--restart", "--unresponsive-timeout-s", "3") if name == "again" else ()
        return self.command("start", self.cell, "--openai", "--name", name, "--threads", "1", *options)

    def look(self, name: str) -> servers.KeptServer:
        """How it stands."""
        return servers.look(servers.folder_of(self.workspace, name))

    def parts(self, name: str) -> dict[str, list[int]]:
        """The processes of a server by what they are, in all that its commands have started."""
        folder, table = str(servers.folder_of(self.workspace, name)), process_table()
        named: dict[str, list[int]] = {part: [] for part in PARTS}
        for pid in processes(folder):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace") if pid in table else ""
            for part, sign in (
                ("keeper", "serve.kept.keeper"),
                ("launch", "tensorrt.worker"),
                ("stub", "python_backend_stub"),
                ("tritonserver", "tritonserver\0--model"),
                ("gateway", "serve.gateway"),
            ):
                if sign in words and pid in table:
                    named[part].append(pid)
                    break
        named["guardian"] = [pid for pid, each in table.items() if each.parent in named["keeper"]]
        named["all"] = sorted(with_descendants({pid for each in named.values() for pid in each}, table))
        self.launches.update(named["launch"])
        return named

    def answers(self, name: str) -> str | None:
        """Reason why a server that is reported as ready does not respond, None if it does."""
        endpoint = self.look(name).endpoint()
        if endpoint is None:
            return f"it is {self.look(name).state.value}"
        body = {"model": endpoint.model, "prompt": "One, two", "max_tokens": 2}
        try:
            answer = httpx.post(f"{endpoint.openai}/completions", json=body, timeout=20)
        except httpx.HTTPError as error:
            return repr(error)
        return None if answer.is_success else f"{answer.status_code} {answer.text[:200]}"

    def round(self, number: int) -> None:
        """One kill, and all that is looked at after it."""
        chance = self.chance
        name = chance.choice(("once", "again"))
        other = "again" if name == "once" else "once"
        for process in [self.starting(each) for each in (name, other) if self.look(each).state is not State.READY]:
            self.end(process)
        moment = chance.choice(("ready", *MOMENTS))
        signo = signal.SIGSTOP if chance.random() < 0.25 else signal.SIGKILL
        if moment == "start":
            self.end(self.command("stop", name, *(["--remove"] if chance.random() < 0.5 else [])))
        running = None
        if moment != "ready":
            running = self.starting(name) if moment == "start" else self.command(moment, name)
        after_s = chance.uniform(0, MOMENTS[moment])
        time.sleep(after_s)
        wanted = chance.choice(PARTS[:-1] if signo is signal.SIGSTOP else PARTS)
        present = {part: pids for part, pids in self.parts(name).items() if pids}
        part = wanted if wanted in present else chance.choice(sorted(present)) if present else "nothing"
        chosen = present.get(part, []) if part == "all" else [chance.choice(present[part])] if present else []
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, signo)
        verb = "halted" if signo is signal.SIGSTOP else "killed"
        if running is not None:
            self.end(running, may_fail=part != "nothing")
        state = self.settled(name, moment, part, verb)
        print(f"{number:3} {name:5} {part:12} {verb} {after_s:.1f} s into {moment:7} -> {state}", flush=True)
        self.counts[moment, verb, part, state] += 1
        if why := self.answers(other):
            self.fault(f"{other}, which was left alone, does not respond: {why}")
        self.stopped(name)

    def settled(self, name: str, moment: str, part: str, verb: str) -> str:
        """How the server ends up, and whether that is so and may be so."""
        halted = verb == "halted"
        deadline = time.monotonic() + SETTLED_S
        # A halted keeper reports nothing. It is woken while its server starts.
        quiet_s = 9.0 if halted else 1.0
        since, before = time.monotonic(), self.look(name).state
        while time.monotonic() < deadline:
            state = self.look(name).state
            if state is not before:
                since, before = time.monotonic(), state
            moving = state not in {State.READY, State.STOPPED, State.FAILED, State.UNRESPONSIVE}
            restarts = name == "again" and state is State.UNRESPONSIVE
            if not (moving or restarts) and time.monotonic() - since > quiet_s:
                break
            time.sleep(0.1)
        self.parts(name)
        status = json.loads(self.end(self.command("status", name, "--format", "json")) or '{"servers": []}')["servers"]
        listed = json.loads(self.end(self.command("ps", "--format", "json")) or '{"servers": []}')["servers"]
        (of_status,) = status or [{}]
        listed_as = next((each["state"] for each in listed if each["name"] == name), None)
        reported = str(of_status.get("state"))
        if reported != listed_as:
            self.fault(f"{name}: status says {reported}, ps {listed_as}")
        self.check(name, reported, of_status, halted=halted)
        may_be = {"stopped", "failed", "ready"} if moment == "stop" else {"failed", "ready"}
        if halted:
            may_be |= {"unresponsive", "starting", "restarting", "stopping"}
        if verb == "killed" and moment in {"ready", "restart"} and name == "again" and part not in {"keeper", "all"}:
            may_be -= {"failed"} if moment == "ready" else set()
        if moment in {"restart", "start"}:
            may_be |= {"stopped"} if part in {"nothing", "keeper", "all"} or halted else set()
        if reported not in may_be:
            self.fault(f"{name} is {reported} ({of_status.get('reason')}), expected {sorted(may_be)}")
        return reported

    def check(self, name: str, state: str, status: dict[str, Any], *, halted: bool) -> None:
        """Hold what is said of a server against what is so."""
        alive = self.parts(name)["all"]
        if state in {"stopped", "failed"}:
            if alive:
                self.fault(f"{name} is said to be {state}, and processes {alive} of it live")
            if not status.get("reason"):
                self.fault(f"{name} is {state}, without a reason")
        elif not alive:
            self.fault(f"{name} is said to be {state}, and no process of it lives")
        if state == "ready" and not halted and (why := self.answers(name)):
            self.fault(f"{name} is reported as ready and does not respond: {why}")

    def stopped(self, name: str) -> None:
        """Stop a server and check that nothing of it is left."""
        record = self.look(name).record
        ports = {} if record is None else record.ports
        self.end(self.command("stop", name))
        view = self.look(name)
        if view.state.alive:
            self.fault(f"{name} is {view.state.value} after its stop")
        if left := self.parts(name)["all"]:
            self.fault(f"after the stop of {name} processes {left} are left")
        if servers.is_held(view.folder):
            self.fault(f"after the stop of {name} its lock is held")
        if taken := busy_ports(ports.values()):
            self.fault(f"after the stop of {name} ports {taken} are taken")
        theirs = self.launches & set(self.parts("once")["launch"] + self.parts("again")["launch"])
        if files := self.leftovers(self.launches - theirs):
            self.fault(f"after the stop of {name} there are {files}")

    def leftovers(self, launches: set[int]) -> list[str]:
        """Shared memory and directories of the Tritons that these processes started."""
        prefixes = tuple(f"trtllm-pipeline-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-" for pid in launches)
        remains = [str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(prefixes)]
        for folder in os.listdir(tempfile.gettempdir()):
            if folder.startswith("python_env_"):
                with suppress(OSError, UnicodeDecodeError):  # other servers come and go
                    inside = [each for each in Path(tempfile.gettempdir(), folder).iterdir() if each.is_file()]
                    remains += [str(each) for each in inside if each.read_bytes()[:200].decode().startswith(prefixes)]
        return remains if prefixes else []


def main() -> int:
    """Run the rounds. Returns 0 without faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", required=True, help="workspace of the cell")
    parser.add_argument("--cell", default="*/int8_wo/*/bs4")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--longest", type=float, default=3600.0, help="seconds after which no other round starts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mark, folder = f"KILL_SERVERS_{uuid.uuid4().hex}", tempfile.mkdtemp(prefix="kill-servers-")
    os.environ |= {mark: "1", "XDG_RUNTIME_DIR": folder}  # separate leases
    rounds = Rounds(Path(args.workspace).absolute(), args.cell, mark, random.Random(args.seed))
    began, done = time.monotonic(), 0
    try:
        while done < args.rounds and time.monotonic() - began < args.longest:
            done += 1
            rounds.round(done)
    finally:
        rounds.end(rounds.command("stop", "--all", "--remove"))
        if left := processes(mark, "environ"):
            rounds.fault(f"at the end processes {left} are left")
        if claims.is_held(claims.machine_leases() / "machine"):
            rounds.fault("at the end the machine is leased")
        if files := rounds.leftovers(rounds.launches):
            rounds.fault(f"at the end there are {files}")
        shutil.rmtree(folder)
    print(f"\n{'while':8} {'what':7} {'part':13} {'became':13} rounds")
    for (moment, verb, part, state), count in sorted(rounds.counts.items()):
        print(f"{moment:8} {verb:7} {part:13} {state:13} {count}")
    print(f"{done} rounds in {time.monotonic() - began:.0f} s, {len(rounds.faults)} faults")
    return 1 if rounds.faults else 0


if __name__ == "__main__":
    sys.exit(main())
