"""Stand-ins for vLLM, SGLang, `transformers serve` and llama.cpp's server: they take the options that are documented, as the real
ones do, and serve answers that are made up.

    openai_server.py NAME [WORDS OF ITS COMMAND LINE]

What they refuse: options that the record does not have, values that are no choice, a prompt longer than the limit, and a
model by another name. `STANDIN_DIES=loading` ends it before it is ready, as for want of memory.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

RECORD: Final = json.loads((Path(__file__).parents[1] / "data" / "openai_servers.json").read_text(encoding="utf-8"))
ANSWER: Final = " Paris, the largest city of the country, and the seat of its government and of its parliament."
VLLM_REFUSES: Final = (
    "This model's maximum context length is {limit} tokens. However, your request has {tokens} input tokens. Please reduce the "
    "length of the input messages."
)
SGLANG_REFUSES: Final = (
    "Input length ({tokens} tokens) exceeds the maximum allowed length ({limit} tokens). Use a shorter input or enable "
    "--allow-auto-truncate."
)
LIMITS: Final = {"vllm": ("max_model_len", 0, 1, VLLM_REFUSES), "sglang": ("context_length", 2, 7, SGLANG_REFUSES)}
"""The option with the length of the context, the tokens of it that must be left after an answer and after a prompt, and what is
said of a longer prompt. SGLang 0.5.15: `max_req_len` in its scheduler and its worker."""
OUT_OF_MEMORY: Final = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.06 GiB is free."
)


def parser(name: str) -> argparse.ArgumentParser:
    """What takes the command line of a server, by its record."""
    record = RECORD[name]
    made = argparse.ArgumentParser(prog=" ".join([name, *record["words"]]), allow_abbrev=False)
    for word in record["words"]:
        made.add_argument("word", choices=[word])
    for word in record["positional"]:
        made.add_argument(word)
    for option, about in record["options"].items():
        more: dict[str, Any] = {key: about[key] for key in ("choices", "nargs", "required") if key in about}
        if about.get("flag"):
            more["action"] = "store_true"
        elif "type" in about:
            more["type"] = {"int": int, "float": float}[about["type"]]
        made.add_argument(*filter(None, (about.get("short"), option)), **more)
    return made


def main(name: str, words: Sequence[str]) -> None:
    from tests.standins.tokens import Tokens

    given = vars(parser(name).parse_args(words))
    if given.get("version"):
        print("version: 6000 (abcdef01)", file=sys.stderr)
        return
    folder = given.get("model_tag") or given.get("model_path") or given.get("force_model")
    if folder is not None and not (Path(folder) / "config.json").is_file():
        sys.exit(f"OSError: {folder} does not appear to have a file named config.json")
    option, after_answer, after_prompt, refusal = LIMITS.get(name, ("", 0, 0, ""))
    context = given.get(option)
    if folder is not None and context is not None:
        positions = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        if context > positions:
            sys.exit(
                f"ValueError: User-specified {option} ({context}) is greater than the derived {option} ({positions})"
            )
    if os.environ.get("STANDIN_DIES") == "loading":
        sys.exit(OUT_OF_MEMORY)
    names = given.get("served_model_name") or given.get("alias") or folder
    model = names[0] if isinstance(names, list) else names
    tokenizer = Tokens(Path(folder or ""))

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            listed = [] if name == "transformers" else [{"id": model, "object": "model"}]
            answers = {"/health": {}, "/v1/models": {"object": "list", "data": listed}}
            if name == "vllm":
                answers["/version"] = {"version": RECORD[name]["release"]}
            self._whole(200 if self.path in answers else 404, answers.get(self.path, {}))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = asked.get("prompt") or asked["messages"][-1]["content"]
            tokens = tokenizer.count(prompt)
            if asked["model"] != model:
                self._whole(404, {"error": {"message": f"The model `{asked['model']}` does not exist.", "code": 404}})
            elif context is not None and tokens > context - after_prompt:
                said = refusal.format(limit=context - after_prompt + 1, tokens=tokens)
                self._whole(400, {"object": "error", "message": said, "error": {"message": said, "code": 400}})
            else:
                self._generate(asked, tokens)

        def _generate(self, asked: dict[str, Any], tokens: int) -> None:
            stops = [asked["stop"]] if isinstance(asked.get("stop"), str) else asked.get("stop") or ()
            exact = asked.get("ignore_eos") or asked.get("min_tokens")
            most = asked["max_tokens"] if context is None else min(asked["max_tokens"], context - after_answer - tokens)
            whole = tokenizer.split(ANSWER) if not exact else tokenizer.next(ANSWER, most, 0)
            parts, stopped = tokenizer.until(whole[:most], stops)
            reason = "stop" if stopped or len(parts) < most else "length"
            usage = {"prompt_tokens": tokens, "completion_tokens": len(parts), "total_tokens": tokens + len(parts)}
            chat = self.path.endswith("/chat/completions")

            def body(text: str, reason: str | None, key: str) -> dict[str, Any]:
                said = {key: {"content": text}} if chat else {"text": text}
                return {"id": "1", "model": model, "choices": [{"index": 0, **said, "finish_reason": reason}]}

            if not asked.get("stream"):
                self._whole(200, {**body("".join(parts), reason, "message"), "usage": usage})
                return
            events = [body(part, None, "delta") for part in parts]
            events += [{**body("", reason, "delta"), "usage": usage}]
            data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
            self._send(200, "text/event-stream", data)

        def _whole(self, status: int, answer: object) -> None:
            self._send(status, "application/json", json.dumps(answer).encode())

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the library
            pass

    server = http.server.ThreadingHTTPServer((given["host"], given["port"]), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"{name} serves {model}, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    main(sys.argv[1], sys.argv[2:])
