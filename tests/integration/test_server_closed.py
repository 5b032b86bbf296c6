"""What a server of ours refuses whoever reaches it, over HTTP and gRPC, and what it continues answering."""

from __future__ import annotations

import base64
import json
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import hpack
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.helpers.embedded_engines import script_engine
from tests.helpers.triton_client import Client, serve
from trtllm_pipeline.measure.client.transport import http2
from trtllm_pipeline.tensorrt.servers import triton_server

CODE = """
open({owned!r}, "w").write("in")
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
CONFIG = json.dumps(
    {
        "name": "evil",
        "backend": "python",
        "max_batch_size": 0,
        "input": [{"name": "i", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "o", "data_type": "TYPE_INT32", "dims": [1]}],
    }
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("closed")
    with serve(folder, script_engine(folder / "engine")) as client:
        yield client


@pytest.fixture
def grpc(client: Client) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(client.grpc_url) as asking:
        yield asking


@pytest.mark.seam
def test_no_model_is_loaded_or_unloaded_over_http(client: Client, tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    code = base64.b64encode(CODE.format(owned=str(owned)).encode()).decode()
    evil = {"parameters": {"config": CONFIG, "file:1/model.py": code}}
    for path, body in (
        ("repository/models/evil/load", evil),
        ("repository/models/ensemble/load", evil),
        ("repository/models/ensemble/unload", {"parameters": {"unload_dependents": True}}),
        ("repository/index", {}),
    ):
        status, answer = client.server.request("POST", f"/v2/{path}", body)
        assert status == 403, (path, answer)
    assert not owned.exists()
    assert client.text(text_input="s", max_tokens=4) == "top-"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "logging", {"log_file": "{file}", "log_verbose_level": 1}),
        ("GET", "logging", None),
        ("POST", "trace/setting", {"trace_file": "{file}", "trace_level": ["TIMESTAMPS"], "trace_rate": "1"}),
        ("POST", "models/ensemble/trace/setting", {"trace_file": "{file}", "trace_level": ["TIMESTAMPS"]}),
        ("GET", "trace/setting", None),
        ("POST", "systemsharedmemory/region/mine/register", {"key": "/{shared}", "offset": 0, "byte_size": 64}),
        ("GET", "systemsharedmemory/status", None),
        ("POST", "systemsharedmemory/unregister", {}),
        ("POST", "cudasharedmemory/region/mine/register", {"raw_handle": {"b64": "AA=="}, "device_id": 0}),
        ("GET", "cudasharedmemory/status", None),
    ],
)
def test_logs_traces_and_shared_memory_are_closed_over_http(
    client: Client, tmp_path: Path, method: str, path: str, body: dict[str, object] | None
) -> None:
    file = tmp_path / "written"
    shared = next(triton_server.SHARED_MEMORY.glob(f"{client.server.prefix}*")).name
    text = json.dumps(body).replace("{file}", str(file)).replace("{shared}", shared)
    status, answer = client.server.request(method, f"/v2/{path}", None if body is None else json.loads(text))
    assert status == 403, answer
    assert client.text(text_input="s", max_tokens=4) == "top-"
    assert not file.exists()


def test_all_of_it_is_closed_over_grpc(client: Client, grpc: grpcclient.InferenceServerClient, tmp_path: Path) -> None:
    owned, file = tmp_path / "owned", tmp_path / "written"
    code = CODE.format(owned=str(owned)).encode()
    shared = next(triton_server.SHARED_MEMORY.glob(f"{client.server.prefix}*")).name
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: grpc.load_model("evil", config=CONFIG, files={"file:1/model.py": code}),
        "unload": lambda: grpc.unload_model("ensemble"),
        "index": grpc.get_model_repository_index,
        "logging": lambda: grpc.update_log_settings({"log_file": str(file)}),
        "trace": lambda: grpc.update_trace_settings(settings={"trace_file": str(file), "trace_level": ["TIMESTAMPS"]}),
        "shared memory": lambda: grpc.register_system_shared_memory("mine", f"/{shared}", 64),
        "its status": grpc.get_system_shared_memory_status,
        "CUDA": lambda: grpc.register_cuda_shared_memory("mine", base64.b64encode(bytes(64)), 0, 64),
    }
    for name, call in calls.items():
        with pytest.raises(InferenceServerException, match="This protocol is restricted"):
            pytest.fail(f"{name}: {call()}")
    assert client.ask(text_input="s", max_tokens=4).text == "top-"
    assert not owned.exists()
    assert not file.exists()


def test_what_clients_need_stays_open(client: Client, grpc: grpcclient.InferenceServerClient) -> None:
    for path in ("", "/models/ensemble", "/models/ensemble/config", "/models/ensemble/stats", "/models/stats"):
        status, answer = client.server.request("GET", f"/v2{path}")
        assert (status, bool(json.loads(answer))) == (200, True), path
    assert grpc.is_server_ready()
    assert grpc.is_model_ready("ensemble")
    assert grpc.get_server_metadata().version == "2.51.0"
    assert grpc.get_model_metadata("ensemble").name == "ensemble"
    assert grpc.get_model_config("ensemble").config.platform == "ensemble"
    assert grpc.get_inference_statistics("ensemble").model_stats
    assert client.text("tensorrt_llm_bls", text_input="s", max_tokens=4) == "top-"


def test_what_is_asked_and_answered_is_read_by_its_user_alone(client: Client) -> None:
    assert client.text(text_input="s", max_tokens=4) == "top-"
    files = list(triton_server.SHARED_MEMORY.glob(f"{client.server.prefix}*"))
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def restriction(client: Client) -> tuple[str, str]:
    """The header that would open it, as any user of the machine can read it."""
    command = Path(f"/proc/{client.server.process.pid}/cmdline").read_text()
    found = re.search(r"--http-restricted-api=[^:\0]*:([^=\0]*)=([^\0]*)", command)
    assert found is not None
    return found[1], found[2]


def over_http(port: int, *headers: bytes) -> bytes:
    """The status line of an answer to a request that has these headers."""
    with socket.create_connection((triton_server.LOOPBACK, port), timeout=60) as connection:
        connection.sendall(
            b"\r\n".join((b"GET /v2/logging HTTP/1.1", b"Host: a", *headers, b"Connection: close", b"\r\n"))
        )
        return connection.makefile("rb").readline()


def test_its_header_cannot_be_sent_over_http(client: Client) -> None:
    name, value = (each.encode() for each in restriction(client))
    first, rest = name.split(b":", 1)
    tries = {
        "as it is": [name + b": " + value],
        "no space": [name + b":" + value],
        "spaces": [first + b" : " + rest + b": " + value],
        "folded name": [first + b":\r\n " + rest + b": " + value],
        "folded before the colon": [first + b"\r\n :" + rest + b": " + value],
        "tab": [first + b":\t" + rest + b":" + value],
        "carriage return": [first + b"\r:" + rest + b":" + value],
        "quoted": [b'"' + name + b'": ' + value],
        "escaped": [first + b"%3A" + rest + b": " + value],
        "no name": [b":" + name + b": " + value],
        "zero byte": [first + b"\0:" + rest + b": " + value],
        "halves": [first + b": " + rest + b": " + value, rest + b": " + value],
        "capitals": [name.upper() + b": " + value],
    }
    assert over_http(client.server.ports.http).split()[1] == b"403"
    for what, headers in tries.items():
        answer = over_http(client.server.ports.http, *headers)
        assert answer == b"" or answer.split()[1] in {b"400", b"403"}, (what, answer)
    assert client.text(text_input="s", max_tokens=4) == "top-"


def literal(first: bytes, name: bytes, value: bytes, *, huffman: bool = False) -> bytes:
    """A header with a literal name, RFC 7541 6.2; `first` says whether it is to be indexed."""

    def text(data: bytes) -> bytes:
        if not huffman:
            return bytes([len(data)]) + data
        table = hpack.huffman_constants
        packed = hpack.huffman.HuffmanEncoder(table.REQUEST_CODES, table.REQUEST_CODES_LENGTH).encode(data)
        return bytes([0x80 | len(packed)]) + packed

    return first + text(name) + text(value)


def over_grpc(port: int, *blocks: bytes) -> bytes:
    """All that comes back for a call of LogSettings whose headers end with `blocks`, a frame each."""
    plain = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/inference.GRPCInferenceService/LogSettings",
        b":authority": b"a",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    begin = b"".join(literal(b"\0", name, value) for name, value in plain.items())
    parts = [begin + (blocks[0] if blocks else b""), *blocks[1:]]
    said = b""
    with socket.create_connection((triton_server.LOOPBACK, port), timeout=60) as connection:
        connection.sendall(http2.PREFACE + http2.frame(4, 0, 0))
        for number, part in enumerate(parts):
            connection.sendall(http2.frame(9 if number else 1, 4 if number == len(parts) - 1 else 0, 1, part))
        connection.sendall(http2.frame(0, 1, 1, http2.message(b"")))
        with suppress(OSError):
            while b"grpc-status" not in said and (more := connection.recv(65536)):
                said += more
    return said


def test_its_header_cannot_be_sent_over_grpc(client: Client) -> None:
    name, value = (each.encode() for each in restriction(client))
    name = b"triton-grpc-protocol-" + name
    port = client.server.ports.grpc
    assert b"restricted, expecting header" in over_grpc(port)
    whole = literal(b"\0", name, value)
    tries: dict[str, tuple[bytes, ...]] = {
        "not indexed": (whole,),
        "never indexed": (literal(b"\x10", name, value),),
        "indexed": (literal(b"\x40", name, value),),
        "by its index": (literal(b"\x40", name, value) + b"\xbe",),
        "Huffman": (literal(b"\0", name, value, huffman=True),),
        "in two frames": (whole[:20], whole[20:]),
        "first half": (literal(b"\0", name.split(b":")[0], name.split(b":")[1] + b":" + value),),
        "binary": (literal(b"\0", name + b"-bin", base64.b64encode(value)),),
    }
    for what, blocks in tries.items():
        said = over_grpc(port, *blocks)
        assert b"log_file" not in said, (what, said)
    assert client.ask(text_input="s", max_tokens=4).text == "top-"


def test_a_header_that_can_be_sent_would_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the two tests above try is what opens a server whose header has no colon in its name."""
    options = [f"--{name}=logging:Key=value" for name in ("http-restricted-api", "grpc-restricted-protocol")]
    monkeypatch.setattr(triton_server, "closing_options", lambda _triton: ([each.lower() for each in options], []))
    with serve(tmp_path, script_engine(tmp_path / "engine")) as open_to_some:
        status, answer = open_to_some.server.request("POST", "/v2/repository/models/ensemble/load", {})
        assert (status, b"not allowed" in answer) == (503, True), "no header is needed to close this one"
        assert over_http(open_to_some.server.ports.http, b"KEY:value").split()[1] == b"200"
        for huffman in (False, True):
            header = literal(b"\0", b"triton-grpc-protocol-key", b"value", huffman=huffman)
            assert b"log_file" in over_grpc(open_to_some.server.ports.grpc, header)
            assert b"log_file" in over_grpc(open_to_some.server.ports.grpc, header[:9], header[9:])
