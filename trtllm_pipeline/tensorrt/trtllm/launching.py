"""Programs of the launch stages of both backends: serve the output of a repository stage with the requested frontend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trtllm_pipeline.base import FailureClass, StageError, probe, triton_installation
from trtllm_pipeline.models import model_config
from trtllm_pipeline.tensorrt.servers import command_lines, engine_requirements
from trtllm_pipeline.tensorrt.servers.disaggregated import Servers
from trtllm_pipeline.tensorrt.stage import launch
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import LaunchFrontend
from trtllm_pipeline.tensorrt.trtllm.checkpoint import check_stated
from trtllm_pipeline.tensorrt.trtllm.installation import installed
from trtllm_pipeline.tensorrt.trtllm.params import (
    CONTEXT_SETTINGS_FILE,
    FRONTEND_DISAGGREGATED,
    FRONTEND_TRITON,
    FRONTEND_TRITON_OPENAI,
    SERVE_FILE,
    SETTINGS_FILE,
)


def launch_engine(context: StageContext[LaunchFrontend]) -> None:
    """Serve an engine with as many ranks as it has, or with an OpenAI server. Raises StageError, ServerError."""
    launch.serve(context, engine_starter(context))


def engine_starter(context: StageContext[LaunchFrontend]) -> launch.Starter:
    """The server of an engine. Raises StageError, ServerError."""
    if context.params.frontend == FRONTEND_TRITON:
        return launch.ranks(context, probe.this_machine())
    if context.params.frontend == FRONTEND_TRITON_OPENAI:
        return launch.openai(context, openai_command(context.inputs), command_lines.TRITON_OPENAI)
    if context.params.frontend == FRONTEND_DISAGGREGATED:
        raise _not_served("disaggregated servers serve Hugging Face weights")
    return launch.openai(context, serve_command(context.inputs["repository"]))


def openai_command(inputs: Mapping[str, Path]) -> list[str]:
    """The command line of Triton's own OpenAI front end for a repository, with its tokenizer.

    Raises StageError if it cannot serve the engine, ServerError for an engine that was not built for this machine.
    """
    machine, repository = probe.this_machine(), inputs["repository"]
    engine = engine_requirements.check(inputs["engine"], machine)
    if machine.triton is None or machine.triton.openai is None:
        raise _not_served(f"Triton here has no {triton_installation.OPENAI_PROGRAM}; NVIDIA's images have it")
    if engine.world_size > 1:
        raise _not_served(
            f"{inputs['engine']} has {engine.world_size} ranks, which need mpirun, but Triton's OpenAI front end is one process"
        )
    try:
        texts = model_config.string_parameters(model_config.read(repository / "preprocessing" / model_config.FILE_NAME))
        tokenizer = texts["tokenizer_dir"]
    except (OSError, KeyError, model_config.ModelConfigError) as error:
        raise _not_served(f"{repository} names no tokenizer in its model preprocessing: {error}") from error
    return command_lines.triton_openai(installed(machine).python, machine.triton.openai, str(repository), tokenizer)


def _not_served(words: str) -> StageError:
    return StageError(
        words, failure=FailureClass.USER, hint="--frontend triton, with pipeline serve gateway in front of it"
    )


def launch_pytorch(context: StageContext[LaunchFrontend]) -> None:
    """Serve Hugging Face weights, in Triton or with trtllm-serve. Raises StageError, ServerError."""
    launch.serve(context, pytorch_starter(context))


def pytorch_starter(context: StageContext[LaunchFrontend]) -> launch.Starter:
    """The server of Hugging Face weights. Raises StageError, ServerError."""
    check_stated(context.inputs["model"])
    if context.params.frontend == FRONTEND_TRITON:
        return launch.llmapi(context)
    if context.params.frontend == FRONTEND_TRITON_OPENAI:
        raise _not_served("Triton's OpenAI front end serves engines")
    if context.params.frontend == FRONTEND_DISAGGREGATED:
        return launch.disaggregated(context, disaggregated_servers(context.inputs["repository"]))
    return launch.openai(context, serve_command(context.inputs["repository"]))


def disaggregated_servers(folder: Path) -> Servers:
    """The servers in serve.json, with the current paths of their settings files.

    Raises StageError for a directory that was not created for disaggregated servers.
    """
    hint = "pipeline stage repository --frontend disaggregated creates one"
    with _created_for("disaggregated servers", folder, hint):
        servers = Servers(**json.loads((folder / SERVE_FILE).read_text(encoding="utf-8"))["servers"])
    context, generation = (_in_place(folder, each) for each in (servers.context, servers.generation))
    return replace(servers, context=context, generation=generation)


def serve_command(folder: Path) -> list[str]:
    """The command line in serve.json, with the current path of its settings file.

    Raises StageError for a directory that was not created for trtllm-serve.
    """
    hint = "pipeline stage repository --frontend trtllm_serve creates one; --frontend triton serves a Triton repository"
    with _created_for("trtllm-serve", folder, hint):
        command = [str(word) for word in json.loads((folder / SERVE_FILE).read_text(encoding="utf-8"))["command"]]
    return _in_place(folder, command)


@contextmanager
def _created_for(server: str, folder: Path, hint: str) -> Iterator[None]:
    """Raise StageError if a directory cannot be read as one for `server`."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{folder} was not created for {server}: {SERVE_FILE}: {error}"
        raise StageError(message, failure=FailureClass.USER, hint=hint) from error


def _in_place(folder: Path, command: Sequence[str]) -> list[str]:
    """A command line with absolute paths of the settings files in a directory."""
    files = {SETTINGS_FILE, CONTEXT_SETTINGS_FILE}
    return [str(folder / word) if word in files else word for word in command]
