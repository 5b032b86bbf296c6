"""`pipeline`: a table of commands, of which only the one that was asked for is imported, and every expected error in words.

Nothing heavy is imported here: `pipeline --help` costs little more than Typer. Annotations are no texts here, which Typer
would evaluate for each of the commands that it only names.
"""

import functools
import gc
import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import typer
from typer._coercion import RuntimeParam, build_runtime_param
from typer.main import get_command

from trtllm_pipeline import __version__
from trtllm_pipeline.base import terminal


class Command(NamedTuple):
    """A row of the table: `target` is MODULE:FUNCTION in `trtllm_pipeline.show.cli`, empty for a group of commands."""

    path: str
    target: str
    help: str
    panel: str = ""
    hidden: bool = False


_RUNS: Final = "Runs"
_RESULTS: Final = "Results"
_SERVERS: Final = "Servers"
_FILES: Final = "Files and this machine"

STAGES: Final = {
    "download": "Fetch a model and verify it.",
    "adapter": "Fetch a LoRA adapter and verify it.",
    "draft": "Fetch the draft model of speculative decoding and verify it.",
    "quantize": "Quantize a model into a checkpoint.",
    "convert": "Convert a model into a checkpoint, quantized if the precision needs it.",
    "build": "Build an engine from a checkpoint.",
    "visual": "Build the vision encoder engine.",
    "check": "Get one answer from an engine, without a server.",
    "repository": "Write a Triton model repository for an engine.",
    "launch": "Start a server on a repository and keep it running.",
    "smoke": "Check a running server's answers over every protocol.",
    "perf": "Measure the latency and throughput of a running server.",
    "accuracy": "Score the answers of a running server.",
    "score": "Score the answers that perf timed.",
}
COMMANDS: Final = (
    Command("run", "run:run", "Run everything in a matrix that is not done yet.", _RUNS),
    Command("plan", "run:plan", "Show what would run and why, what cells share, and how long it takes.", _RUNS),
    Command("status", "status:status", "Show the progress of each cell, or list the runs.", _RUNS),
    Command("logs", "logs:logs", "Show the log of a cell's stage.", _RUNS),
    Command("explain", "explain:explain", "Explain why a stage has to run, or what its result was made from.", _RUNS),
    Command("resume", "run:resume", "Continue the latest run: the short form of run --resume.", _RUNS, hidden=True),
    Command("report", "report:report", "Show results: table, HTML page, JSON, CSV, Markdown, JUnit XML.", _RESULTS),
    Command("compare", "compare:compare", "Show what got better or worse, and fail on regressions if asked.", _RESULTS),
    Command("recommend", "recommend:recommend", "Recommend a configuration, and explain why not the others.", _RESULTS),
    Command("search", "search:search", "Find the best cell of a large matrix without measuring all of it.", _RESULTS),
    Command("bench", "", "Measure any server, without a matrix.", _SERVERS),
    Command("bench load", "bench:load", "Measure the latency and throughput of any server by its URL."),
    Command("bench analyze", "bench:analyze", "Recompute all metrics from an event file."),
    Command("eval", "", "Score the answers of any server, without a matrix.", _SERVERS),
    Command("eval answers", "evaluate:answers", "Score the answers of any server."),
    Command("eval drift", "evaluate:drift", "Compare the answers of two servers or runs."),
    Command("eval lm-eval", "evaluate:lm_eval", "Run tasks of lm-eval against a server."),
    Command("serve", "", "Start managed servers and a gateway, and list, follow and stop them.", _SERVERS),
    Command("serve start", "serve:start", "Start a server and keep it running after this terminal is closed."),
    Command("serve ps", "serve:ps", "List the servers that are kept: state, ports, GPUs."),
    Command("serve status", "serve:status", "Show all about managed servers: endpoints, processes, why one ended."),
    Command("serve logs", "serve:logs", "Print what a managed server wrote, and follow it."),
    Command("serve stop", "serve:stop", "Stop servers; nothing of them is left running."),
    Command("serve restart", "serve:restart", "Stop servers, and start them again on the same ports."),
    Command("serve install", "serve:install", "Write a systemd unit that keeps a server over restarts of the machine."),
    Command(
        "serve monitoring", "monitoring:monitoring", "Write files for Prometheus and Grafana: alerts, a dashboard."
    ),
    Command("serve gateway", "gateway:gateway", "Offer running servers as OpenAI endpoints."),
    Command("chat", "chat:chat", "Talk with a model in the terminal.", _SERVERS),
    Command("export", "export:export", "Write files that serve a verified cell elsewhere.", _SERVERS),
    Command("doctor", "doctor:doctor", "Show what this machine has and lacks, and which toolchains work.", _FILES),
    Command("matrix", "", "Create, check and describe matrix files.", _FILES),
    Command("matrix init", "matrix:init", "Write a commented matrix to start from."),
    Command("matrix check", "matrix:check", "Check matrix files and the recipes they name."),
    Command("matrix show", "matrix:show", "List the cells of a matrix, and why some can never work."),
    Command("matrix list", "matrix:list_", "List the matrices that come with the project."),
    Command("matrix schema", "matrix:schema", "Print the JSON Schema of matrix or recipe files, for editors."),
    Command("models", "", "List and show model recipes, and check Triton model repositories.", _FILES),
    Command("models list", "recipes:list_", "List the recipes, one line each."),
    Command("models show", "recipes:show", "Show everything known about one model."),
    Command("models lint", "lint_repository:lint", "Find faults in a Triton model repository."),
    Command("store", "", "List, verify, share and remove the results in a workspace.", _FILES),
    Command("store list", "store_commands:list_", "List the artifacts."),
    Command("store du", "store_commands:du", "Show what takes the space, by stage, model and precision."),
    Command("store keep", "store_commands:keep", "Protect artifacts from prune and rm."),
    Command(
        "store prune", "store_commands:prune", "Remove what killed runs left behind, and unused artifacts if asked."
    ),
    Command("store rm", "store_commands:rm", "Remove the artifacts of cells, stages or runs."),
    Command("store verify", "store_commands:verify", "Read every file again and compare it with the manifests."),
    Command("store repair", "store_commands:repair", "Rebuild the index from the manifests and the history."),
    Command("store provenance", "provenance:provenance", "Show what artifacts were made from, sign it, check who did."),
    Command("store push", "remote:push", "Send artifacts to a remote store: S3, GCS, Azure, a directory."),
    Command("store pull", "remote:pull", "Fetch artifacts from a remote store, and verify them."),
    Command("stage", "", "Run one stage, for cells of a matrix or on explicit files.", _RUNS, hidden=True),
    *(Command(f"stage {name}", f"stage:{name}", text) for name, text in STAGES.items()),
    Command("stage replay", "execute:execute", "Run the commands of one job.json again."),
)
GROUPS: Final = frozenset(row.path for row in COMMANDS if not row.target)
_ABOUT: Final = (
    "From a matrix of models to measured Triton servers: download, quantize, build, serve, test, measure. An "
    "interrupted run continues where it stopped.\n\nScripts run single stages: pipeline stage --help."
)
_WIDEST: Final = 140
"""Columns of the widest help; wider lines are hard to read."""
NO_TELEMETRY: Final = "TRTLLM_NO_USAGE_STATS"
"""With 1, no process of TensorRT-LLM says anything of itself. A user's own word for it stays."""
_ABSENT: Final = dict.fromkeys(("help", "install_completion", "show_completion"), False)
"""Typer converts all that is no bool with pydantic, even the None of an option that is absent: 80 ms."""


