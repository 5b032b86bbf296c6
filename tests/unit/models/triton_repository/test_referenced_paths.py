"""A repository of a workspace that was moved is refused before anything is started, whatever would serve it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contexts import context
from tests.helpers.trtllm_cells import machine
from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.models.triton_repository import referenced_paths
from trtllm_pipeline.serve.kept.serve_target import ServeTarget
from trtllm_pipeline.tensorrt.embedded import repository as embedded
from trtllm_pipeline.tensorrt.embedded.params import RepositoryEmbedded
from trtllm_pipeline.tensorrt.stage import launch
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import LaunchParams
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm import frontends, launching, llmapi

ENGINE = "store/build/4a46c422fbf3d1f0a5c3c2b1e6f7a890/out"
REPOSITORY = "store/repository/0b46c422fbf3d1f0a5c3c2b1e6f7a890/out"
Write = Callable[[Path, Path], None]
Serve = Callable[[StageContext[Any]], None]


def write_triton(repository: Path, engine: Path) -> None:
    for name in embedded.MODELS:
        (repository / name).mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(
            embedded.config_text(name, engine, engine, RepositoryEmbedded(max_batch_size=4))
        )


def write_llmapi(repository: Path, model: Path) -> None:
    version = repository / "tensorrt_llm" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('name: "tensorrt_llm"\nbackend: "python"\n')
    (version / "model.yaml").write_text(llmapi.to_yaml({"model": str(model), "tensor_parallel_size": 2}))


def write_serve(repository: Path, model: Path) -> None:
    repository.mkdir(parents=True)
    command = ["/opt/bin/trtllm-serve", "serve", str(model), "--config", frontends.SETTINGS_FILE]
    (repository / frontends.SETTINGS_FILE).write_text("{}")
    (repository / frontends.SERVE_FILE).write_text(json.dumps({"schema": 1, "command": command}))


def serve_openai(work: StageContext[Any]) -> None:
    launch.openai(work, launching.serve_command(work.inputs["repository"]))


KINDS = {
    "run": (write_triton, launch.run),
    "ranks": (write_triton, lambda work: launch.ranks(work, machine())),
    "llmapi": (write_llmapi, launch.llmapi),
    "openai": (write_serve, serve_openai),
}


@pytest.fixture(params=["workspace", "für alle"])
def old(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A workspace with an engine; names that are no ASCII are escaped in a config.pbtxt."""
    folder: Path = tmp_path / request.param
    (folder / ENGINE).mkdir(parents=True)
    return folder


@pytest.mark.parametrize(("write", "serve"), KINDS.values(), ids=KINDS)
def test_a_moved_workspace_is_refused_with_what_to_do(
    old: Path, monkeypatch: pytest.MonkeyPatch, write: Write, serve: Serve
) -> None:
    write(old / REPOSITORY, old / ENGINE)
    new = old.rename(old.with_name("moved"))
    monkeypatch.setattr(launch, "serve", lambda *_: pytest.fail("something would have been started"))
    monkeypatch.setattr(triton_installation, "find", lambda: pytest.fail("a server was looked for"))
    work = context(LaunchParams, {}, {"repository": new / REPOSITORY, "engine": new / ENGINE}, {}, new, new)
    with pytest.raises(ServerError, match="the workspace was moved") as error:
        serve(work)
    assert f"refers to {old / ENGINE}, which does not exist" in error.value.message
    assert error.value.failure is FailureClass.USER
    hint = f"rm -r {new / 'store' / 'repository'}, then repeat `pipeline run` with --until repository"
    assert hint in str(error.value.hint)


@pytest.mark.parametrize("write", [write_triton, write_llmapi, write_serve])
def test_what_a_repository_refers_to_is_checked_as_part_of_what_is_served(old: Path, write: Write) -> None:
    write(old / REPOSITORY, old / ENGINE)
    target = ServeTarget(
        toolchain="embedded",
        launch=toolchains.load("embedded").stage("launch"),
        params=None,
        inputs={"repository": old / REPOSITORY},
        model="tiny",
        name="tiny",
        model_folder=old,
    )
    assert target.folders == (old / REPOSITORY, old, old / ENGINE)


@pytest.mark.parametrize("write", [write_triton, write_llmapi])
def test_one_that_stayed_is_not(old: Path, write: Write) -> None:
    write(old / REPOSITORY, old / ENGINE)
    referenced_paths.check(old / REPOSITORY, [str(old / ENGINE)])
    assert referenced_paths.folders(old / REPOSITORY, [str(old / ENGINE)]) == (old / ENGINE,)


def test_what_is_no_folder_of_a_workspace_is_left_to_the_server(tmp_path: Path) -> None:
    write_llmapi(tmp_path / "repository", Path("/models/gone"))
    (tmp_path / "repository" / "broken").mkdir()
    (tmp_path / "repository" / "broken" / "config.pbtxt").write_text('parameters: { "/store/" ')
    (tmp_path / "repository" / "broken" / "1").mkdir()
    (tmp_path / "repository" / "broken" / "1" / "model.yaml").write_text("[")
    others = ["/usr/bin/gone", "/usr", "store/model", "x" * 5000]
    referenced_paths.check(tmp_path / "repository", others)
    assert referenced_paths.folders(tmp_path / "repository", [*others, "/store/" + "x" * 5000]) == ()


def test_a_repository_outside_a_workspace_is_written_again_by_hand(tmp_path: Path) -> None:
    write_llmapi(tmp_path / "repository", tmp_path / ENGINE)
    with pytest.raises(ServerError) as error:
        referenced_paths.check(tmp_path / "repository")
    assert "write it again with `pipeline stage repository`" in str(error.value.hint)


def test_a_text_that_no_path_can_be_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="which does not exist"):
        referenced_paths.check(tmp_path, ["/store/" + "x" * 5000])
