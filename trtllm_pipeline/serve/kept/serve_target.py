"""The input of a managed server: a cell of a workspace, or a directory with a repository or an engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Json, Machine, PlanError, StateError, UsageError, read_object, user_files
from trtllm_pipeline.models import Engine, EngineError, model_config, model_names, referenced_paths
from trtllm_pipeline.orchestrate import Artifact, Request, Store, manifest, served_cell
from trtllm_pipeline.tensorrt import OUT, SERVE_FILE, Stage, StageContext, companions, run_program, serve_command
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import params as stage_params

_EMBEDDED_WEIGHTS: Final = "model.gguf"
_EXPECTED: Final = (
    f"a directory with a Triton repository of an LLM ({model_names.ENSEMBLE}/config.pbtxt), the output of the repository "
    "stage for trtllm-serve (serve.json), or an engine (config.json)"
)


@dataclass(frozen=True, kw_only=True)
class ServeTarget:
    """Everything needed to start a server, whatever its source."""

    toolchain: str
    launch: Stage
    params: Any
    inputs: Mapping[str, Path]
    """Inputs of the launch stage. `repository` is missing if it has to be written first, for `engine`."""
    model: str
    """Default model name for OpenAI clients."""
    name: str
    """Default name of the server."""
    model_folder: Path | None
    max_seq_len: int | None = None
    max_input_len: int | None = None
    gpus: int = 0
    cell: str | None = None
    folder: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """LoRA adapters by name."""
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    gateway: Mapping[str, Json] = field(default_factory=dict)
    """The matrix's settings of the gateway."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """All directories that it is served from, including the engine or weights that its repository refers to."""
        folders = (*self.inputs.values(), *(() if self.model_folder is None else (self.model_folder,)))
        if (repository := self.inputs.get("repository")) is None:
            return folders
        command = serve_command(repository) if (repository / SERVE_FILE).is_file() else []
        return tuple(dict.fromkeys((*folders, *referenced_paths.folders(repository, command))))


def require_text(inputs: Mapping[str, Path]) -> None:
    """Raise UsageError for a server that cannot have a gateway because its requests have images."""
    if "repository" in inputs and (inputs["repository"] / model_names.ENCODERS_MODEL).is_dir():
        raise UsageError(
            "--openai: the gateway only forwards text, and each request to this server needs an image",
            hint="leave it out",
        )


def is_folder(what: str) -> bool:
    """True if `what` is a directory, False if it is a cell. Raises UsageError for a path that does not exist."""
    if os.path.isdir(what):
        return True
    if what.startswith(("/", "./", "../", "~")):
        raise UsageError(f"directory {what} does not exist", hint="name a cell, or an engine or repository directory")
    return False


def of_request(request: Request, store: Store, model_folder: Path | None) -> ServeTarget:
    """The target for the one requested cell. Raises UsageError unless it is built, PlanError, StateError."""
    store.check_writable()
    try:
        target = of_cell(served_cell.served_cell(request, store))
    except UsageError as error:
        raise UsageError(error.message.removeprefix("--cells "), hint=error.hint) from error
    return target if model_folder is None else replace(target, model_folder=model_folder)


def of_cell(served: served_cell.ServedCell) -> ServeTarget:
    """The target for a cell. Raises PlanError if this machine lacks a requirement of its toolchain."""
    cell, machine = served.cell, served.plan.machine
    if cell.toolchain in toolchains.SERVERS and (url := cell.settings["openai"]["url"]):
        raise UsageError(
            f"{cell.id} is already served at {url}",
            hint=f"pipeline serve gateway {cell.model}={str(url).rstrip('/').removesuffix('/v1')}/v1",
        )
    _check_runs(cell.toolchain, machine)
    stages = {served.plan.stage_runs[run].stage.name for run in served.launch.inputs.values()}
    return ServeTarget(
        toolchain=cell.toolchain,
        launch=served.launch.stage,
        params=served.launch.params,
        inputs=served.inputs,
        model=cell.model,
        name=_name(f"{cell.model}-{cell.precision}"),
        model_folder=served.model_folder,
        max_seq_len=served.max_seq_len,
        max_input_len=cell.isl,
        gpus=served.plan.resources(served.launch).gpus,
        cell=cell.id,
        adapters={name: served.inputs[place] for place, (name, _) in companions.adapters(cell).items()},
        artifacts={stage: served.artifacts[stage] for stage in sorted({*stages, "build"} & served.artifacts.keys())},
        gateway=cell.settings.get("gateway", {}),
    )


