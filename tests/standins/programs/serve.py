"""`trtllm-serve`: an HTTP server with TensorRT-LLM's routes and OpenAI's completions.

The answer goes on through the prompt, from its second token on, so it is known in advance. TRTLLM_STANDIN_ANSWERS names a JSON
object from prompts to answers that are given instead, whole; or from model types to such.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from types import FrameType
from typing import Any, Final
from urllib.parse import urlsplit

from tests.standins import refusals
from tests.standins.programs import ProgramError, Work, arguments, disaggregated, refusal
from tests.standins.programs.checkpoint import number_of_experts
from tests.standins.programs.engine import check_tokenizer, is_engine, read_engine
from tests.standins.programs.llm_api import (
    Iterations,
    check_algorithm,
    check_architecture,
    check_lookahead,
    check_lora,
    check_lora_request,
    check_names,
    check_speculation,
    given_answers,
    read_settings,
)
from tests.standins.tokens import Tokens

_LIMITS: Final = ("max_batch_size", "max_beam_width")
"""Of an engine, that a server may be told to stay below."""
_WORKER_S: Final = 300
"""Workers end by themselves after this: a launcher that forgets them is found out, and the machine stays clean."""


def run(work: Work, argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT."""
    table = work.facts["tools"]["trtllm-serve"]
    if argv[:1] == ["disaggregated"] and "disaggregated" in table:
        return disaggregated.run(work, arguments.parse_click("trtllm-serve", table, argv, "serve", None)[1])
    command, options = arguments.parse_click(
        "trtllm-serve", table, argv, "serve" if "serve" in table else "trtllm-serve", "MODEL"
    )
    if command not in {"serve", "trtllm-serve"}:
        raise refusal(f"there is no stand-in for `trtllm-serve {command}`")
    value = {
        name: _option(table[command], options, name)
        for name in ("--tp_size", "--pp_size", "--ep_size", "--extra_llm_api_options")
    }
    model = Path(options["model"])
    given = {word.partition("=")[0].lstrip("-") for word in argv}
    limit = _load(work, model, {name: options[name] for name in options if name not in _LIMITS or name in given}, value)
    work.begin()
    settings = (
        {} if (file := value["--extra_llm_api_options"]) is None else read_settings(Path(file).read_text("utf-8"))
    )
    if is_engine(model):
        settings = {**settings, **_adapters_of(model)}
    else:
        check_names(settings, work.facts["llm_args"])
        if "lora_config" in settings:
            check_lora(settings["lora_config"])
    iterations = _speculation(work, model, settings)
    workers = _spawn_workers(int(value["--tp_size"] or 1) * int(value["--pp_size"] or 1) - 1)
    try:
        name = str(options.get("served_model_name") or model.name)
        answers = given_answers(json.loads((model / "config.json").read_text(encoding="utf-8")))
        sys.path.append(work.facts["packages"])
        tokens = Tokens(Path(options.get("tokenizer") or model))
        return _serve(work, options, name, limit, tokens, iterations, settings, answers, images=_takes_images(model))
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGTERM)


def _adapters_of(engine: Path) -> dict[str, Any]:
    """What an engine says of adapters: built with lora_plugin, it takes those of requests without being told more."""
    built = json.loads((engine / "config.json").read_text(encoding="utf-8"))["build_config"]
    return {"lora_config": built["lora_config"]} if "lora_config" in built else {}


def _option(options: Mapping[str, Any], values: Mapping[str, Any], spelling: str) -> Any:
    """The value of an option under any of its spellings; None where the release has no such option."""
    for name, option in options.items():
        if spelling in {name, *option.get("aliases", ())}:
            return values[name.lstrip("-").replace("-", "_")]
    return None


def _load(work: Work, model: Path, options: Mapping[str, Any], value: Mapping[str, Any]) -> int:
    """Longest sequence, in tokens, of what is served. Raises ProgramError for what this release cannot load."""
    if value["--extra_llm_api_options"] and not Path(value["--extra_llm_api_options"]).is_file():
        raise ProgramError(
            f"FileNotFoundError: [Errno 2] No such file or directory: '{value['--extra_llm_api_options']}'"
        )
    if not model.is_dir():
        raise ProgramError(f"OSError: We couldn't connect to 'https://huggingface.co' to load the files of {model}")
    backend = options.get("backend")
    wanted = work.facts["engine_backend"]  # None: an engine folder needs no --backend
    if is_engine(model) and backend == wanted:
        config = read_engine(work, model)["build_config"]
        limit = int(config["max_seq_len"])
        facts = {name: options.get(name) for name in _LIMITS} | {f"engine_{name}": config.get(name) for name in _LIMITS}
        for _, said in refusals.applied(work.facts["refusals"]["trtllm-serve"], facts):
            raise ProgramError(said)
    else:
        file = model / "config.json"
        if not file.is_file():
            raise ProgramError(f"OSError: {model} does not appear to have a file named config.json.")
        config = json.loads(file.read_text(encoding="utf-8"))
        if "model_type" not in config:
            raise ProgramError(
                f"ValueError: Unrecognized model in {model}. Should have a `model_type` key in its config.json"
            )
        _check_experts(config, int(value["--tp_size"] or 1), int(value["--ep_size"] or 1))
        check_architecture(config)
        _check_quantization(model, config)
        _check_processor(model, config)
        limit = int(options.get("max_seq_len") or config.get("max_position_embeddings") or 2048)
    check_tokenizer(options.get("tokenizer") or model)
    world = int(value["--tp_size"] or 1) * int(value["--pp_size"] or 1)
    if world > len(work.gpus):
        raise refusal(f"{world} ranks and {len(work.gpus)} visible GPUs")
    return limit


