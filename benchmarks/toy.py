"""A toolchain whose stages do next to nothing, so that what is left is the pipeline itself.

    python benchmarks/toy.py COMMAND ...     as `pipeline COMMAND ...`, with this toolchain
    python benchmarks/toy.py unsynced COMMAND ...    the same without bringing what is published to the disk
    python benchmarks/toy.py fill ...        publish every artifact of a matrix without running anything

download -> quantize -> convert -> build -> repository -> smoke; each is `sh -c 'echo x > out/x'`. The matrices that
`write_matrix` writes need one download for 64 cells, one quantize for 16, one convert for 8, and the rest for each.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.show.cli.app import main as pipeline
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.stage.params import ITSELF, Param
from trtllm_pipeline.tensorrt.toolchains import catalog
from trtllm_pipeline.tensorrt.toolchains.catalog import Toolchain

COMMAND: Final = "echo x > out/x"


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Parameters of all its stages."""

    model: Annotated[str | None, Param("which", key_with=ITSELF)] = None
    precision: Annotated[str | None, Param("of what", key_with=ITSELF)] = None
    tp: Annotated[int | None, Param("how wide", key_with=ITSELF)] = None
    max_batch_size: Annotated[int | None, Param("how much", key_with=ITSELF)] = None


def _stage(name: str, read: Callable[[Cell], Toy], *upstream: str, section: str | None = None) -> Stage:
    return Stage(
        name=name,
        version=1,
        summary=name,
        program=None,
        params=Toy,
        read=read,
        inputs={each: each for each in upstream},
        commands=lambda _work, _machine: (("sh", "-c", COMMAND),),
        section=section,
    )


TOOLCHAIN: Final = Toolchain(
    name="toy",
    summary="stages that do nothing",
    stages=(
        _stage("download", lambda cell: Toy(model=cell.model)),
        _stage("quantize", lambda cell: Toy(precision=cell.precision), "download"),
        _stage("convert", lambda cell: Toy(tp=cell.tp), "quantize", section="quantize"),
        _stage("build", lambda cell: Toy(max_batch_size=cell.max_batch_size), "convert"),
        _stage("repository", lambda _cell: Toy(), "build"),
        _stage("smoke", lambda _cell: Toy(), "repository"),
    ),
    missing=lambda _machine: None,
    identity=lambda _machine: {},
    infeasible=lambda _cell, _machine: None,
)

_RECIPE: Final = """\
name: {name}
summary: nothing
sources: [{{generated: llama}}]
family: llama
license: Apache-2.0
num_hidden_layers: 2
num_attention_heads: 8
num_key_value_heads: 8
hidden_size: 64
intermediate_size: 128
head_dim: 8
vocab_size: 256
max_position_embeddings: 2048
"""


def write_matrix(cells: int, folder: Path) -> Path:
    """A matrix of this many cells, 64 or more, with its recipes, in `directory`."""
    models, rest = divmod(cells, 64)
    names = [f"m{number:04}" for number in range(models)]
    (folder / "recipes").mkdir(parents=True)
    for name in [*names, "rest"]:
        (folder / "recipes" / f"{name}.yaml").write_text(_RECIPE.format(name=name), encoding="utf-8")
    text = [
        "axes:",
        f"  model: [{', '.join(names)}]",
        "  precision: [fp16, fp8, int8_wo, int4_wo]",
        "  parallel: [tp1, tp2]",
        "  max_batch_size: [1, 2, 3, 4, 5, 6, 7, 8]",
        '  lengths: ["8,8"]',
        "add:" if rest else "",
    ]
    for number in range(rest):
        precision = ("fp16", "fp8", "int8_wo", "int4_wo")[number // 16]
        text.append(
            f"  - {{model: rest, precision: {precision}, parallel: tp{1 + number // 8 % 2}, "
            f'max_batch_size: {1 + number % 8}, lengths: "8,8"}}'
        )
    path = folder / "matrix.yaml"
    path.write_text("name: toy\n" + "\n".join(text) + "\n", encoding="utf-8")
    return path


def fill(matrix: Path, workspace: Path) -> dict[str, float]:
    """Publish every artifact of the matrix through the store, as a run does. Returns the times in microseconds."""
    from trtllm_pipeline.orchestrate.plan import planner
    from trtllm_pipeline.orchestrate.plan.planner import Request
    from trtllm_pipeline.orchestrate.store.store import Store

    store = Store(workspace)
    request = Request(matrix, toolchain=TOOLCHAIN.name)
    plan = planner.plan_of(request, store)
    begin = time.perf_counter()
    for run in plan.stage_runs.values():
        claim = store.claim(run.fingerprint)
        assert claim is not None, f"{run.id} is being worked on"
        attempt = store.begin("fill", run.stage.name, run.fingerprint)
        (attempt.out / "x").write_text("x\n", encoding="utf-8")
        store.publish(attempt, store.seal(attempt, run.key, run.label, {"duration_s": 0.001}))
        claim.release()
    spent_s = time.perf_counter() - begin
    store.close()
    return {"stage_runs": len(plan.stage_runs), "us_per_stage_run": spent_s / len(plan.stage_runs) * 1e6}


def main() -> int:
    catalog._TABLE[TOOLCHAIN.name] = __name__  # noqa: SLF001  # no public API yet
    if sys.argv[1:2] == ["unsynced"]:
        setattr(os, "fsync", lambda _fd: None)  # noqa: B010
        return pipeline(sys.argv[2:])
    if sys.argv[1:2] != ["fill"]:
        return pipeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("--matrix", type=Path, required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    args = parser.parse_args(sys.argv[2:])
    print(fill(args.matrix, args.workspace))
    return 0


if __name__ == "__main__":
    sys.exit(main())
