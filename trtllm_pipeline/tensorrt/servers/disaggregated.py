"""Disaggregated serving: servers of `trtllm-serve` that read prompts, others that generate, and their router.

Each server has its own GPUs and log file, and only listens on the loopback address. Clients reach the router, which
`trtllm-serve disaggregated` starts. It waits for the servers. All of them end together.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Group, ServerError, gpus, without_secrets
from trtllm_pipeline.tensorrt.servers.command_lines import LOOPBACK, Ports
from trtllm_pipeline.tensorrt.servers.pasted import PastedCommand
from trtllm_pipeline.tensorrt.servers.server_process import diagnose
from trtllm_pipeline.tensorrt.servers.triton_server import reached_at, unused_ports
from trtllm_pipeline.tensorrt.servers.trtllm_serve import OpenAiServer

CONFIG_FILE: Final = "disaggregated.yaml"
"""Next to the router's log: its configuration."""
_REQUEST_TIMEOUT_S: Final = 24 * 3600
"""The router's limit for a request. Its default, 180 s, would cut off long answers under load."""
_ROUTER: Final = "router"


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of a cell: command lines without addresses, the number of each kind, and the GPUs of each."""

    context: Sequence[str]
    generation: Sequence[str]
    contexts: int
    generations: int
    context_gpus: int
    generation_gpus: int
    router: Sequence[str]
    """Its command line without a configuration."""

    @property
    def each(self) -> list[tuple[str, Sequence[str], int]]:
        """Name, command line and GPUs of each server: context0, context1, generation0. Log files have these names."""
        contexts = [(f"context{number}", self.context, self.context_gpus) for number in range(self.contexts)]
        generations = [(f"generation{n}", self.generation, self.generation_gpus) for n in range(self.generations)]
        return [*contexts, *generations]

    @property
    def gpus(self) -> int:
        return sum(gpus for _, _, gpus in self.each)

    def started(self, ports: Sequence[int], devices: Sequence[str]) -> Iterator[tuple[str, list[str], str]]:
        """Name, command line and CUDA_VISIBLE_DEVICES of each server. Raises ServerError for too few `devices`."""
        left = iter(devices)
        for (name, command, wanted), port in zip(self.each, ports, strict=True):
            own = [*islice(left, wanted)]
            if len(own) < wanted:
                raise ServerError(f"the servers need {self.gpus} GPUs, and {len(devices)} are visible")
            yield name, _at(command, port), ",".join(own)

    def config(self, host: str, port: int | str, ports: Sequence[int | str]) -> dict[str, object]:
        """The router's configuration. Source: examples/disaggregated, and `extract_disagg_cfg` of disagg_utils.py."""
        urls = [f"{LOOPBACK}:{each}" for each in ports]
        contexts, generations = urls[: self.contexts], urls[self.contexts :]
        return {
            "hostname": host,
            "port": port,
            "context_servers": {"num_instances": self.contexts, "urls": contexts},
            "generation_servers": {"num_instances": self.generations, "urls": generations},
        }

    def router_command(self, config: str, timeout_s: float) -> list[str]:
        """The router's command line. It waits `timeout_s` for the servers."""
        limits = ("-t", str(max(1, round(timeout_s))), "-r", str(_REQUEST_TIMEOUT_S))
        return [*self.router, f"--config_file={config}", *limits]


def _at(command: Sequence[str], port: int | str) -> list[str]:
    return [*command, "--host", LOOPBACK, "--port", str(port)]


class Processes:
    """The router and its servers. They count as ended once one of them has ended."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self.groups = groups

    @property
    def pid(self) -> int:
        """Process id of the router."""
        return self.groups[_ROUTER].pid

    def ended(self) -> tuple[str, int] | None:
        """Name and exit status of the first that has ended. Servers come before the router, which fails without them."""
        for name, group in self.groups.items():
            if (status := group.poll()) is not None:
                return name, status
        return None

    def poll(self) -> int | None:
        """Exit status of the first that has ended; 1 if it ended without an error. None while all run."""
        ended = self.ended()
        return None if ended is None else ended[1] or 1

    def stop(self, timeout_s: float) -> int | None:
        """Interrupt all of them, then terminate and kill the rest."""
        running = [group for group in self.groups.values() if group.poll() is None]
        for group in running:
            group.interrupt()
        for group in self.groups.values():
            group.stop(timeout_s)
        return self.groups[_ROUTER].returncode if _ROUTER in self.groups else None


@dataclass(kw_only=True)
class DisaggregatedServer(OpenAiServer):
    """A running router with its servers. `output` is the router's."""

    process: Processes

    def died(self) -> ServerError:
        """The error for the end of the first that ended, by its log. The logs of the others follow."""
        name, status = self.process.ended() or (_ROUTER, None)
        logs = {each: log_of(self.output, each) for each in self.process.groups}
        others = [path for each, path in logs.items() if each != name]
        return diagnose(f"{self.name}: {name}", status, logs[name], before=self.before, beside=others)


def log_of(log: Path, name: str) -> Path:
    """The log file of a server, next to the router's `log`."""
    return log if name == _ROUTER else log.with_name(f"{name}.log")


def start(servers: Servers, *, log: Path, ports: Ports, host: str, timeout_s: float) -> DisaggregatedServer:
    """Start the servers and the router, at `host` and the first of `ports`. Raises ServerError if one cannot be started."""
    own = unused_ports(len(servers.each))
    config = log.with_name(CONFIG_FILE)
    config.write_text(json.dumps(servers.config(host, ports.http, own), indent=2) + "\n", encoding="utf-8")
    environment = without_secrets(os.environ)
    mask = os.environ.get(gpus.MASK_VARIABLE)
    devices = mask.split(",") if mask else [each.gpu.uuid for each in gpus.look().devices]
    groups: dict[str, Group] = {}
    try:
        for name, command, device in servers.started(own, devices):
            variables = {**environment, gpus.MASK_VARIABLE: device}
            groups[name] = Group(command, env=variables, cwd=log.parent, log=log_of(log, name))
        command = servers.router_command(str(config), timeout_s)
        groups[_ROUTER] = Group(command, env=environment, cwd=log.parent, log=log)
    except BaseException:
        Processes(groups).stop(0.0)
        raise
    return DisaggregatedServer(
        process=Processes(groups),
        ports=ports,
        output=log,
        name=Path(servers.router[0]).name,
        host=reached_at(host),
        names_port=own[-1],  # the router does not report the model's name
    )


def pasted_command(servers: Servers, *, ports: Ports, host: str, timeout_s: float) -> PastedCommand:
    """The command that starts all of them in a shell: servers at the ports after the router's three, on the visible GPUs."""
    own = [ports.metrics + 1 + number for number in range(len(servers.each))]
    mask = os.environ.get(gpus.MASK_VARIABLE)
    devices = mask.split(",") if mask else [str(number) for number in range(servers.gpus)]
    lines = [
        f"{gpus.MASK_VARIABLE}={shlex.quote(device)} {shlex.join(command)} &"
        for _, command, device in servers.started(own, devices)
    ]
    config = shlex.quote(json.dumps(servers.config(host, ports.http, own)))
    return PastedCommand(
        servers.router_command("$config", timeout_s),
        before={"config": "$(mktemp)"},
        beside=[*lines, f'printf "%s" {config} > "$config"'],
    )


def planned(servers: Servers, attempt: Path, timeout_s: float) -> list[list[str]]:
    """The command lines of the servers and the router, for a plan."""
    commands = [_at(command, f"{{{name}_port}}") for name, command, _ in servers.each]
    return [*commands, servers.router_command(str(attempt / CONFIG_FILE), timeout_s)]
