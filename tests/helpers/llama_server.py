"""llama.cpp's own HTTP server, out of the package xllamacpp, under the options of `llama-server` that are used here."""

from __future__ import annotations

import argparse
import signal

parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
parser.add_argument("--version", action="store_true")
parser.add_argument("--model")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--alias")
parser.add_argument("--parallel", type=int, default=1)
parser.add_argument("--no-cache-prompt", dest="cache_prompt", action="store_false")
parser.add_argument("--cache-prompt", action="store_true", default=True)
parser.add_argument("--ctx-size", type=int, default=4096)


def main() -> None:
    given = parser.parse_args()
    import xllamacpp

    if given.version:
        print(f"version: {xllamacpp.__version__}")
        return
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.hostnames, params.port = [given.host], given.port
    params.n_parallel, params.n_ctx = given.parallel, given.ctx_size
    params.cache_prompt = given.cache_prompt
    params.model_alias = {given.alias} if given.alias else set()
    server = xllamacpp.Server(params)
    print(f"listening at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