def _speculation(work: Work, model: Path, asked: Mapping[str, Any]) -> Iterations | None:
    """Statistics that the server keeps, None without speculative decoding or where they are not asked for."""
    if "speculative_config" not in asked:
        return None
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if is_engine(model):
        check_lookahead(asked["speculative_config"], config["build_config"])
        return None
    drafted = check_speculation(asked["speculative_config"], config, work.facts["llm_args"])
    return Iterations(drafted) if asked.get("enable_iter_perf_stats") else None


def _check_experts(config: Mapping[str, Any], tp: int, ep: int) -> None:
    if tp // ep * ep != tp:
        raise ProgramError(
            f"ValueError: tp_size must equal to moe_tp_size * moe_ep_size, but got {tp} != {tp // ep} * {ep}"
        )
    count = number_of_experts(config)
    if ep > 1 and count % ep:
        raise refusal(f"{count} experts cannot be dealt over an EP size of {ep}")


def _check_processor(model: Path, config: Mapping[str, Any]) -> None:
    """Raise ProgramError for a model with images that lacks its processor's configuration, which transformers reads."""
    if "vision_config" in config and not (model / "preprocessor_config.json").is_file():
        raise ProgramError(
            f"OSError: Can't load image processor for '{model}'. It does not appear to have a file named preprocessor_config.json."
        )


def _takes_images(model: Path) -> bool:
    config = model / "config.json"
    return config.is_file() and "vision_config" in json.loads(config.read_text(encoding="utf-8"))


