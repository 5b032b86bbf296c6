"""Installed TensorRT-LLM compared with this package's tables: options of programs, placeholders of templates, LLM API arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Machine, TensorRTLLM
from trtllm_pipeline.tensorrt.trtllm import commands, installation, llm_args, program_options, releases, templates

_AT_ONCE: Final = 4
"""Each program imports all of TensorRT-LLM."""
_OF_EVERY_TOOLCHAIN: Final = "trtllm-serve"
TEMPLATES: Final = "Triton templates"
LLM_API: Final = "LLM API"
"""Names of the comparisons other than programs."""
_OF_EVERY_PROGRAM: Final = frozenset(("-h", "--help"))


@dataclass(frozen=True, slots=True)
class InstalledComparison:
    """One program, the templates or the arguments of the LLM API, as installed and as recorded."""

    name: str
    command: tuple[str, ...]
    """Command line of the program, directory of the templates, or file of the schema."""
    reason: str | None = None
    """Reason if it could not be compared."""
    known: int = 0
    """Number of names that match."""
    gone: tuple[str, ...] = ()
    """Recorded but not installed."""
    new: tuple[str, ...] = ()
    """Installed but not recorded."""
    changed: tuple[str, ...] = ()
    """Different in both, with a description."""

    @property
    def differences(self) -> str:
        """The differences as text, or empty."""
        groups = (("gone", self.gone), ("new", self.new), ("changed", self.changed))
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in groups if names)


def compare(machine: Machine, families: Sequence[str], *, engines: bool) -> tuple[InstalledComparison, ...]:
    """Compare everything installed of TensorRT-LLM, with the converters of `families`. Empty if it is not installed.

    Without `engines`, compares only trtllm-serve and the LLM API: the PyTorch runtime needs no other program, and its
    Triton template has no placeholders.
    """
    installation = machine.tensorrt_llm
    if installation is None:
        return ()
    commands = {
        name: command
        for name, command in programs(installation, machine, families)
        if engines or name == _OF_EVERY_TOOLCHAIN
    }
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pending = [pool.submit(_program, tool, command, installation.release) for tool, command in commands.items()]
        found = [each.result() for each in pending]
    if engines:
        found.append(_templates(installation))
    if (arguments := _arguments(installation)) is not None:
        found.append(arguments)
    return tuple(found)


def programs(
    tensorrt_llm: TensorRTLLM, machine: Machine, families: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Name in the table of options and command line, or None if not installed."""

    def script(inside: str) -> tuple[str, ...] | None:
        path = installation.script(machine, inside)
        return None if path is None or not Path(path).is_file() else (tensorrt_llm.python, path)

    yield "trtllm-build", None if tensorrt_llm.build is None else (tensorrt_llm.build,)
    yield (
        _OF_EVERY_TOOLCHAIN,
        None if tensorrt_llm.serve is None else (tensorrt_llm.serve, *commands.serve_subcommand(tensorrt_llm.release)),
    )
    yield "quantize.py", script(releases.QUANTIZE_SCRIPT)
    yield "run.py", script(releases.RUN_SCRIPT)
    for heads in releases.HEADS:
        if (start := script(releases.convert_script(tensorrt_llm.release, "", heads))) is not None:
            yield releases.convert_tool("", heads), start
    for family in families:
        yield releases.convert_tool(family), script(releases.convert_script(tensorrt_llm.release, family))


def _program(tool: str, command: tuple[str, ...] | None, release: str) -> InstalledComparison:
    if command is None:
        return InstalledComparison(tool, (), reason="is not installed")
    text = program_options.installed_help(command)
    installed = {} if text is None else dict(program_options.parse_help(text))
    if not installed:
        return InstalledComparison(tool, command, reason=f"{' '.join(command)} --help: no options were printed")
    spelled = {
        spelling: form
        for name, form in program_options.known(tool, release).items()
        for spelling in (name, *form.aliases)
    }
    changed = {
        name: words for name in spelled.keys() & installed.keys() if (words := _change(spelled[name], installed[name]))
    }
    return InstalledComparison(
        tool,
        command,
        known=len(spelled.keys() & installed.keys()) - len(changed),
        gone=tuple(sorted(spelled.keys() - installed.keys())),
        new=tuple(sorted(installed.keys() - spelled.keys() - _OF_EVERY_PROGRAM)),
        changed=tuple(f"{name} {changed[name]}" for name in sorted(changed)),
    )


def _change(recorded: program_options.Form, installed: program_options.Installed) -> str | None:
    if recorded.takes_value != installed.takes_value:
        return "takes a value" if installed.takes_value else "no longer takes a value"
    # argparse also lists Python's None, which cannot be typed.
    ours, theirs = ({*map(str, each.choices)} - {"None"} if each.choices else None for each in (recorded, installed))
    if theirs is None or ours == theirs:  # help may omit them
        return None
    return f"takes one of {', '.join(sorted(theirs))}; recorded: {', '.join(sorted(ours)) if ours else 'anything'}"


def _templates(installation: TensorRTLLM) -> InstalledComparison:
    if installation.templates is None:
        return InstalledComparison(TEMPLATES, (), reason="are not installed")
    installed = templates.installed_places(Path(installation.templates))
    if installed is None:
        missing = f"{installation.templates} lacks one of {', '.join(templates.MODELS)}"
        return InstalledComparison(TEMPLATES, (installation.templates,), reason=missing)
    recorded = templates.recorded_places(installation.release) | {*templates.FIXED}
    return InstalledComparison(
        TEMPLATES,
        (installation.templates,),
        known=len(recorded & installed),
        gone=tuple(sorted(recorded - installed)),
        new=tuple(sorted(installed - recorded)),
    )


def _arguments(installation: TensorRTLLM) -> InstalledComparison | None:
    """The schema of the LLM API's YAML files. None for a release without one and without a known schema."""
    own = llm_args.installed(installation.release, installation.python)
    known = llm_args.of_release(installation.release)
    if known is None:
        reason = "no schema of this line of releases is recorded"
        return None if own is None else InstalledComparison(LLM_API, (own.source,), reason=reason)
    if own is None and not releases.at_least(installation.release, releases.FIRST_SCHEMA):
        return None
    if own is None:
        return InstalledComparison(LLM_API, (), reason=f"the package has no {llm_args.INSTALLED}")
    gone, new, changed = known.compared(own)
    same = len(known.names()) - len(gone) - len(changed)
    return InstalledComparison(LLM_API, (own.source,), known=same, gone=gone, new=new, changed=changed)
