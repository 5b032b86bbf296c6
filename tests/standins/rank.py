"""A stand-in for `tritonserver` as one rank of a world: takes its options, its ports, its shared memory, and dies when told.

STAND_IN names a folder of orders, each a file named after what it asks for, `.N` for rank N alone:
    deaf        ignore SIGINT and SIGTERM
    never       never become ready
    mpi         be a rank of an MPI world, and report what that says of it
    cuda        use the GPU of this rank, and report its UUID
    exit.N      end with the exit status in the file
    signal.N    end by the signal in the file
    abort.N     end the MPI world with the error code in the file
Each rank reports into rank.N.json there.
"""

from __future__ import annotations

import argparse
import ctypes
import http.server
import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model-control-mode", default="none")
    parser.add_argument("--load-model", action="append", default=[])
    parser.add_argument("--disable-auto-complete-config", action="store_true")
    parser.add_argument("--backend-config", required=True)
    parser.add_argument("--backend-directory")
    parser.add_argument("--exit-timeout-secs", type=int, default=30)
    parser.add_argument("--http-restricted-api")
    parser.add_argument("--grpc-restricted-protocol")
    parser.add_argument("--allow-vertex-ai", type=json.loads)
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--allow-{name}", type=json.loads, default=True)
        parser.add_argument(f"--{name}-address", default="0.0.0.0")
        parser.add_argument(f"--{name}-port", type=int, default=port)
    return parser.parse_args()


def handler(ready: threading.Event, models: list[str]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/v2", "/v2/health/ready", *(f"/v2/models/{model}/ready" for model in models)}
            self.send_response(200 if self.path in known and ready.is_set() else 400)
            self.end_headers()
            self.wfile.write(b'{"name": "stand-in", "version": "1"}')

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the library
            pass

    return Handler


class Mpi:
    """The few functions of MPI that are needed here, from Open MPI itself."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
        self.world = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self.library, "ompi_mpi_comm_world")))
        self.library.MPI_Init(None, None)

    def number(self, function: str) -> int:
        found = ctypes.c_int()
        getattr(self.library, function)(self.world, ctypes.byref(found))
        return found.value

    def abort(self, code: int) -> None:
        self.library.MPI_Abort(self.world, code)


def gpu_uuid(rank: int) -> str:
    """Allocates on the device of this rank, writes to it, and returns its UUID as `nvidia-smi -L` has it."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *arguments: object) -> None:
        status = getattr(cuda, function)(*arguments)
        if status:
            sys.exit(f"{function}: CUDA error {status}")

    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    data, back = b"rank %d" % rank, ctypes.create_string_buffer(16)
    name = (ctypes.c_ubyte * 16)()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), rank)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 30))
    call("cuMemcpyHtoD_v2", memory, data, ctypes.c_size_t(len(data)))
    call("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(len(data)))
    assert back.raw[: len(data)] == data
    call("cuDeviceGetUuid", name, device)
    return f"GPU-{uuid.UUID(bytes=bytes(name))}"


def main() -> None:
    given = options()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    orders = Path(os.environ["STAND_IN"])
    said = {
        "argv": sys.argv[1:],
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "size": int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")),
    }
    sys.stdout = sys.stderr  # as Triton's log; mpirun merges the two streams in any order
    print(f"rank {rank} complains", flush=True)
    shared = Path("/dev/shm", f"{given.backend_config.partition('=')[2]}region")
    shared.write_bytes(bytes(4096))
    ending = threading.Event()
    for signo in (signal.SIGINT, signal.SIGTERM):
        if (orders / "deaf").exists():
            signal.signal(signo, signal.SIG_IGN)
        else:
            signal.signal(signo, lambda *_: ending.set())
    ready = threading.Event()
    for name in ("http", "grpc", "metrics"):
        if not getattr(given, f"allow_{name}"):
            continue
        address = (getattr(given, f"{name}_address"), getattr(given, f"{name}_port"))
        models = [path.parent.name for path in given.model_repository.glob("*/config.pbtxt")]
        try:
            server = http.server.ThreadingHTTPServer(address, handler(ready, models))
        except OSError:
            print(f"failed to start {name} service: Unavailable - Socket '{address[0]}:{address[1]}' already in use")
            sys.exit(1)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    mpi = Mpi() if (orders / "mpi").exists() else None
    if mpi:
        said["mpi"] = [mpi.number("MPI_Comm_rank"), mpi.number("MPI_Comm_size")]
    if (orders / "cuda").exists():
        said["gpu"] = gpu_uuid(rank)
    report = orders / f"rank.{rank}.json"
    report.with_suffix(".new").write_text(json.dumps(said))
    report.with_suffix(".new").replace(report)
    while not ending.is_set():
        # As with an engine: ready once every rank has loaded its part.
        if not (orders / "never").exists() and len(list(orders.glob("rank.*.json"))) >= said["size"]:
            ready.set()
        for order in ("exit", "signal", "abort"):
            if (path := orders / f"{order}.{rank}").exists():
                number = int(path.read_text())
                print(f"rank {rank} was told: {order} {number}", flush=True)
                if order == "exit":
                    os._exit(number)
                if order == "signal":
                    os.kill(os.getpid(), number)
                assert mpi is not None
                mpi.abort(number)
        time.sleep(0.02)
    shared.unlink(missing_ok=True)
    if mpi:
        mpi.library.MPI_Finalize()
    os._exit(0)


if __name__ == "__main__":
    main()
