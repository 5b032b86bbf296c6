"""Commands that still read their own options with argparse, until the last of them is a Typer command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import ModuleType

import typer

from trtllm_pipeline import terminal


def command(path: str, module: ModuleType) -> Callable[[typer.Context], int]:
    """A Typer command that hands its words to `configure` and `run` of a module."""
    name, *verb = path.split()
    if name == "stage":
        name, *verb = verb

    def run(ctx: typer.Context) -> int:
        return _run(name, module, [*verb, *ctx.args])

    vars(run)["bridged"] = True
    return run


def _run(name: str, module: ModuleType, words: Sequence[str]) -> int:
    terminal.clean_streams()
    parser = argparse.ArgumentParser(prog=f"pipeline {name}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(command=name, words=list(words))
    module.configure(parser)
    result: int = module.run(parser.parse_args(words))
    return result