def of_folder(folder: Path, model_folder: Path | None, machine: Machine) -> ServeTarget:
    """The target for a directory. Raises UsageError if it cannot be served, PlanError if this machine cannot."""
    folder = folder.absolute()
    if not (folder / "config.json").is_file() and (folder / OUT).is_dir():
        folder /= OUT  # an artifact's directory
    if (folder / SERVE_FILE).is_file():
        return _of_serve_file(folder, model_folder, machine)
    if (folder / model_names.ENSEMBLE / model_config.FILE_NAME).is_file() or (
        folder / model_names.ENGINE_MODEL / model_config.FILE_NAME
    ).is_file():
        return _of_repository(folder, model_folder, machine)
    if (folder / "config.json").is_file():
        return _of_engine(folder, model_folder, machine)
    models = sorted(path.parent.name for path in folder.glob(f"*/{model_config.FILE_NAME}"))
    why = (
        f"no model is named {model_names.ENSEMBLE} or {model_names.ENGINE_MODEL}; its models are {', '.join(models)}"
        if models
        else "it contains no repository, serve.json or engine"
    )
    raise UsageError(f"{folder} cannot be served: {why}", hint=f"name a cell, or {_EXPECTED}")


def _of_serve_file(folder: Path, model_folder: Path | None, machine: Machine) -> ServeTarget:
    words = serve_command(folder)
    paths = [Path(word) for word in words if word.startswith("/") and Path(word).is_dir()]
    toolchain = toolchains.PYTORCH if "pytorch" in words else toolchains.ENGINES
    engine = next((each for each in map(_engine, paths) if each is not None and each.rank_files[0].exists()), None)
    tokenizer = model_folder or next((path for path in paths if (path / "tokenizer_config.json").exists()), None)
    ranks = engine.world_size if engine else _number(words, "--tp_size") * _number(words, "--pp_size")
    inputs = {"repository": folder, "engine": engine.folder if engine else folder, "model": tokenizer or folder}
    return _of(toolchain, machine, inputs, folder, tokenizer, engine, ranks, frontend="trtllm_serve")


def _number(words: list[str], option: str) -> int:
    """The value of a command-line option. 1 if absent."""
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == option:
            value = value or "".join(words[place + 1 : place + 2])
            return int(value) if value.isdigit() else 1
    return 1


