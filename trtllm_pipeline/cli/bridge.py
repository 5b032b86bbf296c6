"""Commands that still read their own options with argparse, until the last of them is a Typer command."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

import typer

from trtllm_pipeline import terminal

_FORMS: Final = {
    "bench load": (["-u"], []),
    "bench analyze": (["analyze"], ["analyze"]),
    "bench self-test": (["self-test"], ["self-test"]),
    "evaluate answers": (["-u"], []),
    "evaluate drift": (["compare"], ["compare"]),
    "evaluate lm-eval": (["lm-eval"], ["lm-eval"]),
}
"""The words by which a module chooses its options, and those that it reads."""


def command(path: str, module: ModuleType) -> Callable[[typer.Context], int]:
    """A Typer command that hands its words to `configure` and `run` of a module."""
    name, *verb = path.split()
    if name == "stage":
        name, *verb = verb
    chosen, first = _FORMS.get(path, (verb, verb))

    def run(ctx: typer.Context) -> int:
        return _run(name, module, [*first, *ctx.args], [*chosen, *ctx.args])

    vars(run)["bridged"] = True
    return run


def run(name: str, words: Sequence[str]) -> int:
    """Run a stage's program for an attempt."""
    own = {"repository": "repository", "perf": "perf", "accuracy": "accuracy"}.get(name, "stage")
    return _run(name, importlib.import_module(f"trtllm_pipeline.cli.{own}"), words, words)


def _run(name: str, module: ModuleType, words: Sequence[str], chosen: Sequence[str]) -> int:
    terminal.clean_streams()
    parser = argparse.ArgumentParser(prog=f"pipeline {name}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(command=name, words=list(chosen))
    module.configure(parser)
    result: int = module.run(parser.parse_args(words))
    return result
