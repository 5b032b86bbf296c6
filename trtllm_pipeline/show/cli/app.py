"""`pipeline`: the table of commands, lazy import of the requested one, and messages for expected errors.

Nothing heavy is imported here: `pipeline --help` takes little longer than Typer. Annotations are evaluated at
definition, because Typer would evaluate string annotations of every command that it lists.
"""

import importlib
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
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
_STAGE: Final = "stage"
COMMANDS: Final = (
    Command("run", "run:run", "Run every cell of a matrix that is not done yet.", _RUNS),
    Command("plan", "run:plan", "Show what would run and why, shared stages, and expected times.", _RUNS),
    Command("status", "status:status", "Show the progress of each cell, or list runs.", _RUNS),
    Command("logs", "logs:logs", "Print the log of a stage.", _RUNS),
    Command("explain", "explain:explain", "Explain why a stage has to run.", _RUNS),
    Command("resume", "run:resume", "Continue the latest run (short for run --resume).", _RUNS, hidden=True),
    Command("report", "report:report", "Show results as a table, a page, or in formats of other programs.", _RESULTS),
    Command("compare", "compare:compare", "Compare runs or cells, and optionally fail on regressions.", _RESULTS),
    Command(
        "recommend", "recommend:recommend", "Recommend a configuration, and explain why others were excluded.", _RESULTS
    ),
    Command("search", "search:search", "Find the best cell without measuring every cell.", _RESULTS),
    Command("bench", "", "Measure any server, without a matrix.", _SERVERS),
    Command("bench load", "bench:load", "Measure the latency and throughput of any server by its URL."),
    Command("bench analyze", "bench:analyze", "Recompute all metrics from an event file."),
    Command("eval", "", "Score the answers of any server, without a matrix.", _SERVERS),
    Command("eval answers", "evaluate:answers", "Score the answers of any server."),
    Command("eval drift", "evaluate:drift", "Compare the answers of two servers or runs."),
    Command("eval lm-eval", "evaluate:lm_eval", "Run tasks of lm-eval against a server."),
    Command("serve", "", "Start, list, follow and stop managed servers and a gateway.", _SERVERS),
    Command("serve start", "serve:start", "Start a server that keeps running after this terminal closes."),
    Command("serve ps", "serve:ps", "List managed servers: state, ports, GPUs."),
    Command("serve status", "serve:status", "Show details of managed servers: endpoints, processes, exit reasons."),
    Command("serve logs", "serve:logs", "Print and follow the log of a managed server."),
    Command("serve stop", "serve:stop", "Stop servers and all of their processes."),
    Command("serve restart", "serve:restart", "Stop servers, and start them again on the same ports."),
    Command("serve install", "serve:install", "Write a systemd unit that starts a server at boot."),
    Command(
        "serve monitoring", "monitoring:monitoring", "Write files for Prometheus and Grafana: alerts, a dashboard."
    ),
    Command("serve gateway", "gateway:gateway", "Serve OpenAI endpoints for running servers."),
    Command("chat", "chat:chat", "Chat with a model in the terminal.", _SERVERS),
    Command("export", "export:export", "Write deployment files for a verified cell.", _SERVERS),
    Command("doctor", "doctor:doctor", "Check this machine, and show which toolchains it can use.", _FILES),
    Command("matrix", "", "Create, check and describe matrix files.", _FILES),
    Command("matrix init", "matrix:init", "Write a commented matrix file as a starting point."),
    Command("matrix check", "matrix:check", "Check matrix files and their recipes."),
    Command("matrix show", "matrix:show", "List the cells of a matrix, and the reasons for infeasible ones."),
    Command("matrix list", "matrix:list_", "List the shipped matrices."),
    Command("matrix schema", "matrix:schema", "Print the JSON Schema of matrix or recipe files, for editors."),
    Command("models", "", "Show model recipes, and check model repositories.", _FILES),
    Command("models list", "recipes:list_", "List the recipes, one line each."),
    Command("models show", "recipes:show", "Show the recipe of one model."),
    Command("models lint", "lint_repository:lint", "Find faults in a Triton model repository."),
    Command("store", "", "List, verify, share and remove the results in a workspace.", _FILES),
    Command("store list", "store_commands:list_", "List the artifacts."),
    Command("store du", "store_commands:du", "Show disk usage by stage, model and precision."),
    Command("store keep", "store_commands:keep", "Protect artifacts from prune and rm."),
    Command("store prune", "store_commands:prune", "Remove leftovers of killed runs, and optionally unused artifacts."),
    Command("store rm", "store_commands:rm", "Remove the artifacts of cells, stages or runs."),
    Command("store verify", "store_commands:verify", "Verify every file against the manifests."),
    Command("store repair", "store_commands:repair", "Rebuild the index from the manifests and the history."),
    Command("store provenance", "provenance:provenance", "Show, sign and verify the provenance of artifacts."),
    Command("store push", "remote:push", "Send artifacts to a remote store: S3, GCS, Azure, a directory."),
    Command("store pull", "remote:pull", "Fetch artifacts from a remote store, and verify them."),
    Command(_STAGE, "", "Run one stage for cells of a matrix or on explicit files.", _RUNS, hidden=True),
    Command(f"{_STAGE} replay", "execute:execute", "Rerun the commands of one job.json."),
)
"""All commands except those of stages, which `commands` adds."""
GROUPS: Final = frozenset(row.path for row in COMMANDS if not row.target)
_ABOUT: Final = (
    "Download, quantize, build, serve, test and measure models on Triton, from a matrix of configurations. An "
    "interrupted run can be continued.\n\nScripts run single stages: pipeline stage --help."
)
_WIDEST: Final = 140
"""Maximum width of help in columns. Wider lines are hard to read."""
NO_TELEMETRY: Final = "TRTLLM_NO_USAGE_STATS"
"""With 1, TensorRT-LLM processes send no telemetry. A value set by the user stays."""
_ABSENT: Final = dict.fromkeys(("help", "install_completion", "show_completion"), False)
"""Typer converts every value except bool with pydantic, even the None of an absent option, which costs 80 ms."""


