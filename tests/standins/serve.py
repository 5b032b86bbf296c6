"""A stand-in for `trtllm-serve`, whose workers are sessions of their own as those that MPI spawns are.

    serve.py MODEL --host HOST --port PORT [--workers N] [--die FILE] [--never]

It ends with the status in FILE as soon as there is one; `--never` is never healthy.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("model")
parser.add_argument("--host", default="localhost")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--die", type=Path, default=Path("/nowhere"))
parser.add_argument("--never", action="store_true")
given = parser.parse_args()

ANSWERS = {
    "/health": b"",
    "/v1/models": json.dumps({"object": "list", "data": [{"id": given.model, "object": "model"}]}).encode(),
    "/version": b'{"version": "1.2.0"}',
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = None if given.never else ANSWERS.get(self.path)
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write(answer or b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the library
        pass


for _ in range(given.workers):
    # Deaf, and a session of its own whose parent has ended: only descent leads to it.
    worker = "import signal, time; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); time.sleep(300)"
    subprocess.run(["sh", "-c", 'setsid "$0" -c "$1" & ', sys.executable, worker], check=True)
try:
    server = http.server.ThreadingHTTPServer((given.host, given.port), Handler)
except OSError as error:
    sys.exit(f"ERROR: [Errno {error.errno}] error while attempting to bind on address: address already in use")
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"serving {given.model}", flush=True)
while not given.die.exists():
    time.sleep(0.02)
print("told to die", flush=True)
os._exit(int(given.die.read_text()))
