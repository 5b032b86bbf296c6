"""The engine backend of TensorRT-LLM from a model to an answering server, release by release, through stand-ins.

Their programs take what the release took and nothing else. The servers are real Tritons with a stand-in for the engine
model, and several ranks of one are real processes under a real mpirun. No TensorRT-LLM runs here.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.version import Version
from tokenizers import Tokenizer

from tests.helpers.adapters import random_pairs, write_adapter
from tests.helpers.fake_hub import FakeHub, Repository, sha256
from tests.helpers.trtllm_cells import values
from tests.helpers.trtllm_runs import ALL_STARTS, LARGER, PLAIN, Lane, cells
from tests.helpers.waiting import eventually
from tests.standins.faults import Fault
from tests.standins.programs.checkpoint import safetensors
from trtllm_pipeline.measure.load.events import read_records
from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.orchestrate.matrix.recipe_files import recipes_folder
from trtllm_pipeline.tensorrt.embedded import random_model


def nightly(*values: str | None) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


RELEASES = ("0.8.0", nightly("0.16.0"), "1.2.0")
"""The first and the last with engines and servers as recorded, and one between; contract tests have them all."""
SERVED = ("--until", "smoke")
BUILT = ("--until", "build")
Done = Callable[[str], Lane]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The lane of a release on which all cells have been served."""

    @cache
    def of(release: str) -> Lane:
        # Up to 0.9 quantize.py measures on a data set of the Hub, and on that alone.
        lane = Lane(tmp_path_factory.mktemp("done") / "lane", release, hub_datasets=["cnn_dailymail"])
        lane.run(*SERVED)
        return lane

    return of


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Lane:
    """A lane on which things go wrong, one after another: each test has engines of its own."""
    return Lane(tmp_path_factory.mktemp("machine") / "lane", "0.16.0")


# --------------------------------------------------------------------------------------------------------- all is well


@pytest.mark.parametrize("release", RELEASES)
def test_every_cell_is_served_and_what_cells_share_is_made_once(done: Done, release: str) -> None:
    lane = done(release)
    report = cells(lane.pipeline("report", "--workspace", str(lane.workspace), "--format", "json"))
    assert {cell["status"] for cell in report.values()} == {"done"}
    assert len(report) == 3
    for cell in report.values():
        assert cell["engine_size_bytes"] > 0
        assert cell["smoke"] is not None
    assert lane.starts() == ALL_STARTS
    assert all(start.exit == 0 and start.release == release for start in lane.installed.invocations())
    assert {start.no_usage_stats for start in lane.installed.invocations()} == {"1"}
    made = [name.partition("/")[0] for name in lane.artifacts()]
    stages = {"download": 1, "convert": 1, "quantize": 1, "build": 3, "check": 3, "repository": 3, "smoke": 3}
    assert {stage: made.count(stage) for stage in stages} == stages


@pytest.mark.seam
def test_one_rank_is_served_and_measured_without_mpirun(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "0.16.0", gpus=1)
    found = lane.environment["PATH"]
    lane.hide("mpirun")
    asked = ("--cells", PLAIN, "--set", "settings.perf.requests=4", "--set", "settings.perf.concurrency=[1]")
    cell = lane.run(*asked)[PLAIN]
    assert (cell["status"], cell["perf"][0]["failures"]) == ("done", 0), cell
    assert cell["accuracy"] is not None
    attempts = [path.parent for path in lane.workspace.glob("work/*/server.log")]
    assert attempts
    assert not [path for attempt in attempts for path in attempt.glob("ranks*")], "mpirun writes logs of ranks"
    lane.environment["PATH"] = found
    assert lane.run(*asked)[PLAIN]["status"] == "up_to_date", "no key depends on mpirun"


@pytest.mark.parametrize(
    ("release", "protocol"), [pytest.param("0.8.0", "grpc", marks=pytest.mark.nightly), ("1.2.0", "http")]
)
def test_a_model_that_does_not_stream_is_served_measured_and_exported(
    tmp_path: Path, release: str, protocol: str
) -> None:
    lane = Lane(tmp_path / "lane", release, gpus=1, hub_datasets=["cnn_dailymail"])
    whole = ("--set", "settings.repository.decoupled=false")
    few = ("--set", "settings.perf.requests=4", "--set", "settings.perf.concurrency=[1]")
    asked = ("--cells", PLAIN, *whole, *few, "--set", f"settings.perf.protocol={protocol}")
    cell = lane.run(*asked)[PLAIN]
    assert cell["status"] == "done", cell
    (level,) = cell["perf"]
    assert (level["failures"], level["tpot_ms"]["n"], level["itl_ms"]["n"]) == (0, 0, 0)
    assert level["ttft_ms"]["p50"] == level["e2e_ms"]["p50"]
    assert cell["accuracy"] is not None
    assert "tokens" in {check["name"] for check in cell["smoke"]["checks"]}
    refused = lane.run(*asked, "--set", "settings.perf.slo={tpot_ms: 50}", code=1)[PLAIN]
    assert "has no TPOT" in refused["reason"], "a missing TPOT is not one that keeps its limit"
    out = tmp_path / "out"
    exported = ("--matrix", str(lane.matrix), *whole, "--workspace", str(lane.workspace), "--output-dir", str(out))
    lane.pipeline("export", PLAIN, *exported, "--to", "bundle")
    assert (out / "bundle" / "SHA256SUMS").is_file()


def test_any_folder_is_a_workspace(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "0.16.0")
    lane.workspace = tmp_path / "a b'\";$(touch OWNED)`touch OWNED`(&*\\\n世ü,x:" / "w"
    lane.workspace.parent.mkdir()
    two_ranks = lane.run("--cells", LARGER, "--until", "smoke")[LARGER]
    assert (two_ranks["status"], two_ranks["smoke"] is not None) == ("done", True)
    assert not list(tmp_path.rglob("OWNED"))


