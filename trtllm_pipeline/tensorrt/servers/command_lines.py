"""Command lines that start Triton, for launches and for plans that show them. Imports almost nothing."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from trtllm_pipeline.models import model_names

IMAGE_POOL: Final = 300_000_000
"""Bytes of GPU 0 for image features that Triton passes between models. Source: the templates' docs/multimodal.md."""
THREADS_VARIABLE: Final = "PIPELINE_ENGINE_THREADS"
"""Threads of the embedded engine model. 0 or unset: the model decides. A repository is the same for every machine."""
MPIRUN: Final = "mpirun"
"""The program on PATH."""
LOOPBACK: Final = "127.0.0.1"
_WITHOUT_MPIRUN: Final = (0, 19)
"""First release whose own launch script can start a single rank without mpirun."""
_NESTED: Final = ("SLURM_JOB_ID", "SLURM_JOBID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


class Ports(NamedTuple):
    """The three ports of a Triton server. A server that only speaks HTTP uses the first."""

    http: int
    grpc: int
    metrics: int


def address_options(host: str, ports: Ports) -> tuple[str, ...]:
    """Options that make a server listen on `ports` of `host` only."""
    return (
        *(f"--{name}-address={host}" for name in Ports._fields),
        *(f"--{name}-port={port}" for name, port in ports._asdict().items()),
    )


class OpenAiWays(NamedTuple):
    """Differences between OpenAI servers."""

    name: str | None
    """Name in messages. None for the program's name."""
    port: str
    """The option for it."""
    ready: str
    """The path that returns status 200 when the server is ready."""
    metrics: bool = False
    """True if its port has Triton's `/metrics`."""


TRTLLM_SERVE: Final = OpenAiWays(None, "--port", "/health")
TRITON_OPENAI: Final = OpenAiWays("Triton's OpenAI front end", "--openai-port", "/health/ready", metrics=True)
"""Source: python/openai of Triton's `server` repository: `main.py`, `routers/observability.py`."""


def openai_argv(command: Sequence[str], host: str, ports: Ports, ways: OpenAiWays = TRTLLM_SERVE) -> list[str]:
    """`command`, an OpenAI server's command line without address, at `host` and the first of `ports`."""
    return [*command, "--host", host, ways.port, str(ports.http)]


def triton_openai(python: str, program: str, repository: str, tokenizer: str) -> list[str]:
    """The command line of Triton's own OpenAI front end, without its address. `tokenizer` is the directory with the chat
    template. KServe's ports stay closed, which is its default.
    """
    return [python, program, "--model-repository", repository, "--tokenizer", tokenizer]


def shared_memory_option(prefix: str) -> str:
    """The option that sets the name prefix of all shared memory of Python models."""
    return f"--backend-config=python,shm-region-prefix-name={prefix}"


def launcher(world_size: int, release: str, mpirun: str | None) -> str | None:
    """The mpirun that starts an engine's ranks; None if Triton itself is the only rank. `mpirun` is the installed one.

    Several ranks need it. A single rank runs without it in every release. Up to 0.18 it is started by mpirun if possible,
    because the release's own launch script does so.
    """
    if world_size == 1 and (not script_uses_mpirun(release) or mpirun is None or nested()):
        return None
    return mpirun or MPIRUN


def script_uses_mpirun(release: str) -> bool:
    """True if the release's own launch script starts even a single rank with mpirun."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return match is None or (int(match[1]), int(match[2])) < _WITHOUT_MPIRUN


def nested() -> str | None:
    """Why mpirun cannot be started from this process, which is part of a parallel job; None if it is not."""
    variable = next((name for name in _NESTED if name in os.environ), None)
    if variable is None:
        return None
    return (
        f"mpirun cannot start inside a parallel job ({variable} is set): it would take that job's ranks for its own; "
        'see docs/clusters.md, "In a Slurm allocation"'
    )


def argv(
    server: str,
    repository: Path,
    ports: Ports,
    world_size: int,
    *,
    mpirun: str | None,
    run_prefix: str,
    root: bool,
    log: Path | None,
    host: str = LOOPBACK,
    options: Sequence[str] = (),
    images: bool = False,
) -> list[str]:
    """The command line that starts `world_size` ranks of the Triton at `server` by `mpirun`, the result of `launcher`.
    With `images`, the repository has a visual engine.

    `run_prefix` is the name prefix of all shared memory of this run. Each rank appends its number. mpirun writes the
    output of rank N to `log`/*/rank.N/stdout, or forwards all if that is None. `options` go to every rank. `root`
    allows mpirun to run as root.
    """
    every = [server, f"--model-repository={repository}", "--disable-auto-complete-config", *options]
    # Only rank 0 gets ports. With the same ports, the other ranks would only stay off them because the engine model never
    # finishes loading there. A rank that did would accept requests it cannot answer.
    first = (*address_options(host, ports), *([f"--cuda-memory-pool-byte-size=0:{IMAGE_POOL}"] if images else []))
    other = (
        "--model-control-mode=explicit",
        *(
            f"--load-model={name}"
            for name in (model_names.ENGINE_MODEL, *([model_names.ENCODERS_MODEL] if images else []))
        ),
        *(f"--allow-{name}=false" for name in Ports._fields),
    )
    ranks = [
        [*every, *(other if rank else first), shared_memory_option(f"{run_prefix}{rank}_")]
        for rank in range(world_size)
    ]
    if mpirun is None:
        (alone,) = ranks
        return alone
    command = [mpirun]
    if root:
        command.append("--allow-run-as-root")
    # mpirun refuses more ranks than cores by default, but ranks mostly wait for GPUs. Called by its path, it would put its
    # own directories first on PATH and LD_LIBRARY_PATH. It would bind each of up to two ranks to one core, and rank 0 has
    # tokenizers and an HTTP server to run.
    command += ["--oversubscribe", "--noprefix", "--bind-to", "none"]
    if log is not None:
        command += ["--merge-stderr-to-stdout", "--output-filename", f"{log}:nocopy"]
    for rank, words in enumerate(ranks):
        command += [":"] * bool(rank) + ["-n", "1", *words]
    return command


def reachable(host: str) -> str | None:
    """A warning for an address that other machines can reach. None for a loopback address."""
    try:
        own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = host == "localhost"
    if own:
        return None
    return (
        f"the server listens on {host}: anyone who can reach it can send prompts, see its models and read its "
        "metrics, without login or encryption; docs/security.md shows how to add both with a proxy"
    )