def commands() -> tuple[Command, ...]:
    """All commands. Those of stages come from the toolchains' tables, which import slowly."""
    from trtllm_pipeline.tensorrt import catalog

    stages = (
        Command(f"{_STAGE} {name}", f"stage:{name}", stage.sentence) for name, stage in catalog.with_command().items()
    )
    *others, replay = COMMANDS
    return (*others, *stages, replay)


def build(words: Collection[str] | None, *, rich: bool = False, complete: bool = False) -> typer.Typer:
    """The application. Imports only the commands whose full name is in `words`, or all commands if `words` is None.

    Other commands have only a name and help. That is enough for `--help`, completion and suggestions. Shell completion
    also offers hidden commands.
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
    for row in commands() if words is None or _STAGE in words else COMMANDS:
        *group, name = row.path.split()
        hidden = row.hidden and not complete
        if not row.target:
            app.add_typer(groups[name], name=name, rich_help_panel=row.panel, hidden=hidden)
            continue
        typed = [word for word in row.path.split() if words is None or word in words]
        if group and not typed:
            continue  # other groups need only a name and help
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
        # \b keeps line breaks. Rich would read brackets as markup.
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


def _load(row: Command) -> Callable[..., Any]:
    from trtllm_pipeline.show.cli import command_signatures

    module, _, name = row.target.partition(":")
    return command_signatures.complete(
        getattr(importlib.import_module(f"trtllm_pipeline.show.cli.{module}"), name), row.path
    )


def _not_imported() -> None:
    raise AssertionError("a command runs only when its whole name was typed")


def _top(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks for expected errors too.")] = False,  # noqa: ARG001  `main` reads it
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

    Returns the exit code: 0 done, 1 a stage failed, 2 the user has to fix something first, 3 nothing is feasible,
    4 the measurements are not comparable, 130 interrupted.
    """
    if argv is None:
        terminal.start()
    words = list(sys.argv[1:] if argv is None else argv)
    # TensorRT-LLM's telemetry is on by default since the release candidates of 1.3. Child processes inherit this setting.
    os.environ.setdefault(NO_TELEMETRY, "1")
    debug = bool(os.environ.get("PIPELINE_DEBUG"))
    try:
        with _terminable():
            _check_text(words)
            rich = sys.stdout.isatty()
            completed = f"{os.environ.get('COMP_WORDS', '')} {os.environ.get('_TYPER_COMPLETE_ARGS', '')}".split()
            command: Any = get_command(build({*_naming(words), *completed}, rich=rich, complete=bool(completed)))
            order = [row.path for row in COMMANDS]  # Typer lists all groups before all commands
            command.commands = dict(sorted(command.commands.items(), key=lambda each: order.index(each[0])))
            if f"_{_program().replace('-', '_').upper()}_COMPLETE" in os.environ:
                command.main([], prog_name=_program())  # exits
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
        return 0  # the reader of our output has exited, for example in `pipeline plan | head`
    except Exception as error:
        from trtllm_pipeline.show.cli.output import explain_error

        terminal.clean_streams()
        code = explain_error(_mistake(error) if isinstance(error, typer.TyperException) else error)
        if code is None or debug:
            raise
        return code