def test_engines_say_what_they_were_made_from_and_by_what(done: Done) -> None:
    release = "1.2.0"
    lane = done(release)
    words = ("store", "provenance", "build", "--workspace", str(lane.workspace), "--format", "json")
    found = json.loads(lane.pipeline(*words))["artifacts"]
    assert len(found) == 3
    for artifact in found:
        build = artifact["statement"]["predicate"]["buildDefinition"]
        told = build["internalParameters"]
        builder, *_, ours = told["commands"]
        assert builder[0].endswith("trtllm-build")
        assert "{attempt}/out" in " ".join(builder)
        assert ours[-1] == "{attempt}/job.json"
        assert str(lane.workspace) not in json.dumps(artifact["statement"])
        assert told["gpus"]
        assert all("GiB" in gpu for gpu in told["system"]["gpus"])
        (checkpoint,) = (each for each in build["resolvedDependencies"] if each["name"] == "inputs/checkpoint")
        assert len(checkpoint["digest"]["dirHashBlake3"]) == 64
        version = artifact["statement"]["predicate"]["runDetails"]["builder"]["version"]
        assert version["tensorrt_llm"] == release
        assert version["driver"]


@pytest.mark.parametrize(("release", "backend"), [nightly("0.16.0", None), ("1.2.0", "tensorrt")])
def test_engines_are_served_by_trtllm_serve_as_well(done: Done, release: str, backend: str | None) -> None:
    lane = done(release)
    before = lane.starts()
    asked = ("--set", "settings.serve.frontend=trtllm_serve", "--until", "repository")
    assert {cell["status"] for cell in lane.run(*asked).values()} == {"done"}
    assert lane.starts() == before, "the engines are the same"
    serve = [folder for folder in lane.outputs("repository") if (folder / "serve.json").exists()]
    assert len(serve) == 3
    two_ranks = next(folder for folder in lane.outputs("build") if (folder / "rank1.engine").exists())
    repository = next(folder for folder in serve if str(two_ranks) in (folder / "serve.json").read_text())
    launch = ("stage", "launch", "--toolchain", "tensorrt_llm", "--frontend", "trtllm_serve", "--format", "json")
    process = lane.start(*launch, "--repository", str(repository), "--engine", str(two_ranks))
    try:
        assert process.stdout is not None
        said = json.loads("".join(takewhile("}\n".__ne__, process.stdout)) + "}")
        assert said["kind"] == "openai"
        assert said["server"]["version"] == release
        assert httpx.get(f"{said['url']}/health", timeout=60).is_success
        body = {"model": said["model"], "prompt": "abc", "max_tokens": 3}
        answer = httpx.post(f"{said['url']}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"] == turned(lane.outputs("download")[0], "abc", 0)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert lane.left() == []
    (start,) = lane.installed.invocations("trtllm-serve")
    assert start.argv[0] == ("serve" if Version(release) >= Version("0.19") else str(two_ranks))
    assert ("--backend" in start.argv) is (backend is not None)
    assert backend is None or start.argv[start.argv.index("--backend") + 1] == backend


def test_engines_are_served_by_the_openai_front_end_of_triton(done: Done) -> None:
    lane = done("1.2.0")
    before = lane.starts(), [name for name in lane.artifacts() if name.startswith("repository/")]
    asked = ("--set", "settings.serve.frontend=triton_openai", "--set", "settings.perf.requests=4")
    found = lane.run(*asked, "--set", "settings.perf.concurrency=[2]")
    assert {each: cell["status"] for each, cell in found.items()}[PLAIN] == "done", found[PLAIN]
    (level,) = found[PLAIN]["perf"]
    assert (level["failures"], level["output_tokens_per_s"] > 0) == (0, True)
    assert found[PLAIN]["accuracy"] is not None
    assert "is one process, but mpirun starts 2 ranks" in found[LARGER]["reason"]
    assert (lane.starts(), [name for name in lane.artifacts() if name.startswith("repository/")]) == before
    (smoke,) = [
        checks
        for folder in lane.outputs("smoke")
        if "openai" in (checks := (folder / "smoke.json").read_text(encoding="utf-8"))
    ]
    assert '"model": "ensemble"' in smoke
    assert lane.left() == []


# ------------------------------------------------------------------------------------------------------------- resuming


def test_killed_while_it_serves_nothing_is_left_and_the_rest_is_made(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "0.12.0")
    one = ("--cells", LARGER)
    process = lane.start(*lane.words(*SERVED, *one), variables={"TRTLLM_STANDIN_TOKEN_S": "2"})
    assert eventually(lambda: bool(list(lane.workspace.glob("work/*/service.json")))), process.poll()
    finished = lane.artifacts()
    assert any("mpirun" in words for words in lane.left())
    lane.kill(process)
    assert lane.artifacts() == finished
    assert lane.resume()[LARGER]["status"] == "done"
    assert lane.artifacts().items() > finished.items()
    assert lane.starts() == {"quantize.py": 1, "trtllm-build": 1, "run.py": 2}


# ------------------------------------------------------------------------------------------------------------- failures


def alone(batch_size: int) -> tuple[str, ...]:
    """Words for one cell that no other test has: FP16 on one GPU, with a batch size of its own."""
    return "--set", f"axes.max_batch_size=[{batch_size}]", "--cells", "tiny/fp16/*"


@pytest.mark.parametrize(
    ("batch_size", "tool", "kind", "stage", "failure", "reason", "hint"),
    [
        (11, "trtllm-build", "build_oom", "build", "out_of_memory", "could not be allocated", "max_num_tokens"),
        (
            13,
            "run.py",
            "version_mismatch",
            "check",
            "infeasible",
            "expecting library version",
            "build and serve in one image",
        ),
    ],
)
def test_failures_are_told_apart_by_the_programs_own_words(
    machine: Lane, batch_size: int, tool: str, kind: str, stage: str, failure: str, reason: str, hint: str
) -> None:
    machine.installed.fail(tool, Fault(kind))
    (cell,) = machine.run("--until", "check", *alone(batch_size), code=1).values()
    assert (cell["failed_stage"], cell["failure"]) == (stage, failure)
    assert reason in cell["reason"]
    assert hint in (cell["hint"] or "")
    assert (machine.workspace / cell["log"]).is_file()
    # What can never work is not tried again; what may is.
    starts = machine.starts(tool)[tool]
    (again,) = machine.run("--until", "check", *alone(batch_size), code=1 if failure == "infeasible" else 0).values()
    assert machine.starts(tool)[tool] == starts + (failure != "infeasible")
    assert again["status"] == ("failed" if failure == "infeasible" else "done")