def build(words: Collection[str] | None, *, rich: bool = False, complete: bool = False) -> typer.Typer:
    """The application. Of its commands only those are imported whose whole name is in `words`; None means all.

    The others are known by name and help, which is all that `--help`, completion and suggestions need. A shell that
    completes is offered hidden commands too.
    """

    def new(text: str, callback: Callable[..., None]) -> typer.Typer:
        return typer.Typer(
            help=text,
            callback=callback,
            invoke_without_command=True,
            rich_markup_mode="rich" if rich else None,
            pretty_exceptions_enable=False,
            context_settings={"default_map": _ABSENT, "max_content_width": _WIDEST},
            add_completion=callback is _top,
        )

    app = new(_ABOUT, _top)
    groups = {row.path: new(row.help, _help_alone) for row in COMMANDS if not row.target}
    for row in COMMANDS:
        *group, name = row.path.split()
        hidden = row.hidden and not complete
        if not row.target:
            app.add_typer(groups[name], name=name, rich_help_panel=row.panel, hidden=hidden)
            continue
        typed = [word for word in row.path.split() if words is None or word in words]
        if group and not typed:
            continue  # of a group that is not asked for, the name and the help are enough
        wanted = len(typed) == len(row.path.split())
        _register(groups[group[0]] if group else app, name, row, rich=rich, wanted=wanted, hidden=hidden)
    return app


