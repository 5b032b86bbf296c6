"""The command line of a world of ranks, and what mpirun says when one of them ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.tensorrt.servers import command_lines, mpi_server
from trtllm_pipeline.tensorrt.servers.server_process import Ports

PORTS = Ports(8000, 8001, 8002)


def argv(world_size: int, mpirun: str | None = "mpirun", **changes: Any) -> list[str]:
    options: dict[str, Any] = {
        "mpirun": mpirun,
        "run_prefix": "run-",
        "root": False,
        "log": Path("/logs"),
        **changes,
    }
    return mpi_server.argv("/t/tritonserver", Path("/models"), PORTS, world_size, **options)


def split(words: list[str]) -> tuple[list[str], list[list[str]]]:
    """Options of mpirun, and the command of each rank."""
    assert words[0] == "mpirun"
    start = words.index("-n")
    commands: list[list[str]] = []
    for word in [":", *words[start:]]:
        if word == ":":
            commands.append([])
        else:
            commands[-1].append(word)
    assert all(command[:2] == ["-n", "1"] for command in commands)
    return words[1:start], [command[2:] for command in commands]


@pytest.mark.parametrize(
    ("world_size", "release", "used"),
    [
        (1, "0.8.0", True),
        (1, "0.18.2", True),
        (1, "0.19.0", False),
        (1, "1.2.0", False),
        (1, "1.3.0rc3", False),
        (2, "0.8.0", True),
        (2, "1.2.0", True),
        (1, "unknown", True),
    ],
)
def test_one_rank_is_started_as_the_release_does_and_needs_no_mpirun(
    monkeypatch: pytest.MonkeyPatch, world_size: int, release: str, used: bool
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert command_lines.launcher(world_size, release, "/m/mpirun") == ("/m/mpirun" if used else None)
    assert command_lines.launcher(world_size, release, None) == ("mpirun" if world_size > 1 else None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert command_lines.launcher(world_size, release, "/m/mpirun") == ("/m/mpirun" if world_size > 1 else None)


def test_rank_0_alone_has_ports_and_each_rank_its_own_shared_memory() -> None:
    _, commands = split(argv(4))
    assert len(commands) == 4
    for rank, command in enumerate(commands):
        assert command[:3] == ["/t/tritonserver", "--model-repository=/models", "--disable-auto-complete-config"]
        assert f"--backend-config=python,shm-region-prefix-name=run-{rank}_" in command
        assert ("--http-port=8000" in command) is (rank == 0)
        assert ("--grpc-address=127.0.0.1" in command) is (rank == 0)
        assert ("--allow-metrics=false" in command) is (rank != 0)
        assert ("--load-model=tensorrt_llm" in command) is (rank != 0)
        assert ("--model-control-mode=explicit" in command) is (rank != 0)


def test_every_rank_loads_what_sees_and_rank_0_hands_features_on() -> None:
    pool = "--cuda-memory-pool-byte-size=0:300000000"
    for rank, command in enumerate(split(argv(2, images=True))[1]):
        assert (pool in command) is (rank == 0)
        assert ("--load-model=multimodal_encoders" in command) is (rank != 0)
    assert not [word for word in argv(2) if "multimodal" in word or word == pool]


def test_what_mpirun_is_told() -> None:
    plain, _ = split(argv(2))
    assert "--allow-run-as-root" not in plain
    assert "--oversubscribe" in plain
    assert plain[plain.index("--bind-to") + 1] == "none"
    assert plain[plain.index("--output-filename") + 1] == "/logs:nocopy"
    as_root, _ = split(argv(2, root=True))
    assert "--allow-run-as-root" in as_root


def test_an_mpirun_off_path_is_called_by_its_path() -> None:
    words = argv(2, mpirun="/usr/local/mpi/bin/mpirun")
    assert words[0] == "/usr/local/mpi/bin/mpirun"
    assert "--noprefix" in words, "its directory would come before those on PATH"
    assert words[1:] == argv(2)[1:]


def test_an_mpirun_that_is_not_there_is_named_with_what_needs_it() -> None:
    with pytest.raises(
        ServerError, match=r"/opt/none/mpirun was not found; it starts the ranks of an engine on several GPUs"
    ) as error:
        mpi_server.check_mpirun("/opt/none/mpirun")
    assert error.value.failure is FailureClass.USER


def test_a_single_server_is_started_as_it_is() -> None:
    words = argv(1, None, host="0.0.0.0", options=("--exit-timeout-secs=1",))
    assert words == [
        "/t/tritonserver",
        "--model-repository=/models",
        "--disable-auto-complete-config",
        "--exit-timeout-secs=1",
        "--http-address=0.0.0.0",
        "--grpc-address=0.0.0.0",
        "--metrics-address=0.0.0.0",
        "--http-port=8000",
        "--grpc-port=8001",
        "--metrics-port=8002",
        "--backend-config=python,shm-region-prefix-name=run-0_",
    ]


def world(process: SimpleNamespace, output: Path) -> mpi_server.World:
    ranks = cast("mpi_server.Ranks", cast("Any", process))
    return mpi_server.World(process=ranks, ports=PORTS, output=output, prefix="run-", models=(), loaded=())


SIGNAL = """
--------------------------------------------------------------------------
{0} noticed that process rank 1 with PID 4711 on node host exited on signal 9 (Killed).
--------------------------------------------------------------------------
"""
SIGNAL_5 = """
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 4711 on node host exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
STATUS = """
{0} detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: {1}
  Exit code:    3
--------------------------------------------------------------------------
"""
ABORT = """
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
with errorcode 5.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
"""
ABORT_5 = """
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[21161,1],1]
  Errorcode: 5

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
"""