def test_programs_older_than_their_metadata_are_found_out(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "0.10.0", packages={"tensorrt_llm": "0.16.0"})
    (cell,) = lane.run(*BUILT, "--cells", PLAIN, code=1).values()
    assert (cell["failed_stage"], cell["failure"]) == ("build", "infeasible")
    assert "unrecognized arguments: --max_seq_len 288" in cell["reason"]
    assert "this release does not have the option" in cell["hint"]


def test_a_rank_that_dies_is_named_with_the_end_of_its_log(done: Done) -> None:
    lane = done("0.8.0")
    other = ("--set", "settings.smoke.prompt=Once upon a time", "--cells", LARGER)
    process = lane.start(*lane.words(*SERVED, *other), variables={"TRTLLM_STANDIN_TOKEN_S": "1"})
    said: dict[str, Any] = {}

    def serving() -> bool:
        for path in lane.workspace.glob("work/*/service.json"):
            said.update(json.loads(path.read_text()))
        return bool(said)

    assert eventually(serving), process.poll()
    pid = said["ranks"][1]
    assert b"tritonserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 1, err
    (cell,) = cells(out).values()
    assert cell["failed_stage"] == "launch"
    assert cell["reason"].startswith("rank 1 of 2 ")
    attempt = lane.workspace.joinpath(*Path(cell["log"]).parts[:2])
    (log,) = attempt.glob("ranks/*/rank.1/stdout")
    text = log.read_text()
    assert cell["reason"].count("\n") == 0
    said = re.split("its last line: |its log says: |the first error in its log: ", cell["reason"])
    assert len(said) == 2
    assert said[1] in text
    quoted = [line.strip() for line in (attempt / "log").read_text().splitlines() if line.startswith("    ")]
    assert quoted
    assert all(line in text for line in quoted)
    assert lane.left() == []


PYTORCH = """\
name: pytorch
axes:
  model: [tiny]
  precision: [fp16]
  parallel: [tp1, tp2]
  max_batch_size: [4]
  lengths: ["256,32"]
  toolchain: [tensorrt_llm_pytorch]
  settings.serve.frontend: [triton, trtllm_serve]
"""


@pytest.mark.parametrize("release", [nightly("1.2.0"), "1.3.0"])
def test_the_pytorch_lane_is_served_by_triton_and_by_trtllm_serve(tmp_path: Path, release: str) -> None:
    lane = Lane(tmp_path / "lane", release)
    lane.matrix.write_text(PYTORCH, encoding="utf-8")
    report = lane.run("--until", "smoke")
    assert {cell["status"] for cell in report.values()} == {"done"}
    assert len(report) == 4
    made = [name.partition("/")[0] for name in lane.artifacts()]
    assert {stage: made.count(stage) for stage in ("download", "build", "repository", "smoke")} == {
        "download": 1,
        "build": 0,
        "repository": 4,
        "smoke": 4,
    }
    assert set(lane.starts()) == {"trtllm-serve"}, "Triton's model needs no program"


DISAGGREGATED = """\
name: disaggregated
axes:
  model: [tiny]
  precision: [fp16]
  max_batch_size: [4]
  lengths: ["256,32"]
  toolchain: [tensorrt_llm_pytorch]
settings:
  serve: { frontend: disaggregated }
  disaggregated: { context_servers: 1, generation_servers: 2, context_parallel: tp2, context_llm_args: { enable_chunked_prefill: true } }
  perf: { workload: prompts, concurrency: [2], requests: 4, exclusive: none }
"""


@pytest.mark.parametrize("release", [nightly("1.1.0"), "1.3.0"])
def test_disaggregated_servers_are_served_measured_and_stopped_together(tmp_path: Path, release: str) -> None:
    lane = Lane(tmp_path / "lane", release)
    lane.matrix.write_text(DISAGGREGATED, encoding="utf-8")
    (cell,) = lane.run().values()
    assert cell["status"] == "done", cell
    assert cell["served_gpus"] == 4
    (level,) = cell["perf"]
    assert (level["failures"], level["output_tokens_per_s"] > 0) == (0, True)
    starts = lane.installed.invocations("trtllm-serve")
    servers = {start.argv[-1]: start for start in starts if start.argv[0] != "disaggregated"}
    (router,) = (start for start in starts if start.argv[0] == "disaggregated")
    devices = [str(start.cuda_visible_devices).split(",") for start in servers.values()]
    assert sorted(map(len, devices)) == [1, 1, 2]
    assert len({device for own in devices for device in own}) == 4
    path = Path(router.argv[1].removeprefix("--config_file="))
    config = json.loads(path.read_text())
    urls = [*config["context_servers"]["urls"], *config["generation_servers"]["urls"]]
    assert {url.partition(":")[2] for url in urls} == servers.keys()
    context = servers[urls[0].partition(":")[2]].argv
    assert context[context.index("--tp_size") + 1] == "2"
    (repository,) = lane.outputs("repository")
    written = {name: (repository / name).read_text() for name in ("llm_api.yaml", "context_llm_api.yaml")}
    assert all("max_tokens_in_buffer: 288" in text for text in written.values())
    assert ["disable_overlap_scheduler" in text for text in written.values()] == [False, True]
    assert ["enable_chunked_prefill" in text for text in written.values()] == [False, True]
    assert {log.name for log in path.parent.glob("*.log")} >= {"server.log", "context0.log", "generation1.log"}
    assert lane.left() == []