def _register(app: typer.Typer, name: str, row: Command, *, rich: bool, wanted: bool, hidden: bool) -> None:
    settings: dict[str, Any] = {"default_map": _ABSENT}
    text = epilog = ""
    run: Callable[..., Any] = _not_imported
    if wanted:
        run = _load(row)
        if aliases := getattr(run, "aliases", {}):
            settings["token_normalize_func"] = lambda word: aliases.get(word, word)
        text, _, examples = (inspect.getdoc(run) or "").partition("\nexamples:\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))  # rich keeps line breaks
        # \b: lines stay as they are. Rich takes brackets for its markup.
        epilog = f"\b\nExamples:\n{examples}" if examples else ""
        if rich:
            text, epilog = text.replace("[", "\\["), epilog.replace("[", "\\[")
    app.command(
        name,
        help=text or row.help,
        short_help=row.help,
        epilog=epilog or None,
        rich_help_panel=row.panel or None,
        context_settings=settings,
        hidden=hidden,
    )(run)


class _AsTyped(RuntimeParam):
    """A value that is what it has to be already, None too: Typer would import pydantic to find that out, 65 ms.

    Everything else is left to Typer, and so is what it says of a wrong value.
    """

    def _coerce_value(self, value: Any, param: Any, ctx: Any) -> Any:
        wanted = param.type_descriptor
        words = value if wanted.is_list else (value,)
        annotation = get_args(wanted.annotation)[0] if wanted.is_list else wanted.annotation
        allowed = get_args(annotation) if get_origin(annotation) is Literal else None
        known = (annotation is str or allowed) and self.parameter_info.parser is None
        if known and all(type(word) is str and (allowed is None or word in allowed) for word in words):
            return list(words) if wanted.is_list else value
        return build_runtime_param(wanted)._coerce_value(value, param=param, ctx=ctx)  # noqa: SLF001


def _convert_little(command: Any) -> None:
    """Let the options of `command`, and of the commands below it, take what needs no conversion as it is."""
    for param in command.params:
        wanted = getattr(param, "type_descriptor", None)
        if wanted is not None:
            param._runtime_param = _AsTyped(wanted.parameter_info, wanted.annotation)  # noqa: SLF001
    for below in getattr(command, "commands", {}).values():
        _convert_little(below)


def _load(row: Command) -> Callable[..., Any]:
    """The function of a command, with its output cleaned from when it starts."""
    module_name, _, name = row.target.partition(":")
    from trtllm_pipeline.show.cli import command_signatures

    module = importlib.import_module(f"trtllm_pipeline.show.cli.{module_name}")

    function = command_signatures.complete(getattr(module, name), row.path)

    @functools.wraps(function)
    def cleaned(*args: Any, **values: Any) -> Any:
        terminal.clean_streams()
        return function(*args, **values)

    return cleaned


def _not_imported() -> None:
    raise AssertionError("a command runs only when its whole name was typed")


def _top(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of expected errors too.")] = False,  # noqa: ARG001  `main` reads it
) -> None:
    if version:
        typer.echo(f"trtllm-pipeline {__version__}")
        raise typer.Exit
    _help_alone(ctx)


def _help_alone(ctx: typer.Context) -> None:
    """A group without a command shows its help."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns the exit code: 0 done, 1 a stage failed, 2 the user has to mend or do something first, 3 nothing is feasible,
    4 what was to be compared is not comparable, 130 interrupted.
    """
    if argv is None:
        terminal.start()
    words = list(sys.argv[1:] if argv is None else argv)
    # TensorRT-LLM's telemetry is on by default since candidates of 1.3. Whatever is started from here inherits this.
    os.environ.setdefault(NO_TELEMETRY, "1")
    debug = bool(os.environ.get("PIPELINE_DEBUG"))
    try:
        with _terminable():
            _check_text(words)
            rich = sys.stdout.isatty()
            if rich and (not words or "--help" in words or words[-1] in GROUPS):
                _import_rich_help()
            completed = _completed(os.environ)
            command: Any = get_command(build({*_naming(words), *completed}, rich=rich, complete=bool(completed)))
            order = [row.path for row in COMMANDS]  # Typer lists all groups before all commands
            command.commands = dict(sorted(command.commands.items(), key=lambda each: order.index(each[0])))
            _convert_little(command)
            if argv is None:
                gc.freeze()  # what is imported stays
            if f"_{_program().replace('-', '_').upper()}_COMPLETE" in os.environ:
                command.main([], prog_name=_program())  # ends
            with command.make_context(_program(), words) as ctx:
                debug = debug or ctx.params["debug"]
                code: int | None = command.invoke(ctx)
            sys.stdout.flush()
            return code or 0
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        return 0  # whoever read our output has gone, `pipeline plan | head` for instance
    except Exception as error:
        from trtllm_pipeline.show.cli.output import explain_error

        terminal.clean_streams()
        code = explain_error(_mistake(error) if isinstance(error, typer.TyperException) else error)
        if code is None or debug:
            raise
        return code
    finally:
        if argv is None:
            gc.freeze()  # the process ends: looking through a large plan once more took a tenth of the time


def _import_rich_help() -> None:
    """Import what draws help on a terminal, without what it imports to draw Markdown and tracebacks: half of the time.

    Nothing of ours is drawn so by Typer; who imports these modules later gets the real ones.
    """
    unused = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
    unused = {name: what for name, what in unused.items() if name not in sys.modules}
    for name, what in unused.items():
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], what, None)
    try:
        importlib.import_module("typer.rich_utils")
    finally:
        for name in unused:
            del sys.modules[name]