@pytest.mark.parametrize(
    ("said", "words", "failure"),
    [
        (SIGNAL.format("mpirun"), "rank 1 of 4 was ended by signal SIGKILL", FailureClass.BUG),
        (SIGNAL_5, "rank 1 of 4 was ended by signal SIGKILL", FailureClass.BUG),
        (ABORT_5, "rank 1 of 4 ended with exit status 5", FailureClass.BUG),
        (STATUS.format("mpirun", "[[27443,1],1]"), "rank 1 of 4 ended with exit status 3", FailureClass.BUG),
        (
            STATUS.format("prterun", "[prterun-host-27443@1,1]"),
            "rank 1 of 4 ended with exit status 3",
            FailureClass.BUG,
        ),
        (ABORT, "rank 1 of 4 ended with exit status 5", FailureClass.BUG),
        (
            "ImportError: libmpi.so.40: cannot open shared object file\n",
            "mpirun ended with exit status 1",
            FailureClass.USER,
        ),
    ],
)
def test_the_rank_that_ended_first_is_named_with_its_log(
    tmp_path: Path, said: str, words: str, failure: FailureClass
) -> None:
    output = tmp_path / "server.log"
    output.write_text(said)
    log = tmp_path / "ranks" / "1" / "rank.1" / "stdout"
    log.parent.mkdir(parents=True)
    log.write_text("the last words of rank 1\n")
    process = SimpleNamespace(
        mpirun=True, world_size=4, returncode=1, wait=lambda _timeout_s: 1, dead=lambda: [0, 1, 2, 3]
    )
    error = world(process, output).died()
    assert error.message.startswith(words)
    assert error.failure is failure
    assert ("the last words of rank 1" in error.message) is words.startswith("rank")


def test_logs_are_found_however_mpirun_pads_the_rank(tmp_path: Path) -> None:
    for rank in range(12):
        log = tmp_path / "ranks" / "1" / f"rank.{rank:02}" / "stdout"
        log.parent.mkdir(parents=True)
        log.touch()
    ranks = world(SimpleNamespace(), tmp_path / "log")
    assert ranks.rank_log(3).parent.name == "rank.03"
    assert ranks.rank_log(11).parent.name == "rank.11"
    assert ranks.rank_log(12) == tmp_path / "log"


def test_logs_of_open_mpi_5_lie_beside_the_folder(tmp_path: Path) -> None:
    for rank in (1, 11):
        (tmp_path / f"ranks.prterun-host-4711@1.{rank}.out").touch()
    ranks = world(SimpleNamespace(), tmp_path / "log")
    assert ranks.rank_log(1).name == "ranks.prterun-host-4711@1.1.out"
    assert ranks.rank_log(2) == tmp_path / "log"