_OF_ANY_SERVER: Final = {
    "perf": "pipeline bench load -u HOST:PORT --model MODEL measures a running server",
    "accuracy": "pipeline eval answers -u HOST:PORT --model MODEL --input-data FILE scores a running server",
}
"""Stage that needs a service of this project -> the command for any server."""


def _mistake(error: typer.TyperException) -> Exception:
    """Typer's error about a command line, as a UsageError."""
    from trtllm_pipeline.base import UsageError

    near = getattr(error, "possibilities", None)
    message = (error.message if near else error.format_message()).rstrip(".").replace("Value error, ", "")
    ctx = getattr(error, "ctx", None)
    hint = None if ctx is None else f"{ctx.command_path} --help"
    unknown = re.match(r"No such command '(\w+)'", message)
    if unknown and any(row.path == f"{_STAGE} {unknown[1]}" for row in commands()):
        hint = f"pipeline stage {unknown[1]} --help"
    params = () if ctx is None else ctx.command.params
    if ctx is not None and getattr(error, "option_name", "") in {"-u", "--url"}:
        hint = _OF_ANY_SERVER.get(ctx.command.name or "", hint)
    if getattr(error, "option_name", "") == "-m" and any(param.name == "model" for param in params):
        hint = "--model NAME (-m is --matrix in other commands)"  # the short option for the model in other load clients
    return UsageError(
        message[:1].lower() + message[1:] + (f"; did you mean {' or '.join(near)}?" if near else ""), hint=hint
    )


def _program() -> str:
    """The program name as typed. Completion is installed by name."""
    typed = Path(sys.argv[0]).name
    return typed if typed == "trtllm-pipeline" else "pipeline"


def _naming(words: Sequence[str]) -> Sequence[str]:
    """The words that may name a command. `run --until build` must not import the stage `build` and with it all toolchains."""
    plain = [word for word in words if not word.startswith("-")]
    return plain[:2] if plain and plain[0] in GROUPS else plain[:1]


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM interrupt like Ctrl-C, unless another handler is installed."""
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
    """Raise UsageError for a word that cannot be written to a file. Bytes that are not UTF-8 arrive as surrogates."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            from trtllm_pipeline.base import UsageError

            raise UsageError(f"{word}: is not UTF-8 text", hint="rename it, or use a link with another name") from error