_OF_ANY_SERVER: Final = {
    "perf": "pipeline bench load -u HOST:PORT --model MODEL measures a server that runs",
    "accuracy": "pipeline eval answers -u HOST:PORT --model MODEL --input-data FILE scores a server that runs",
}
"""A stage, which starts from a service of ours -> the command for any server."""


def _mistake(error: typer.TyperException) -> Exception:
    """What Typer says of a command line, as an error of ours."""
    from trtllm_pipeline.base import UsageError

    near = getattr(error, "possibilities", None)
    message = (error.message if near else error.format_message()).rstrip(".").replace("Value error, ", "")
    ctx = getattr(error, "ctx", None)
    hint = None if ctx is None else f"{ctx.command_path} --help"
    if stage := next((each for each in STAGES if message.startswith(f"No such command '{each}'")), None):
        hint = f"pipeline stage {stage} --help"
    params = () if ctx is None else ctx.command.params
    if ctx is not None and getattr(error, "option_name", "") in {"-u", "--url"}:
        hint = _OF_ANY_SERVER.get(ctx.command.name or "", hint)
    if getattr(error, "option_name", "") == "-m" and any(param.name == "model" for param in params):
        hint = "--model NAME; -m is the matrix, in other commands"  # other load clients call the model so
    return UsageError(
        message[:1].lower() + message[1:] + (f"; did you mean {' or '.join(near)}?" if near else ""),
        hint=hint,
    )


def _program() -> str:
    """The name that was typed: completion is installed by name."""
    typed = Path(sys.argv[0]).name
    return typed if typed == "trtllm-pipeline" else "pipeline"


def _naming(words: Sequence[str]) -> Sequence[str]:
    """The words that may name a command. `run --until build` does not import the stage `build`, and all toolchains with it."""
    plain = [word for word in words if not word.startswith("-")]
    return plain[:2] if plain and plain[0] in GROUPS else plain[:1]


def _completed(environment: Mapping[str, str]) -> list[str]:
    """The words of the command line that a shell asks to complete."""
    return f"{environment.get('COMP_WORDS', '')} {environment.get('_TYPER_COMPLETE_ARGS', '')}".split()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, unless something else has been arranged."""
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not free:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _check_text(words: Sequence[str]) -> None:
    """Raise UsageError for a word that cannot stand in our files: bytes that are no UTF-8 come as halves of characters."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            from trtllm_pipeline.base import UsageError

            raise UsageError(
                f"{word}: is not UTF-8 text", hint="rename it, or give it by a link with another name"
            ) from error