def test_the_end_of_one_disaggregated_server_ends_the_others_and_is_named(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.2.0")
    lane.matrix.write_text(DISAGGREGATED, encoding="utf-8")
    process = lane.start(*lane.words(), variables={"TRTLLM_STANDIN_TOKEN_S": "2"})
    assert eventually(lambda: bool(list(lane.workspace.glob("work/*/service.json")))), process.poll()
    (config,) = lane.workspace.glob("work/*/disaggregated.yaml")
    port = json.loads(config.read_text())["generation_servers"]["urls"][1].partition(":")[2].encode()
    lines = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    (pid,) = (int(pid) for pid, words in lines.items() if words.endswith(b"--port\0" + port + b"\0"))
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 1
    assert "generation1 was ended by signal SIGKILL" in out + err
    assert lane.left() == []


AS_IS = """\
name: as-is
axes:
  model: [./model]
  precision: [as_is, fp16]
  max_batch_size: [4]
  lengths: ["256,32"]
  toolchain: [tensorrt_llm, tensorrt_llm_pytorch]
settings: { serve: { frontend: trtllm_serve } }
"""


def test_weights_that_are_quantized_already_are_served_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from trtllm_pipeline.tensorrt.embedded.random_model import write_model

    lane = Lane(tmp_path / "lane", "1.2.0")
    lane.matrix.write_text(AS_IS, encoding="utf-8")
    model = lane.folder / "model"
    model.mkdir()
    write_model(model, "llama", 0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "modelopt"}}))
    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    report = lane.run("--until", "smoke")
    assert {each.split("/")[1]: cell["status"] for each, cell in report.items()} == {
        "as_is": "done",
        "fp16": "infeasible",
    }
    assert {cell["axes"]["precision"] for cell in report.values()} == {"as_is (fp8)", "fp16"}
    made = [name.partition("/")[0] for name in lane.artifacts()]
    assert sorted(made) == ["build", "check", "convert", "download", "repository", "repository", "smoke", "smoke"]
    (convert,) = lane.installed.invocations("convert_checkpoint.py:llama")
    assert "--use_fp8" in convert.argv
    config = json.loads((lane.outputs("convert")[0] / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == "FP8"
    assert "as_is (fp8)" in lane.pipeline("report", "--workspace", str(lane.workspace))


DRAFTS = """\
name: drafts
axes:
  model: [tiny]
  precision: [fp16]
  max_batch_size: [4]
  lengths: ["256,32"]
  toolchain: [tensorrt_llm_pytorch]
  settings.serve.frontend: [triton, trtllm_serve]
  settings.speculative.method: [none, ngram, eagle3, draft]
settings:
  speculative: { max_draft_len: 4 }
  perf: { concurrency: [2], requests: 4, protocol: http, exclusive: none }
override:
  - { where: { settings.speculative.method: [eagle3, draft] }, settings: { speculative: { model: ./head } } }
  - { where: { settings.speculative.method: none }, settings: { speculative: { max_draft_len: null } } }
exclude:
  - { settings.serve.frontend: triton, settings.speculative.method: [none, ngram, draft] }
"""


@pytest.mark.parametrize("release", [nightly("1.0.0"), "1.3.0"])
def test_drafts_are_made_by_what_the_matrix_says_and_accepted_ones_are_counted(tmp_path: Path, release: str) -> None:
    """A stand-in of trtllm-serve reads the settings as the release's LLM API does, and accepts all but one of each draft."""
    lane = Lane(tmp_path / "lane", release)
    lane.matrix.write_text(DRAFTS, encoding="utf-8")
    (lane.folder / "head").mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 128, "draft_vocab_size": 32, "vocab_size": 64}
    (lane.folder / "head" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (lane.folder / "head" / "model.safetensors").write_bytes(safetensors(0))
    report = lane.run("--until", "perf")
    by_method = {(*each.split("/")[-2:],): cell for each, cell in report.items()}
    served = "frontend=trtllm_serve"
    assert {cell["status"] for cell in by_method.values()} == {"done"}
    assert "acceptance" not in by_method[served, "method=none"]["perf"][0]
    for method in ("ngram", "eagle3", "draft"):
        assert 0.5 < by_method[served, f"method={method}"]["perf"][0]["acceptance"] <= 0.75
    # Triton's model tells it too, where the release's template has an input that asks for it.
    (in_triton,) = (each["perf"][0] for key, each in by_method.items() if key[0] == "frontend=triton")
    assert in_triton.get("acceptance") == {"1.0.0": None, "1.3.0": pytest.approx(24 / 32)}[release]
    made = [name.partition("/")[0] for name in lane.artifacts()]
    assert (made.count("download"), made.count("draft"), made.count("repository")) == (1, 1, 5)
    settings = [yaml.safe_load(path.read_text()) for path in lane.workspace.glob("store/repository/*/out/**/*.yaml")]
    (head,) = lane.outputs("draft")
    kinds = {each["speculative_config"]["decoding_type"]: each for each in settings if "speculative_config" in each}
    draft = "Draft_Target" if release == "1.3.0" else "DraftTarget"
    assert kinds.keys() == {"NGram", "Eagle", draft}
    assert kinds["Eagle"]["speculative_config"]["speculative_model_dir"] == str(head)
    locked = max(lane.workspace.glob("runs/*/lock/matrix.yaml"), key=os.path.getmtime)
    override = yaml.safe_load(locked.read_text())["override"][0]
    assert override["settings"]["speculative"]["model"] == str(lane.folder / "head")


IMAGES = """\
name: images
axes:
  model: [./model]
  precision: [fp16]
  max_batch_size: [4]
  lengths: ["512,32"]
  toolchain: [tensorrt_llm_pytorch]
  settings.serve.frontend: [trtllm_serve, triton]
settings:
  perf: { images: 2@56x84, concurrency: [2], requests: 8, max_tokens: 8, exclusive: none }
  accuracy: { input_data: rows.jsonl }
"""


def seeing(folder: Path) -> Lane:
    """A release, and a model that takes images."""
    pytest.importorskip("gguf")
    from trtllm_pipeline.tensorrt.embedded.random_model import write_model

    lane = Lane(folder, "1.3.0")
    lane.matrix.write_text(IMAGES, encoding="utf-8")
    model = lane.folder / "model"
    model.mkdir()
    write_model(model, "llama", 0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vision_config": {"hidden_size": 8}}))
    (model / "preprocessor_config.json").write_text("{}")
    return lane


def test_a_run_says_which_model_is_asked_with_text_alone(tmp_path: Path) -> None:
    lane = seeing(tmp_path / "lane")
    lane.matrix.write_text(IMAGES.partition("settings:\n")[0], encoding="utf-8")
    running = lane.start(*lane.words("--until", "repository"))
    said = running.communicate(timeout=280)[1]
    assert (running.returncode, said.count("model: checked with text alone")) == (0, 1), said


def test_a_model_that_takes_images_is_asked_with_images(tmp_path: Path) -> None:
    from trtllm_pipeline.measure.client.images import png

    lane = seeing(tmp_path / "lane")
    (lane.folder / "cat.png").write_bytes(png(56, 56, 1))
    (lane.folder / "rows.jsonl").write_text('{"input": "What is it?", "image": "cat.png", "output": "a cat"}\n')
    found = {each.rpartition("=")[2]: cell for each, cell in lane.run().items()}
    assert found["triton"]["status"] == "infeasible"
    assert "only accepts text; trtllm-serve accepts images" in found["triton"]["reason"]
    assert found["trtllm_serve"]["status"] == "done", found["trtllm_serve"]
    (smoke,) = lane.outputs("smoke")
    checks = {check["name"]: check for check in json.loads((smoke / "smoke.json").read_text())["checks"]}
    assert checks["images"]["detail"].endswith("4 input tokens more")
    (perf,) = lane.outputs("perf")
    events = [json.loads(line) for line in (perf / "events.jsonl").read_text().splitlines()]
    assert {event["images"] for event in events if event["type"] == "prompt"} == {2}
    (level,) = json.loads((perf / "perf.json").read_text())["levels"]
    # Each image is 2 x 3 tokens of the stand-in.
    assert level["input_tokens_per_request"]["mean"] > 12
    (accuracy,) = lane.outputs("accuracy")
    assert json.loads((accuracy / "accuracy.json").read_text())["total"] == 1
    before = lane.artifacts()
    lane.run()
    assert lane.artifacts() == before
    (lane.folder / "cat.png").write_bytes(png(56, 56, 2))
    lane.run()
    made = [name.partition("/")[0] for name in lane.artifacts().keys() - before.keys()]
    assert made == ["accuracy"], "another picture is another question"


LORA = """\
name: lora
axes:
  model: [tiny]
  precision: [fp16]
  max_batch_size: [4]
  lengths: ["256,32"]
  toolchain: [tensorrt_llm, tensorrt_llm_pytorch]
  settings.lora.adapter: [null, ./sql]
settings:
  serve: { frontend: trtllm_serve }
"""


def test_an_adapter_is_served_and_asked_for(tmp_path: Path) -> None:
    """The stand-in refuses an adapter that it was not started with, or its engine not built for, and one that is not there."""
    lane = Lane(tmp_path / "lane", "1.2.0")
    lane.matrix.write_text(LORA, encoding="utf-8")
    write_adapter(lane.folder / "sql", random_pairs(TINY, rank=4))
    report = lane.run("--until", "smoke")
    assert {cell["status"] for cell in report.values()} == {"done"}
    made = [name.partition("/")[0] for name in lane.artifacts()]
    assert {stage: made.count(stage) for stage in ("download", "adapter", "build", "repository")} == {
        "download": 1,
        "adapter": 1,
        "build": 2,
        "repository": 4,
    }
    (folder,) = lane.outputs("adapter")
    settings = [yaml.safe_load(path.read_text()) for path in lane.workspace.glob("store/repository/*/out/*.yaml")]
    told = [each["lora_config"] for each in settings if "lora_config" in each]
    assert told == [{"lora_dir": [str(folder)], "max_lora_rank": 4, "lora_target_modules": ["attn_q", "attn_v"]}]


LLMAPI_INPUTS = """
input [
  { name: "lora_id" data_type: TYPE_UINT64 dims: [ 1 ] optional: true },
  { name: "lora_name" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "lora_path" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
"""
"""Of pull request 14079, as its config.pbtxt has them."""


def test_the_llm_api_s_model_in_triton_takes_adapters_where_its_template_does(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.3.0")
    matrix = LORA.replace("[tensorrt_llm, tensorrt_llm_pytorch]", "[tensorrt_llm_pytorch]")
    lane.matrix.write_text(matrix.replace("trtllm_serve", "triton"), encoding="utf-8")
    write_adapter(lane.folder / "sql", random_pairs(TINY, rank=4))
    with_and_without = {cell["status"]: cell for cell in lane.run("--until", "repository").values()}
    assert with_and_without.keys() == {"done", "infeasible"}
    assert "has no input lora_path; settings.serve.frontend: trtllm_serve" in with_and_without["infeasible"]["reason"]
    config = lane.folder / "templates" / "all_models" / "llmapi" / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8") + LLMAPI_INPUTS, encoding="utf-8")
    assert {cell["status"] for cell in lane.run("--until", "smoke").values()} == {"done"}
    details = [
        check["detail"]
        for folder in lane.outputs("smoke")
        for check in json.loads((folder / "smoke.json").read_text())["checks"]
        if check["name"] == "adapter"
    ]
    assert len(details) == 1
    found, bare = details[0].removesuffix(" without").split(" with adapter, ")
    assert found != bare
    write_adapter(lane.folder / "chat", random_pairs(TINY, rank=8, seed=1))
    several = "settings:\n  lora: { adapter: { sql: ./sql, chat: ./chat } }\n  accuracy: { lora: none }\n"
    changed = lane.matrix.read_text(encoding="utf-8").replace("  settings.lora.adapter: [null, ./sql]\n", "")
    lane.matrix.write_text(changed.replace("settings:\n", several), encoding="utf-8")
    (cell,) = lane.run("--until", "smoke").values()
    assert cell["status"] == "done"
    (told,) = [check["detail"] for check in cell["smoke"]["checks"] if check["name"] == "adapter"]
    sql, rest = told.removesuffix(" without").split(" with sql, ")
    assert len({sql, *rest.split(" with chat, ")}) == 3


LORA_ENGINES = """\
name: lora
axes:
  model: [tiny]
  precision: [fp16]
  max_batch_size: [4]
  lengths: ["256,32"]
  settings.lora.adapter: [./sql, ./chat]
settings:
  perf: { concurrency: [1, 2], requests: 4, exclusive: none }
  build: { max_lora_rank: 8, lora_target_modules: [attn_q, attn_v] }
"""
TINY = {"q_proj": (128, 128), "v_proj": (128, 64)}


def test_an_engine_for_adapters_that_has_none_is_checked_by_its_files(tmp_path: Path) -> None:
    """run.py does not load it, and the server does."""
    lane = Lane(tmp_path / "lane", "1.2.0")
    plain = LORA_ENGINES.replace("  settings.lora.adapter: [./sql, ./chat]\n", "")
    lane.matrix.write_text(plain.replace("build: {", "build: { lora_plugin: auto,"), encoding="utf-8")
    assert [cell["status"] for cell in lane.run(*SERVED).values()] == ["done"]
    (checked,) = lane.outputs("check")
    assert json.loads((checked / "check.json").read_text())["how"] == "files"
    assert not lane.installed.invocations("run.py")


@pytest.mark.parametrize("release", ["0.11.0", nightly("1.2.0")])
def test_engines_are_sent_an_adapter_once_and_asked_for_it_ever_after(tmp_path: Path, release: str) -> None:
    """The stand-in of the engine model refuses what the runtime refuses, and answers by the rank of the adapter."""
    lane = Lane(tmp_path / "lane", release)
    lane.matrix.write_text(LORA_ENGINES, encoding="utf-8")
    for name, rank in (("sql", 4), ("chat", 8)):
        write_adapter(lane.folder / name, random_pairs(TINY, rank=rank))
    report = lane.run()
    assert [cell["status"] for cell in report.values()] == ["done", "done"]
    made = Counter(name.partition("/")[0] for name in lane.artifacts())
    assert (made["adapter"], made["build"], made["repository"], made["perf"], made["accuracy"]) == (2, 1, 2, 2, 2), (
        "one engine takes both adapters"
    )
    (start,) = (each for each in lane.installed.invocations("trtllm-build") if "--output_dir" in each.argv)
    assert values(start.argv)["--lora_plugin"] == "float16"
    assert values(start.argv)["--max_lora_rank"] == "8"
    assert [
        values(each.argv)["--lora_task_uids"]
        for each in lane.installed.invocations("run.py")
        if "--lora_dir" in each.argv
    ] == ["0", "0"]
    found = {}
    for folder in lane.outputs("smoke"):
        told = json.loads((folder / "smoke.json").read_text())
        (adapter,) = (check for check in told["checks"] if check["name"] == "adapter")
        answers = {check["detail"].partition(" in ")[0] for check in told["checks"] if check["name"] == "answer"}
        assert answers == {adapter["detail"].partition(" with adapter, ")[0]}, (
            "over every protocol, by its number alone"
        )
        skipped = {skip["model"] for skip in told["skipped"] if "lora_task_id" in skip["reason"]}
        assert skipped == ({"tensorrt_llm_bls"} if release == "0.11.0" else set())
        found[adapter["detail"]] = adapter["ok"]
    assert len(found) == 2
    assert all(found.values())
    for folder in lane.outputs("repository"):
        engine = model_config.read(folder / "tensorrt_llm" / "config.pbtxt")
        assert engine.parameters["lora_cache_max_adapter_size"].string_value in {"4", "8"}


DRAFTING_ENGINES = """\
name: drafting-engines
axes:
  model: [tiny]
  precision: [fp16]
  max_batch_size: [2]
  lengths: ["256,32"]
  settings.speculative.method: [medusa, lookahead, eagle, draft]
settings:
  perf: { concurrency: [2], requests: 4, exclusive: none }
override:
  - where: { settings.speculative.method: [medusa, eagle] }
    settings: { speculative: { model: ./head, max_draft_len: 8 } }
  - where: { settings.speculative.method: lookahead }
    settings:
      repository: { lookahead_window_size: 3, lookahead_ngram_size: 3, lookahead_verification_set_size: 2 }
  - where: { settings.speculative.method: draft }
    settings:
      speculative: { model: tiny, max_draft_len: 4 }
      repository:
        { decoupled: false, enable_kv_cache_reuse: true, bls_instances: 2, preferred_batch_size: [1, 2],
          triton_parameters: { tensorrt_llm: { of_mine: 1 } } }
"""


def write_head(folder: Path) -> None:
    """Heads that both converters take: one reads this name, the other any."""
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "medusa_num_heads": 4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "medusa_lm_head.safetensors").write_bytes(safetensors(0))


def drafting(folder: Path, *methods: str) -> tuple[Lane, dict[str, dict[str, Any]]]:
    """What was measured of engines that draft, by method."""
    lane = Lane(folder, "1.2.0")
    lane.matrix.write_text(DRAFTING_ENGINES, encoding="utf-8")
    write_head(lane.folder / "head")
    selected = [word for method in methods for word in ("--cells", f"method={method}")]
    report = {each.rpartition("=")[2]: cell for each, cell in lane.run("--until", "perf", *selected).items()}
    assert {name: cell["status"] for name, cell in report.items()} == dict.fromkeys(methods, "done")
    return lane, report


def builds(lane: Lane) -> set[tuple[int, int, int, int]]:
    """How the engines draft, as the builder calls it, how many tokens, and their lengths."""
    built = [json.loads((folder / "config.json").read_text())["build_config"] for folder in lane.outputs("build")]
    names = ("speculative_decoding_mode", "max_draft_len", "max_input_len", "max_seq_len")
    return {(each[names[0]], each[names[1]] or 0, each[names[2]], each[names[3]]) for each in built}


def test_heads_become_part_of_engines_and_triton_tells_how_many_drafts_were_accepted(tmp_path: Path) -> None:
    """The stand-ins' builder makes room as the release's does, and the engine model accepts two tokens in every pass."""
    lane, report = drafting(tmp_path / "lane", "medusa", "eagle")
    for cell in report.values():
        # Of 32 tokens, 11 passes made one each and drafted the rest.
        assert cell["perf"][0]["acceptance"] == pytest.approx(21 / (11 * 8))
    assert lane.starts("convert_checkpoint.py") == {"convert_checkpoint.py:medusa": 1, "convert_checkpoint.py:eagle": 1}
    assert builds(lane) == {(4, 8, 256, 296), (32, 8, 256, 300)}
    made = [name.partition("/")[0] for name in lane.artifacts()]
    assert (made.count("download"), made.count("draft"), made.count("convert"), made.count("build")) == (1, 1, 2, 2)
    with kept(lane, "method=medusa") as (url, _metrics):
        body = {"model": "tiny", "prompt": "abcdefgh", "max_tokens": 10, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        page = httpx.get(f"{url}/metrics", timeout=60).text
    counts = [re.search(rf"pipeline_gateway_{name}_tokens_total.* (\d+)", page) for name in ("drafted", "accepted")]
    drafted, accepted = (int(found[1]) if found else 0 for found in counts)
    assert 0 < accepted < drafted


def test_two_engines_answer_together_and_one_drafts_for_itself(tmp_path: Path) -> None:
    """A draft model is asked for by requests to tensorrt_llm_bls, which stream nothing."""
    lane, report = drafting(tmp_path / "lane", "lookahead", "draft")
    assert report["lookahead"]["perf"][0]["acceptance"] == pytest.approx(21 / (11 * 9))
    assert "acceptance" not in report["draft"]["perf"][0]  # tensorrt_llm_bls tells that of its last pass alone
    assert lane.starts("convert_checkpoint.py") == {"convert_checkpoint.py:llama": 1}
    assert builds(lane) == {(8, 9, 256, 297), (2, 4, 287, 292), (1, 0, 287, 288)}
    checks = [json.loads(path.read_text())["checks"] for path in lane.workspace.glob("store/smoke/*/out/smoke.json")]
    asked = {frozenset(check["model"] for check in each if check["name"] == "answer") for each in checks}
    assert asked == {frozenset(("ensemble", "tensorrt_llm_bls")), frozenset(("tensorrt_llm_bls",))}
    levels = [json.loads((folder / "perf.json").read_text())["levels"][0] for folder in lane.outputs("perf")]
    counts = {name: of["requests"] for each in levels for name, of in each["triton"][0]["of"].items()}
    # Of 32 tokens, each pass of the model over 4 drafted ones makes 5; the last one has none left to draft.
    assert counts["tensorrt_llm_draft"] == 7 * counts["tensorrt_llm_bls"]
    (repository,) = (folder for folder in lane.outputs("repository") if (folder / "tensorrt_llm_draft").is_dir())
    configs = [model_config.read(repository / name / "config.pbtxt") for name in ("tensorrt_llm", "tensorrt_llm_draft")]
    assert [[*config.dynamic_batching.preferred_batch_size] for config in configs] == [[1, 2]] * 2
    target, draft = map(model_config.string_parameters, configs)
    assert draft == {**target, "of_mine": "1", "gpt_model_path": draft["gpt_model_path"]}
    assert draft["gpt_model_path"] != target["gpt_model_path"]
    with kept(lane, "method=draft") as (url, metrics):
        body = {"model": "tiny", "prompt": "abcdefgh", "max_tokens": 10, "temperature": 0}
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60).text
        (choice,) = whole["choices"]
        assert (choice["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 10)
        events = [json.loads(line[6:])["choices"][0] for line in streamed.splitlines() if line.startswith("data: {")]
        assert [event["text"] for event in events] == [choice["text"], ""]
        # Of 10 tokens, each pass of the model over 4 drafted ones makes 5.
        assert (
            'nv_inference_request_success{model="tensorrt_llm_draft",version="1"} 4'
            in httpx.get(metrics, timeout=60).text
        )


@contextmanager
def kept(lane: Lane, cell: str) -> Iterator[tuple[str, str]]:
    """URLs of the gateway and of Triton's metrics of a cell that is kept served."""
    workspace = ("--workspace", str(lane.workspace))
    started = lane.start("serve", "start", cell, "--openai", "--name", "kept", *workspace)
    try:
        _, said = started.communicate(timeout=280)
        assert started.returncode == 0, said
        folder = lane.workspace / "serve" / "kept"
        told = [json.loads((folder / name).read_text()) for name in ("gateway.json", "service.json")]
        yield told[0]["url"], f"http://{told[1]['metrics']}/metrics"
    finally:
        lane.pipeline("serve", "stop", "kept", "--remove", *workspace)


@pytest.mark.parametrize("release", ["1.2.0"])
def test_one_server_has_several_adapters_and_requests_ask_for_them_in_turn(tmp_path: Path, release: str) -> None:
    lane = Lane(tmp_path / "lane", release)
    several = "  settings.perf.lora: [null, none]\n"
    several += "settings:\n  lora: { adapter: { sql: ./sql, chat: ./chat } }\n  accuracy: { lora: chat }\n"
    head, _, rest = LORA_ENGINES.partition("  settings.lora.adapter: [./sql, ./chat]\nsettings:\n")
    lane.matrix.write_text(head + several + rest, encoding="utf-8")
    for name, rank in (("sql", 4), ("chat", 2)):
        write_adapter(lane.folder / name, random_pairs(TINY, rank=rank))
    report = {name.rpartition("=")[2]: cell for name, cell in lane.run().items()}
    assert {name: cell["status"] for name, cell in report.items()} == {"null": "done", "none": "done"}
    assert {level["failures"] for cell in report.values() for level in cell["perf"]} == {0}
    made = Counter(name.partition("/")[0] for name in lane.artifacts())
    assert (made["build"], made["smoke"], made["accuracy"], made["perf"]) == (1, 1, 1, 2), "measured one by one"
    (smoke,) = (json.loads((folder / "smoke.json").read_text()) for folder in lane.outputs("smoke"))
    (detail,) = (check["detail"] for check in smoke["checks"] if check["name"] == "adapter")
    answers = dict(reversed(part.split("' with")) for part in detail.split(", '"))
    assert list(answers) == [" sql", " chat", "out"]
    assert len(set(answers.values())) == 3, detail
    said = [[note for note in cell["findings"] if "in turn" in note] for cell in (report["null"], report["none"])]
    assert [len(notes) for notes in said] == [1, 0], report["null"]["findings"]
    of_runs = sorted((ranks_asked_for(perf, lane.outputs("download")[0]) for perf in lane.outputs("perf")), key=len)
    assert [ranks.keys() for ranks in of_runs] == [{0}, {4, 2}]
    assert abs(of_runs[1][4] - of_runs[1][2]) <= 2, "one after the other, at each level"
    with kept(lane, "lora=none") as (url, _metrics):
        listed = [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]]
        assert listed == ["tiny", "tiny:sql", "tiny:chat"]
        body = {"prompt": "abcdefghijkl", "max_tokens": 3, "temperature": 0}
        told = [httpx.post(f"{url}/v1/completions", json={**body, "model": name}, timeout=60).json() for name in listed]
        assert [each["choices"][0]["text"] for each in told] == [
            turned(lane.outputs("download")[0], body["prompt"], rank) for rank in (0, 4, 2)
        ]


def turned(model: Path, prompt: str, rank: int, count: int = 3) -> str:
    """What the stand-in answers: the prompt's tokens from the second on, further by the rank of an adapter."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    return str(tokenizer.decode([ids[(index + 1 + rank) % len(ids)] for index in range(count)]))


def ranks_asked_for(perf: Path, model: Path) -> Counter[int]:
    """How many requests of a measurement were answered by an adapter of each rank, 0 for none."""
    records = read_records(perf / "events.jsonl")
    ranks: Counter[int] = Counter()
    for request in records.requests:
        answer, prompt = "".join(event[1] for event in request["events"]), records.text(request)
        ranks[next(rank for rank in (0, 4, 2) if answer.startswith(turned(model, prompt, rank)))] += 1
    return ranks


def test_code_of_a_model_is_fetched_once_the_lines_of_the_message_are_in_the_matrix(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.2.0")
    random_model.write_model(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    code = {"configuration_internlm2.py": b"# what it is\n", "modeling_internlm2.py": b"# what it does\n" * 400}
    named = {"AutoConfig": "configuration_internlm2.Config", "AutoModelForCausalLM": "modeling_internlm2.Model"}
    config = {**json.loads(files["config.json"]), "model_type": "internlm2", "auto_map": named}
    files["config.json"] = json.dumps({**config, "architectures": ["InternLM2ForCausalLM"]}).encode()
    recipe = yaml.safe_load((recipes_folder() / "tiny.yaml").read_text())
    about = {"name": "mine", "family": "internlm2", "sources": [{"hugging_face": "org/mine"}]}
    (lane.folder / "recipes").mkdir()
    (lane.folder / "recipes" / "mine.yaml").write_text(yaml.safe_dump({**recipe, **about}))
    axes = {"model": ["mine"], "precision": ["fp16", "int8_wo"], "max_batch_size": [2], "lengths": ["256,32"]}
    lane.matrix.write_text(yaml.safe_dump({"name": "code", "axes": axes}))
    with FakeHub({"org/mine": Repository({**files, **code})}) as hub:
        lane.environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        lane.environment.pop("HF_HUB_OFFLINE", None)
        run = ("run", "--matrix", str(lane.matrix), "--workspace", str(lane.workspace), *BUILT)
        refused = lane.start(*run).communicate(timeout=280)[1]
        assert lane.starts() == Counter()
        lines = refused[refused.index("settings:") : refused.index("  try: with these lines in the matrix")]
        trusted = {name: sha256(content) for name, content in code.items()}
        assert yaml.safe_load(lines) == {"settings": {"download": {"trust_remote_code": {"mine": trusted}}}}
        lane.matrix.write_text(lane.matrix.read_text() + lines)
        lane.run(*BUILT)
        assert lane.starts("convert_checkpoint.py:internlm2").total() == 2
        (model,) = lane.outputs("download")
        assert {name: (model / name).read_bytes() for name in code} == code
        assert json.loads((model / "config.json").read_text())["auto_map"] == named

        changed = hub.repositories["org/mine"]
        changed.files["modeling_internlm2.py"] += b"# and something else\n"
        changed.commit = "e" * 40
        lane.run(*BUILT)  # what was pinned is what runs
        told = lane.start(*run, "--refresh").communicate(timeout=280)[1]
        assert "modeling_internlm2.py is not the file that settings.download.trust_remote_code names" in told
        assert sha256(changed.files["modeling_internlm2.py"]) in told


def test_a_local_folder_of_glm_4_is_converted_with_its_code(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.2.0")
    folder = lane.folder / "mine"
    random_model.write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    own = {
        "num_layers": "num_hidden_layers",
        "multi_query_group_num": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "seq_length": "max_position_embeddings",
        "padded_vocab_size": "vocab_size",
        "kv_channels": "head_dim",
    }
    theirs = {name: config.pop(other) for name, other in own.items()}
    said = {"model_type": "chatglm", "architectures": ["ChatGLMModel"], "auto_map": {"AutoModel": "modeling_chatglm.M"}}
    (folder / "config.json").write_text(json.dumps({**config, **theirs, **said}))
    (folder / "modeling_chatglm.py").write_bytes(b"# what it does\n")
    axes = {"model": ["./mine"], "precision": ["fp16"], "max_batch_size": [2], "lengths": ["256,32"]}
    trusted = {"mine": {"modeling_chatglm.py": sha256(b"# what it does\n")}}
    settings = {"download": {"trust_remote_code": trusted}}
    lane.matrix.write_text(yaml.safe_dump({"name": "glm", "axes": axes, "settings": settings}))
    (cell,) = lane.run(*BUILT).values()
    assert cell["status"] == "done"
    (converted,) = lane.installed.invocations("convert_checkpoint.py:glm-4-9b")
    assert values(["", *converted.argv])["--chatglm_version"] == "glm4"