def _of_repository(folder: Path, model_folder: Path | None, machine: Machine) -> ServeTarget:
    inner = folder / model_names.ENGINE_MODEL
    settings = inner / "1" / "model.yaml"
    if settings.is_file():
        return _of_llmapi(folder, settings, model_folder, machine)
    try:
        parameters = model_config.string_parameters(model_config.read(inner / model_config.FILE_NAME))
    except (OSError, model_config.ModelConfigError) as error:
        raise UsageError(
            f"{folder} cannot be served: {error}", hint=f"pipeline models lint {folder} reports its problems"
        ) from error
    named = parameters.get("gpt_model_path") or parameters.get("engine_dir") or ""
    engine = _engine(Path(named)) if named else None
    if engine is None:
        raise UsageError(
            f"{folder}: the engine directory of its model {model_names.ENGINE_MODEL} does not exist: {named or 'none'}",
            hint="write the repository again: pipeline stage repository --engine DIR --model DIR --output-dir DIR",
        )
    try:
        code = (inner / "1" / "model.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        code = ""
    model = model_folder or _tokenizer_of(folder) or engine.folder
    inputs = {"repository": folder, "engine": engine.folder, "model": model}
    if "trtllm_pipeline.tensorrt.embedded" in code:
        return _of(toolchains.EMBEDDED, machine, inputs, folder, model, engine, 0)
    return _of(toolchains.ENGINES, machine, inputs, folder, model, engine, engine.world_size)


def _tokenizer_of(repository: Path) -> Path | None:
    """The directory with the tokenizer that a repository names, if it exists."""
    try:
        texts = model_config.string_parameters(model_config.read(repository / "preprocessing" / model_config.FILE_NAME))
    except (OSError, model_config.ModelConfigError):
        return None
    named = Path(texts.get("tokenizer_dir") or "")
    return named if named.is_absolute() and named.is_dir() else None


def _of_llmapi(folder: Path, settings: Path, model_folder: Path | None, machine: Machine) -> ServeTarget:
    try:
        data = user_files.decode_yaml(settings.read_bytes())
        model = Path(str(data["model"]))
        sizes = [data.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
        gpus = int(sizes[0]) * int(sizes[1])
        longest = data.get("max_seq_len")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{settings} is not the LLM API's model.yaml: {error}") from error
    tokenizer = model_folder or (model if model.is_dir() else None)
    made = _of(toolchains.PYTORCH, machine, {"repository": folder, "model": model}, folder, tokenizer, None, gpus)
    return made if longest is None else replace(made, max_seq_len=int(longest))


def _of_engine(folder: Path, model_folder: Path | None, machine: Machine) -> ServeTarget:
    engine = _engine(folder)
    embedded = (folder / _EMBEDDED_WEIGHTS).is_file()
    if engine is None or not (embedded or engine.rank_files[0].is_file()):
        raise UsageError(
            f"{folder} is not an engine: it contains neither {_EMBEDDED_WEIGHTS} nor rank0.engine", hint=_EXPECTED
        )
    model = model_folder or _made_of(folder) or folder
    toolchain = toolchains.EMBEDDED if embedded else toolchains.ENGINES
    ranks = 0 if embedded else engine.world_size
    return _of(toolchain, machine, {"engine": folder, "model": model}, folder, model, engine, ranks)


def _made_of(engine: Path) -> Path | None:
    """The model from which an engine in a workspace was built, if it exists: the engine has no tokenizer."""
    artifact: Path | None = engine.parent
    while artifact is not None and artifact.parent.name != "download":
        try:
            used = {*manifest.inputs(manifest.read(artifact)).values()}
        except StateError:
            return None
        store = artifact.parents[1]
        artifact = next((each for fingerprint in used for each in store.glob(f"*/{fingerprint}")), None)
    return None if artifact is None else artifact / OUT


def _of(
    toolchain: str,
    machine: Machine,
    inputs: Mapping[str, Path],
    folder: Path,
    tokenizer: Path | None,
    engine: Engine | None,
    gpus: int,
    **params: Json,
) -> ServeTarget:
    _check_runs(toolchain, machine)
    launch = toolchains.load(toolchain).stage("launch")
    # The manifest of an artifact names its model. Other directories use their own name.
    label = str((read_object(folder.parent / manifest.NAME) or {}).get("label") if folder.name == OUT else "").split(
        "/"
    )
    model, name = (label[2], f"{label[2]}-{label[3]}") if len(label) == 4 else (folder.name, folder.name)
    return ServeTarget(
        toolchain=toolchain,
        launch=launch,
        params=stage_params.load(launch.params, {**params, "restarts": 0}),
        inputs=inputs,
        model=model,
        name=_name(name),
        model_folder=tokenizer,
        max_seq_len=None if engine is None else engine.max_seq_len,
        max_input_len=None if engine is None else engine.max_input_len,
        gpus=gpus,
        folder=folder,
    )


def write_repository(target: ServeTarget, out: Path) -> Path:
    """The repository of a target, written into the empty `out` if an engine's server needs one. Raises StageError."""
    if "repository" in target.inputs:
        return target.inputs["repository"]
    if "repository" not in target.launch.inputs:
        return out
    stage = toolchains.load(target.toolchain).stage("repository")
    engine = Engine.read(target.inputs["engine"])
    params = stage_params.load(stage.params, {"max_batch_size": engine.max_batch_size or 1})
    assert stage.program is not None
    with redirect_stdout(sys.stderr):  # a stage's stdout is its log, a command's is its result
        run_program(stage.program, stage.name, StageContext(params, target.inputs, {}, out, out.parent))
    return out


def _check_runs(toolchain: str, machine: Machine) -> None:
    missing = toolchains.load(toolchain).missing(machine)
    if missing is not None:
        raise PlanError(f"toolchain {toolchain} cannot run on this machine: {missing}", hint="pipeline doctor")


def _engine(folder: Path) -> Engine | None:
    try:
        return Engine.read(folder)
    except EngineError:
        return None


def _name(text: str) -> str:
    """A valid directory name from any text."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in text)
    return plain.strip("._-")[:64] or "server"
