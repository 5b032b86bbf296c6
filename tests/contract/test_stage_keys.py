"""The keys of every shipped matrix's stage runs are those that were recorded: a key that changes by accident makes
everybody's artifacts stale, and one that lacks something serves stale results.

`tests/data/stage_keys.json` holds, for each shipped matrix and machine, every different key without what follows from
the keys upstream, and the fingerprints of the stage runs that have it. Whoever changes a key on purpose says so in
`CHANGED`, with the reason. Whoever changes a shipped matrix or recipe writes the record anew:
`python -m tests.contract.test_stage_keys`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.fingerprints import canonical, changes
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.models.hub.dataset_file import data_file
from trtllm_pipeline.models.hub.sources import local_folder, unpinned
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.plan import Plan, make_plan
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.toolchains import companions

RECORD: Final = Path(__file__).parents[1] / "data" / "stage_keys.json"
CHANGED: Final[dict[tuple[str, str, str], str]] = {}
"""(matrix, stage, dotted path of a part of its key) -> why it is another one than was recorded."""
COMPACT: Final[dict[str, Any]] = {"separators": (",", ":"), "ensure_ascii": False, "sort_keys": True}
EMBEDDED: Final = ("quickstart", "tiny")
RELEASES: Final = ("0.16.0", "1.0.0")
IDENTITY: Final = ("checkpoints", "cpu", "gguf", "gpu", "model_optimizer", "sm", "templates", "tensorrt_llm", "triton")


def cases() -> Iterator[tuple[str, str]]:
    """A matrix and what it is planned for."""
    for path in sorted(matrices_folder().glob("*.yaml")):
        yield from ((path.stem, release) for release in (("",) if path.stem in EMBEDDED else RELEASES))


def planned(matrix: str, release: str) -> Plan:
    """The plan of a shipped matrix, the same on every machine: no hub is asked, and software is called by its name."""
    request = Request(matrices_folder() / f"{matrix}.yaml", toolchain=None if release else "embedded")
    machine = Machine(cpus=2, cpu="test")
    if release:
        machine = parse(f"tensorrt_llm=={release},sm=90,gpus=8,gpu_memory_gib=80")
    identity = {name: f"the {name}" for name in (*IDENTITY, "xllamacpp")}
    known = {name: replace(toolchains.load(name), identity=lambda _: identity) for name in toolchains.every_name()}
    cells = planner.select_cells(request, planner.load(request), machine)
    return make_plan(
        [pinned(cell) for cell in cells],
        known,
        machine,
        digest=lambda name, cell: (str(data_file(name, Path(cell.base_dir))), f"content of {name}"),
    )


def pinned(cell: Cell) -> Cell:
    listed = cell.recipe["sources"]
    assert isinstance(listed, list)
    sources = [source for source in listed if isinstance(source, dict)]
    source = {name: value for name, value in unpinned(sources).items() if name != "note"}
    assert local_folder(sources, Path()) is None
    return replace(cell, recipe={**cell.recipe, "source": source})


def keys(plan: Plan) -> dict[str, Any]:
    """Each different key once, its inputs by the names of their stages, with the fingerprints it has."""
    found: dict[str, Any] = {}
    for run in plan.stage_runs.values():
        own = json.loads(run.key)
        own["inputs"] = {name: plan.stage_runs[upstream].stage.name for name, upstream in run.inputs.items()}
        found.setdefault(canonical(own), []).append(run.fingerprint[:12])
    return {text: sorted(fingerprints) for text, fingerprints in found.items()}


def recorded() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: {canonical(key): prints for key, prints in entry} for name, entry in data.items()}


def record() -> None:
    entries = []
    for matrix, release in cases():
        found = [
            json.dumps([json.loads(key), prints], **COMPACT) for key, prints in keys(planned(matrix, release)).items()
        ]
        entries.append(json.dumps(f"{matrix} {release}".strip()) + ": [\n" + ",\n".join(sorted(found)) + "\n]")
    RECORD.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


@pytest.mark.parametrize(("matrix", "release"), list(cases()))
def test_keys_are_those_that_were_recorded(matrix: str, release: str) -> None:
    before, now = recorded()[f"{matrix} {release}".strip()], keys(planned(matrix, release))
    allowed = {(stage, path) for name, stage, path in CHANGED if name == matrix}
    if not allowed:
        assert not differences(before, now)
        assert now == before, "the same parts, but other fingerprints: the walk over them has changed"
    unexpected = [each for each in differences(before, now) if each[:2] not in allowed]
    assert not unexpected, "a key changed by accident, or CHANGED does not say why"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str | None, str | None]]:
    """Stage, path, old and new value of whatever differs, keys that are only on one side compared in their order."""
    old, new = ([text for text in these if text not in those] for these, those in ((before, now), (now, before)))
    found: list[tuple[str, str, str | None, str | None]] = []
    for stage in sorted({json.loads(text)["stage"] for text in (*old, *new)}):
        pair = [[text for text in texts if json.loads(text)["stage"] == stage] for texts in (old, new)]
        if len(pair[0]) != len(pair[1]):
            found.append((stage, "", f"{len(pair[0])} keys", f"{len(pair[1])} keys"))
        for one, other in zip(*pair, strict=False):
            found += [(stage, change.path, change.old, change.new) for change in changes(one, other)]
    return found


def test_what_was_recorded_is_what_ships() -> None:
    assert sorted(recorded()) == sorted(f"{matrix} {release}".strip() for matrix, release in cases())
    stages = {json.loads(text)["stage"] for entry in recorded().values() for text in entry}
    known = {stage.name for name in toolchains.names() for stage in toolchains.load(name).stages}
    assert stages == known - {"score", "tasks", "visual", "trtllm_bench", *companions.NAMES}


@pytest.mark.parametrize(("matrix", "release"), [("quickstart", ""), ("qwen2", "0.16.0"), ("qwen2", "1.0.0")])
def test_a_model_whose_files_are_told_is_known_by_them_alone(
    matrix: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of a model from a hub have changed once, on purpose, where the hub tells the digests of its files: from the
    address to the content. Not those of models that nobody tells anything of, which are recorded above, as are a package's,
    a local directory's, and a generated model's.
    """
    address = pinned

    def told(source: dict[str, str]) -> set[str]:
        files = {"config.json": "a" * 64, "model.safetensors": "b" * 64}
        monkeypatch.setattr(
            f"{__name__}.pinned",
            lambda cell: replace(cell, recipe={**address(cell).recipe, "source": source, "files": files}),
        )
        plan = planned(matrix, release)
        (download,) = {run.key for run in plan.stage_runs.values() if run.stage.name == "download"}
        assert json.loads(download)["params"] == {"content": files}
        return {run.fingerprint for run in plan.stage_runs.values()}

    hugging_face = told({"hugging_face": "org/model", "revision": "c" * 40})
    assert told({"modelscope": "other/copy", "revision": "d" * 40, "listing": "e" * 32}) == hugging_face
    monkeypatch.setattr(f"{__name__}.pinned", address)
    assert not hugging_face & {run.fingerprint for run in planned(matrix, release).stage_runs.values()}


def test_a_difference_is_found_and_named() -> None:
    before = keys(planned("tiny", ""))
    now = {text.replace('"requests":', '"request_count":'): value for text, value in before.items()}
    found = {each[:2] for each in differences(before, now)}
    assert found == {("perf", "params.requests"), ("perf", "params.request_count")}


if __name__ == "__main__":
    record()
