"""`pipeline`: finds the command's module, imports only that, and turns every expected error into words.

Nothing heavy is imported here: `pipeline --help` costs little more than the bare interpreter.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from trtllm_pipeline import __version__, terminal

# command -> (module, help). The order is that of `--help`.
COMMANDS: Final = {
    "run": ("trtllm_pipeline.cli.run", "do everything a matrix asks for that is not done yet"),
    "plan": ("trtllm_pipeline.cli.plan", "show what would run, what is shared, why, and how long it takes"),
    "resume": ("trtllm_pipeline.cli.run", "go on with the latest run of this workspace"),
    "status": ("trtllm_pipeline.cli.status", "show how far each cell is"),
    "explain": ("trtllm_pipeline.cli.explain", "say why a stage has to run, or what its result came from"),
    "logs": ("trtllm_pipeline.cli.logs", "show the log of a cell's stage"),
    "report": ("trtllm_pipeline.cli.report", "show a run's results: table, HTML page, JSON, CSV, Markdown, JUnit XML"),
    "compare": ("trtllm_pipeline.cli.compare", "show what is better and what is worse than before, and fail on it"),
    "recommend": ("trtllm_pipeline.cli.recommend", "say which configuration to take, and why not the others"),
    "doctor": ("trtllm_pipeline.cli.doctor", "say what this machine has and lacks, and which toolchains it can use"),
    "matrix": ("trtllm_pipeline.cli.matrix", "start, check and describe matrix files"),
    "recipes": ("trtllm_pipeline.cli.recipes", "list and show model recipes"),
    "store": ("trtllm_pipeline.cli.store", "verify, repair and clean a workspace"),
    "exec": ("trtllm_pipeline.cli.execute", "run one job.json by hand"),
}
STAGES: Final = {
    "download": "fetch a model and verify it",
    "quantize": "quantize a model into a checkpoint",
    "convert": "turn a model into a checkpoint, quantizing as asked",
    "build": "make an engine from a checkpoint",
    "check": "let an engine answer once, without a server",
    "repository": "write a Triton model repository for an engine",
    "launch": "start a server on a repository and keep it running",
    "smoke": "check a running server's answers over every protocol",
    "perf": "measure a running server's latency and throughput",
    "accuracy": "score a running server's answers",
    "score": "score the answers that perf timed",
}
# Stages that have other forms too, such as one for any server by its URL; `arguments` tell which is meant.
STAGE_MODULES: Final = {
    "repository": "trtllm_pipeline.cli.repository",
    "perf": "trtllm_pipeline.cli.perf",
    "accuracy": "trtllm_pipeline.cli.accuracy",
}


NO_TELEMETRY: Final = "TRTLLM_NO_USAGE_STATS"
"""With 1, no process of TensorRT-LLM says anything of itself. A user's own word for it stays."""


def parser() -> argparse.ArgumentParser:
    """The top of the command line; each command adds its own options when it is chosen."""
    top = argparse.ArgumentParser(
        prog="pipeline",
        description="From a matrix of models to measured Triton servers: download, quantize, build, serve, test, "
        "measure; and go on where it stopped.",
        epilog="one stage, for a matrix's cell or for explicit files:\n"
        + "".join(f"  {name:<12}{text}\n" for name, text in STAGES.items())
        + "\n`pipeline COMMAND --help` shows a command's options and an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"trtllm-pipeline {__version__}")
    top.add_argument("--debug", action="store_true", help="show tracebacks of expected errors too")
    width = max(map(len, COMMANDS)) + 4
    top.add_argument_group("commands", "\n".join(f"{name:<{width}}{text}" for name, (_, text) in COMMANDS.items()))
    top.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    top.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns the exit code: 0 done, 1 a stage failed, 2 the user has to mend or do something first, 3 nothing is feasible,
    4 what was to be compared is not comparable, 130 interrupted.
    """
    if argv is None:
        terminal.start()
    terminal.clean_streams()
    # A large plan is many objects and no garbage: looking for it by the usual thresholds takes a fifth of the time.
    gc.set_threshold(100_000, 50, 100)
    # TensorRT-LLM's telemetry is on by default since candidates of 1.3. Whatever is started from here inherits this.
    os.environ.setdefault(NO_TELEMETRY, "1")
    top = parser()
    args = top.parse_args(argv)
    if args.command is None:
        top.print_help()
        return 2
    debug = args.debug or bool(os.environ.get("PIPELINE_DEBUG"))
    try:
        with _terminable(args.arguments):
            done = _dispatch(args.command, args.arguments)
            sys.stdout.flush()
            return done
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        return 0  # whoever read our output has gone, `pipeline plan | head` for instance
    except Exception as error:
        from trtllm_pipeline.cli.output import explain_error

        code = explain_error(error)
        if code is None or debug:
            raise
        return code


@contextmanager
def _terminable(arguments: Sequence[str]) -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, unless something else has been arranged.

    An attempt of a run just dies: that is quick, and its run knows what to say.
    """
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not free or "--attempt-dir" in arguments:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_text(word: str) -> bool:
    """Whether a word of the command line can stand in our files: bytes that are no UTF-8 come as halves of characters."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dispatch(command: str, arguments: Sequence[str]) -> int:
    for word in (command, *arguments):
        if not _is_text(word):
            from trtllm_pipeline.errors import UsageError

            raise UsageError(f"{word}: is not text in UTF-8", hint="rename it, or give it by a link with another name")
    if command in STAGES:
        module = importlib.import_module(STAGE_MODULES.get(command, "trtllm_pipeline.cli.stage"))
    elif command in COMMANDS:
        module = importlib.import_module(COMMANDS[command][0])
    else:
        from difflib import get_close_matches

        from trtllm_pipeline.errors import UsageError

        near = get_close_matches(command, [*COMMANDS, *STAGES], n=1)
        raise UsageError(
            f"there is no command {command!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            hint="pipeline --help lists them",
        )
    sub = argparse.ArgumentParser(prog=f"pipeline {command}", formatter_class=argparse.RawDescriptionHelpFormatter)
    sub.set_defaults(command=command, words=list(arguments))
    module.configure(sub)
    result: int = module.run(sub.parse_args(arguments))
    return result
