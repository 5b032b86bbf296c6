"""Triton under mpirun: one engine on as many ranks as it was built for.

Rank 0 is the server for clients. The others only run TensorRT-LLM's worker: they load the engine and do not listen.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, Group, ServerError, guardian, running_since, triton_installation
from trtllm_pipeline.models import model_names
from trtllm_pipeline.tensorrt.servers import links, triton_server
from trtllm_pipeline.tensorrt.servers.command_lines import LOOPBACK, Ports, argv, nested
from trtllm_pipeline.tensorrt.servers.pasted import PastedCommand

RANKS_FOLDER: Final = "ranks"
"""Next to mpirun's log: the logs of the ranks."""
_VARIABLES: Final = {"OMPI_MCA_plm_rsh_agent": ""}
"""All ranks run on this host, and mpirun fails without ssh or rsh unless this option is empty."""
_RANK: Final = re.compile(rb"(?:^|\0)(?:OMPI_COMM_WORLD_RANK|PMIX_RANK)=(\d+)")
_LAST_WORDS_S: Final = 1.3
"""mpirun reports the first rank that exited about 1.1 s later, once it has ended the others."""
_ALL_WORDS_S: Final = 5.0
"""The time if other ranks do not exit on request."""
# The reports of Open MPI 4 and 5 about the first rank that exited: by a signal, with an exit status, or by MPI_Abort.
_ENDED: Final = (
    (re.compile(r"process rank (\d+) with PID \d+ [^\n]*exited on\s+signal (\d+)"), -1),
    (re.compile(r"Process name: \[\S*,(\d+)\]\s+Exit code:\s+(\d+)"), 1),
    (re.compile(r"MPI_ABORT was invoked on rank (\d+)[^\n]*\s+(?:Proc: [^\n]*\s+)?(?:with )?[Ee]rrorcode:? (\d+)"), 1),
)