def _parts_of(content: Any, *, images: bool) -> tuple[str, int]:
    """The text of a message, and the tokens of its images: one for each 28 x 28 pixels, as Qwen2-VL. Raises ValueError for what
    cannot be looked at.
    """
    if isinstance(content, str):
        return content, 0
    text, tokens = "", 0
    for part in content:
        if part["type"] == "text":
            text += part["text"]
        elif part["type"] != "image_url":
            raise ValueError(f"Unknown part type: {part['type']}")
        elif not images:
            raise ValueError("The model does not take images: Unknown modality")
        else:
            width, height = _size_of(part["image_url"]["url"])
            tokens += max(1, width // 28) * max(1, height // 28)
    return text, tokens


def _size_of(url: str) -> tuple[int, int]:
    """Width and height of a whole PNG in a data URL: checksums, and as many bytes as its header says."""
    head, _, data = url.partition(";base64,")
    if head != "data:image/png":
        raise ValueError(f"the stand-in reads PNG in data URLs, got {head[:40]}")
    rest, found = base64.b64decode(data, validate=True), b""
    if not rest.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("cannot identify image file")
    rest = rest[8:]
    header = None
    while rest:
        (length,) = struct.unpack(">I", rest[:4])
        kind, content, crc = rest[4:8], rest[8 : 8 + length], rest[8 + length : 12 + length]
        if struct.pack(">I", zlib.crc32(kind + content)) != crc:
            raise ValueError(f"broken PNG file (bad header checksum in {kind!r})")
        header = struct.unpack(">IIBBBBB", content) if kind == b"IHDR" else header
        found += content if kind == b"IDAT" else b""
        rest = rest[12 + length :]
    if header is None or header[2:4] != (8, 2) or len(zlib.decompress(found)) != header[1] * (3 * header[0] + 1):
        raise ValueError("image file is truncated")
    return header[0], header[1]


def _check_quantization(model: Path, config: Mapping[str, Any]) -> None:
    """Raise ProgramError for weights in a form that the PyTorch runtime does not read. Source: `_update_from_hf_quant_config`
    in llm_utils.py.
    """
    found, stated = config.get("quantization_config"), model / "hf_quant_config.json"
    if stated.is_file():
        check_algorithm(json.loads(stated.read_text(encoding="utf-8"))["quantization"])
        return
    if found is None:
        return
    blocks = found.get("quant_method") == "fp8" and found.get("weight_block_size")
    if not blocks and found.get("quant_method") != "mxfp4":
        raise ProgramError(f"NotImplementedError: Unsupported quantization_config: {found}.")


def _spawn_workers(count: int) -> list[int]:
    """Processes of the other ranks; like real ones they do not end because the first one is killed."""
    workers = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            signal.alarm(_WORKER_S)
            signal.pause()
            os._exit(0)
        workers.append(child)
    return workers


def _serve(
    work: Work,
    options: Mapping[str, Any],
    name: str,
    limit: int,
    tokens: Tokens,
    iterations: Iterations | None,
    settings: Mapping[str, Any],
    answers: Mapping[str, str],
    *,
    images: bool,
) -> int:
    try:
        server = _Server((options["host"], options["port"]), work, name, limit, tokens, iterations, images=images)
        server.settings, server.answers = settings, answers
    except OSError as error:
        print(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address ('{options['host']}', "
            f"{options['port']}): address already in use",
            file=sys.stderr,
        )
        return 1
    ended = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    print(
        f"INFO:     Application startup complete.\nINFO:     Uvicorn running on http://{options['host']}:{server.port}"
    )
    sys.stdout.flush()
    ended.wait()
    server.shutdown()
    print("INFO:     Shutting down", flush=True)
    return 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        work: Work,
        name: str,
        limit: int,
        tokens: Tokens,
        iterations: Iterations | None,
        *,
        images: bool,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.port = self.server_address[1]
        self.work = work
        self.name = name
        self.limit = limit
        self.tokens = tokens
        self.iterations = iterations
        self.images = images
        self.settings: Mapping[str, Any] = {}
        self.answers: Mapping[str, str] = {}
        self.lock = threading.Lock()
        self.requests = 0

    def server_bind(self) -> None:
        """Bind, without the look-up of a host name that HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def count(self) -> None:
        """Count a request for completions."""
        with self.lock:
            self.requests += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        print(f"INFO:     {self.client_address[0]} - {format % args}", flush=True)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path in {"/health", "/health_generate"}:
            self._send(200, b"")
        elif path == "/version":
            self._send_json(200, {"version": self.server.work.release})
        elif path == "/v1/models":
            entry = {"id": self.server.name, "object": "model", "created": 0, "owned_by": "tensorrt_llm"}
            self._send_json(200, {"object": "list", "data": [entry]})
        elif path == "/metrics" and self.server.iterations is not None:
            self._send_json(200, self.server.iterations.take())
        elif path == "/metrics":
            self._send_json(200, [{"iter": self.server.requests, "numActiveRequests": 0}])
        else:
            self._send_json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chat = urlsplit(self.path).path == "/v1/chat/completions"
        if not chat and urlsplit(self.path).path != "/v1/completions":
            self._send_json(404, {"detail": "Not Found"})
            return
        self.server.count()
        try:
            check_lora_request(json.loads(body).get("lora_request"), self.server.settings)
            if "disaggregated_params" in json.loads(body) and "cache_transceiver_config" not in self.server.settings:
                raise ValueError("disaggregated requests take cache_transceiver_config")
            self._answer(json.loads(body), chat=chat)
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(f"{type(error).__name__}: {error}")

    def _answer(self, asked: Mapping[str, Any], *, chat: bool) -> None:
        tokens = self.server.tokens
        if chat:
            parts = [_parts_of(message["content"], images=self.server.images) for message in asked["messages"]]
            prompt = "".join(text for text, _ in parts)
            prompt_tokens = tokens.count(prompt) + sum(seen for _, seen in parts)
        else:
            prompt = asked["prompt"]
            prompt_tokens = tokens.count(prompt)
        wanted = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        if prompt_tokens + wanted > self.server.limit:
            self._refuse(
                f"The sum of prompt length ({prompt_tokens}) and max_tokens ({wanted}) should not exceed max_seq_len "
                f"({self.server.limit})"
            )
            return
        known = "" if chat else self.server.answers.get(prompt, "")
        made = tokens.split(known) or tokens.next(prompt, wanted)
        stops = asked.get("stop") or []
        made, found = tokens.until(made, [stops] if isinstance(stops, str) else stops)
        reason = "stop" if found else "length"
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(made),
            "total_tokens": prompt_tokens + len(made),
        }
        if self.server.iterations is not None:
            self.server.iterations.answer(len(made))
        about = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.server.requests}",
            "created": int(time.time()),
            "model": self.server.name,
        }
        if asked.get("stream"):
            about["object"] = "chat.completion.chunk" if chat else "text_completion"
            usage_wanted = (asked.get("stream_options") or {}).get("include_usage")
            self._stream(about, made, reason, usage if usage_wanted else None, chat=chat)
            return
        text = "".join(made)
        about["object"] = "chat.completion" if chat else "text_completion"
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": reason}
        self._send_json(200, {**about, "choices": [choice], "usage": usage})

    def _stream(
        self, about: Mapping[str, Any], made: Sequence[str], reason: str, usage: Mapping[str, Any] | None, *, chat: bool
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self._event({**about, "choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        for index, text in enumerate(made):
            said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            last = reason if index + 1 == len(made) else None
            self._event({**about, "choices": [{"index": 0, **said, "finish_reason": last}]})
        if not made:
            said = {"delta": {}} if chat else {"text": ""}
            self._event({**about, "choices": [{"index": 0, **said, "finish_reason": reason}]})
        if usage is not None:
            self._event({**about, "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, message: Mapping[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(message)}\n\n".encode())

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def _refuse(self, words: str) -> None:
        error = {"object": "error", "message": words, "type": "BadRequestError", "param": None, "code": 400}
        self._send_json(400, error)

    def _send_json(self, status: int, answer: Any) -> None:
        self._send(status, json.dumps(answer).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