class Ranks(Group):
    """mpirun with its ranks. It counts as ended once one rank has ended, because the others would wait for it forever.

    `mpirun` is false if the command itself is the only rank.
    """

    def __init__(
        self, command: Sequence[str], world_size: int, *, mpirun: bool, env: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        super().__init__(command, env=env, cwd=cwd, log=log)
        self.world_size = world_size
        self.mpirun = mpirun
        self.ranks: dict[int, tuple[int, guardian.Process]] = {}
        """Rank -> process id and its entry in the process table. Complete shortly after the start."""

    def poll(self) -> int | None:
        """Exit status of mpirun; 1 if a rank has ended before it."""
        status = self.wait(0.0)
        return 1 if status is None and self.dead() else status

    def dead(self) -> list[int]:
        """Ranks that were running and have ended."""
        self.started()
        return [rank for rank, (pid, known) in sorted(self.ranks.items()) if running_since(pid) != known.start_time]

    def interrupt(self) -> None:
        """Interrupt the ranks, but not mpirun, which would kill them a second later."""
        self.started()
        for pid, known in self.ranks.values():
            if running_since(pid) == known.start_time:
                guardian.kill(pid, signal.SIGINT)

    def started(self) -> list[int]:
        """Process ids of the ranks that have started, in order, including those that have ended."""
        if len(self.ranks) < self.world_size:
            if self.mpirun:
                children = ((pid, each) for pid, each in guardian.process_table().items() if each.parent == self.pid)
                new = {rank: child for child in children if (rank := _rank(child[0])) is not None}
            else:
                new = {0: (self.pid, alone)} if (alone := guardian.look_up(self.pid)) else {}
            self.ranks = {**new, **self.ranks}
        return [pid for _, (pid, _) in sorted(self.ranks.items())]


def _rank(pid: int) -> int | None:
    """The rank that mpirun assigned to this process. None if it is still starting."""
    match = _RANK.search(guardian.proc_file(pid, "environ"))
    return int(match[1]) if match else None


@dataclass(kw_only=True)
class World(triton_server.RunningTriton):
    """Running ranks. `output` is that of mpirun, or of the only rank without mpirun."""

    process: Ranks

    @property
    def folder(self) -> Path:
        """The directory of the ranks' logs."""
        return self.output.parent / RANKS_FOLDER

    @property
    def log(self) -> Path:
        """The log of rank 0, the server for clients."""
        return self.rank_log(0)

    @property
    def pids(self) -> list[int]:
        return self.process.started()

    def rank_log(self, rank: int) -> Path:
        for path in self.folder.glob("*/rank.*/stdout"):  # Open MPI 4 pads the number with zeros
            if int(path.parent.name.removeprefix("rank.")) == rank:
                return path
        return next(self.folder.parent.glob(f"{self.folder.name}.*.{rank}.out"), self.output)  # Open MPI 5

    def died(self) -> ServerError:
        """The error for its end: names the rank that ended first, and quotes the end of that rank's log."""
        rank, status = self._first_dead()
        if rank is None:
            who, log = "mpirun" if self.process.mpirun else self.name, self.output
        else:
            who, log = f"rank {rank} of {self.process.world_size}", self.rank_log(rank)
        others = [path for path in (*sorted(self.folder.glob("*/rank.*/stdout")), self.output) if path != log]
        return triton_server.diagnose(status, log, who, before=self.before, beside=others)

    def _first_dead(self) -> tuple[int | None, int | None]:
        """The rank that ended first, None if no rank did, and its exit status if it is known."""
        if not self.process.mpirun:
            return None, self.process.wait(_LAST_WORDS_S)
        begin = time.monotonic()
        while True:
            ended = self.process.wait(0.05) is not None
            dead = self.process.dead()
            alone = len(dead) == 1  # with several, only mpirun knows the first
            over = ended or time.monotonic() > begin + (_LAST_WORDS_S if alone else _ALL_WORDS_S)
            output = self.output.read_text(encoding="utf-8", errors="replace")
            for pattern, sign in _ENDED:
                if match := pattern.search(output):
                    return int(match[1]), sign * int(match[2])
            if over:
                return (dead[0], None) if alone else (None, self.process.returncode)

    def service(self) -> dict[str, object]:
        """The information for clients. Raises OSError or HttpError if rank 0 does not respond."""
        return {**super().service(), "ranks": self.pids, "log": str(self.log.relative_to(self.output.parent))}

    def stop(self, timeout_s: float) -> int | None:
        """Interrupt the ranks, terminate and then kill all processes, and remove their shared memory."""
        self._mark_folders()
        status = self.process.stop(timeout_s)
        triton_server.remove_leftovers(self.prefix)
        return status


def start(
    triton_: triton_installation.TritonInstallation,
    repository: Path,
    world_size: int,
    *,
    mpirun: str | None,
    log: Path,
    ports: Ports,
    host: str = LOOPBACK,
) -> World:
    """Start `world_size` ranks on `repository`; see `argv`. mpirun writes to `log`, the ranks to files next to it.

    Raises ServerError if mpirun is missing or cannot be used.
    """
    if mpirun is not None:
        check_mpirun(mpirun)
    triton_server.remove_stale_leftovers()
    started = time.time()
    prefix = triton_server.new_prefix()
    loaded = _models(repository)
    linked, backends = triton_server.link(triton_, repository, log.parent / "links")
    folder = log.parent / RANKS_FOLDER
    command = argv(
        str(triton_.binary),
        linked,
        ports,
        world_size,
        mpirun=mpirun,
        run_prefix=prefix,
        root=os.geteuid() == 0,
        log=links.plain(log.parent) / folder.name,
        host=host,
        options=_options(triton_, backends),
        images=model_names.ENCODERS_MODEL in loaded,
    )
    shutil.rmtree(folder, ignore_errors=True)  # from an earlier start
    log.write_bytes(b"")
    environment = {**_VARIABLES, **triton_server.environment(triton_)}
    process = Ranks(
        triton_server.private(command), world_size, mpirun=mpirun is not None, env=environment, cwd=log.parent, log=log
    )
    return World(
        process=process,
        ports=ports,
        output=log,
        host=triton_server.reached_at(host),
        prefix=prefix,
        models=_client_models(loaded),
        loaded=loaded,
        started=started,
    )


def pasted_command(
    triton_: triton_installation.TritonInstallation,
    repository: Path,
    world_size: int,
    *,
    mpirun: str | None,
    ports: Ports,
    host: str,
) -> PastedCommand:
    """The command that starts `world_size` ranks on links to `repository`. mpirun prints the ranks' logs."""
    models, backends, before = triton_server.pasted_folders(triton_, repository)
    words = argv(
        str(triton_.binary),
        models,
        ports,
        world_size,
        mpirun=mpirun,
        # Not ours: leftovers with our prefix are removed once their pipeline has ended.
        run_prefix=f"ranks-{uuid.uuid4().hex[:8]}-",
        root=os.geteuid() == 0,
        log=None,
        host=host,
        options=_options(triton_, backends),
        images=model_names.ENCODERS_MODEL in _models(repository),
    )
    return triton_server.pasted(triton_, words, _VARIABLES if mpirun else {}, before)


def _options(triton_: triton_installation.TritonInstallation, backends: object) -> list[str]:
    """Options of every rank."""
    folder = [] if triton_.stubs is None else [f"--backend-directory={backends}"]
    exit_after = f"--exit-timeout-secs={triton_server.EXIT_TIMEOUT_S}"
    return [*folder, *triton_server.closing_options(triton_)[0], exit_after]


def _models(repository: Path) -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in repository.glob("*/config.pbtxt")))


def _client_models(loaded: tuple[str, ...]) -> tuple[str, ...]:
    """The models that clients use, the default first. Only one of them has help from a draft model."""
    models = (
        (model_names.BLS_MODEL,) if model_names.DRAFT_MODEL in loaded else (model_names.ENSEMBLE, model_names.BLS_MODEL)
    )
    return tuple(model for model in models if model in loaded) or (model_names.ENGINE_MODEL,)


def check_mpirun(mpirun: str) -> None:
    """Raise ServerError if `mpirun` does not exist or this process is part of a parallel job."""
    if shutil.which(mpirun) is None:
        raise ServerError(
            f"{mpirun} was not found; it starts the ranks of an engine on several GPUs",
            failure=FailureClass.USER,
            hint="use an NGC container, or on Debian and Ubuntu: apt install openmpi-bin",
        )
    if reason := nested():
        raise ServerError(
            reason,
            failure=FailureClass.USER,
            hint="on one node, unset the job's variables first; on several nodes, start the ranks with srun --mpi=pmix",
        )
