"""Plans for machines with every release of TensorRT-LLM: whatever would be run, the release's programs take it.

The command lines are those of `pipeline plan --assume ... --format json`; what reads them are the recorded options.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from packaging.version import Version

from tests.standins import releases
from tests.standins.programs import arguments, llm_api
from tests.standins.programs.checkpoint import safetensors
from tests.standins.triton import openai_frontend
from trtllm_pipeline.base.domain import Scope
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.stage.params import load, table
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm import llm_args, llmapi
from trtllm_pipeline.tensorrt.trtllm.params import WeightsRepository

RELEASES: Final = (
    *("0.10.0", "0.11.0", "0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0", "0.18.2", "0.19.0"),
    *("0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.0", "1.2.1", "1.3.0rc3"),
)
"""Those that make engines of Qwen2."""
TYPICAL: Final = ("0.10.0", "0.16.0", "1.0.0", "1.2.0")
NO_ENGINES: Final = "1.3.0"
"""After engines were given up."""
ENGINES, PYTORCH = "tensorrt_llm", "tensorrt_llm_pytorch"
SCRIPTS: Final = ("convert_checkpoint.py", "quantize.py", "run.py")
FLOW: Final = {
    ENGINES: ("download", "quantize", "convert", "build", "check", "repository", "launch", "smoke", "perf", "accuracy"),
    PYTORCH: ("download", "quantize", "repository", "launch", "smoke", "perf", "accuracy"),
}


class Command(NamedTuple):
    """One start of one of TensorRT-LLM's programs."""

    tool: str
    """As in the records: a converter's with its family."""
    before: tuple[str, ...]
    """What starts it: an interpreter, mpirun."""
    path: str
    arguments: list[str]


class Planner:
    """`pipeline plan` for a shipped matrix and a machine with a release, in this process; no hub is reached."""

    def __init__(self, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.workspace, self.capsys = workspace, capsys

    def plan(self, matrix: str, release: str, *more: str) -> dict[str, Any]:
        """What it prints as JSON, with `more` on the command line."""
        found: dict[str, Any] = json.loads(self._said(matrix, release, *more, code=0)[0])
        return found

    def refusal(self, matrix: str, release: str) -> str:
        """What it says where no cell can work."""
        return self._said(matrix, release, code=3)[1]

    def _said(self, matrix: str, release: str, *more: str, code: int) -> tuple[str, str]:
        file = matrices_folder() / (matrix if matrix.endswith(".yaml") else f"{matrix}.yaml")
        machine = f"tensorrt_llm=={release},sm=90,gpus=8,gpu_memory_gib=80"
        line = ["plan", "--matrix", str(file), "--workspace", str(self.workspace), "--assume", machine]
        ended = main([*line, *more, "--format", "json"])
        out, err = self.capsys.readouterr()
        assert ended == code, err
        return out, err


@pytest.fixture
def planner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planner:
    for variable in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    return Planner(tmp_path / "w", capsys)


def feasible(planned: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in planned["cells"] if cell["feasible"]]


def command(argv: list[str]) -> Command | None:
    """Which of TensorRT-LLM's programs a command line starts; None for a program of ours."""
    for index, word in enumerate(argv):
        path = Path(word)
        if path.name in {"trtllm-build", "trtllm-serve", *SCRIPTS}:
            tool = f"{path.name}:{path.parent.name}" if path.name == "convert_checkpoint.py" else path.name
            return Command(tool, tuple(argv[:index]), word, argv[index + 1 :])
    return None


def commands(planned: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Command]]:
    """Stage runs with the command lines of TensorRT-LLM's programs in them."""
    for run in planned["stage_runs"]:
        yield from ((run, found) for argv in run["argv"] if (found := command(argv)) is not None)


def check_programs(planned: dict[str, Any], release: str) -> Counter[str]:
    """How often each program is started, all in ways that the release takes. Fails with its words otherwise."""
    counted: Counter[str] = Counter()
    cells = {cell["id"]: cell["axes"] for cell in planned["cells"]}
    for run, found in commands(planned):
        table = releases.table(found.tool, release)
        assert table is not None, f"{found.tool} is not in {release}"
        options = table["serve" if found.tool == releases.SERVE else found.tool]
        spellings = {spelling for name, row in options.items() for spelling in (name, *row.get("aliases", ()))}
        spellings |= {row["negative_flag"] for row in options.values() if "negative_flag" in row}
        given = {word for word in found.arguments if word.startswith("--")}
        # The programs themselves would also take the beginning of an option that has only one end.
        assert given <= spellings, f"{release} {found.tool} has no {sorted(given - spellings)}"
        assert not {name for name in given if options.get(name, {}).get("deprecated")}
        counted[found.tool] += 1
        if found.tool == releases.SERVE:
            continue  # its port is chosen at launch
        with redirect_stderr(StringIO()) as said:
            try:
                values = arguments.parse(found.tool, options, found.arguments)
            except SystemExit:
                pytest.fail(f"{release}: {' '.join(found.arguments)}\n{said.getvalue()}")
        check_values(found, values, cells[run["cells"][0]], release)
    return counted


def check_values(found: Command, values: dict[str, Any], axes: dict[str, Any], release: str) -> None:
    """What is asked for is the cell's, in the places where it acts."""
    world_size = axes["tp"] * axes["pp"]
    if found.tool == "trtllm-build":
        assert values["max_batch_size"] == axes["max_batch_size"]
        assert values["max_input_len"] == axes["isl"]
        if Version(release) < Version("0.11"):
            assert values["max_output_len"] == axes["osl"]
        else:
            assert values["max_seq_len"] == axes["isl"] + axes["osl"]
            assert "--max_output_len" not in found.arguments
        assert int(values["workers"]) == world_size
        assert not {"--tp_size", "--pp_size"} & set(found.arguments), "they do nothing here"
        assert {"--tokens_per_block", "--gpt_attention_plugin"} <= set(found.arguments), "their defaults moved"
    elif found.tool == "run.py":
        mpirun = found.before[:1] == ("mpirun",)
        assert mpirun is (world_size > 1)
        assert not mpirun or "--oversubscribe" in found.before, "ranks wait for GPUs: there may be fewer cores"
        assert not mpirun or found.before[found.before.index("-n") + 1] == str(world_size)
    else:
        assert (values.get("tp_size", 1), values.get("pp_size", 1)) == (axes["tp"], axes["pp"])
        if "ep" in axes:
            assert (values["moe_tp_size"], values["moe_ep_size"]) == (axes["tp"] // axes["ep"], axes["ep"])
        nested = "/models/core/" in found.path
        wanted = Version(release) >= Version("0.20") and found.tool.startswith("convert")
        assert nested is wanted, f"{release}: {found.path}"


def check_workers(planned: dict[str, Any]) -> None:
    """Our own program comes last, and all that it is told are parameters that its stage has."""
    for run in planned["stage_runs"]:
        stage = toolchains.load(run["toolchain"]).stage(run["stage"])
        assert run["argv"][-1][1:] == ["-m", "trtllm_pipeline.tensorrt.worker", "{attempt}/job.json"]
        assert run["program"] == stage.program
        if run["stage"] == "launch":
            check_server(run)
        assert run["params"].keys() <= {each.name for each in table(stage.params)}


def check_server(run: dict[str, Any]) -> None:
    """A plan shows what the launch starts: Triton, a rank for each GPU of the cell, on ports that are chosen then."""
    server, _ = run["argv"]
    assert any(word.startswith("--model-repository=") and "/store/repository/" in word for word in server)
    assert "--http-port={http_port}" in server
    ranks = run["resources"]["gpus"] if run["toolchain"] == ENGINES else 1
    assert sum(Path(word).name == "tritonserver" for word in server) == ranks
    assert (server[0] == "mpirun") or ranks == 1


def check_sharing(planned: dict[str, Any]) -> None:
    """Each checkpoint is made once, each engine once, and each cell is served once."""
    cells = feasible(planned)
    engine_cells = [cell["axes"] for cell in cells if cell["axes"]["toolchain"] == ENGINES]
    pytorch_cells = [cell["axes"] for cell in cells if cell["axes"]["toolchain"] == PYTORCH]
    made = Counter((run["toolchain"], run["stage"]) for run in planned["stage_runs"])
    checkpoints = {tuple(axes[name] for name in ("model", "precision", "tp", "pp")) for axes in engine_cells}
    assert made[ENGINES, "quantize"] + made[ENGINES, "convert"] == len(checkpoints)
    assert made[ENGINES, "build"] == made[ENGINES, "check"] == len(engine_cells)
    quantized = {(axes["model"], axes["precision"]) for axes in pytorch_cells if axes["precision"] == "fp8"}
    assert made[PYTORCH, "quantize"] == len(quantized)
    served = Counter(run["stage"] for run in planned["stage_runs"])
    assert served["launch"] == served["repository"] == len(cells)
    assert served["download"] == len({cell["axes"]["model"] for cell in cells})


@pytest.mark.parametrize(
    "release", [pytest.param(each, marks=() if each in TYPICAL else pytest.mark.nightly) for each in RELEASES]
)
def test_the_script_of_nested_loops_is_planned_for_every_release(planner: Planner, release: str) -> None:
    planned = planner.plan("qwen2", release)
    refused = {cell["id"] for cell in planned["cells"] if not cell["feasible"]}
    # FP8 engines without FP8 attention over prompts cannot be built with one release.
    assert refused == {
        cell["id"] for cell in planned["cells"] if cell["axes"]["precision"] == "fp8" and release == "0.20.0"
    }
    assert len(planned["cells"]) == 18
    # 7B on one GPU, 72B as tp4, tp4pp2 and tp8: 4 checkpoints in FP8 and FP16, and INT8 of 7B, each for two batch sizes.
    quantized, engines = 5 - len(refused) // 2, 18 - len(refused)
    started = check_programs(planned, release)
    by_script = Counter({"quantize.py": quantized if release != "0.10.0" else 0})  # there Model Optimizer does it
    assert started == Counter({"convert_checkpoint.py:qwen": 4, "trtllm-build": engines, "run.py": engines}) + by_script
    check_workers(planned)
    check_sharing(planned)
    for _, found in commands(planned):
        options = dict(zip(found.arguments, found.arguments[1:], strict=False))
        if found.tool == "quantize.py":
            caches = {"fp8": "fp8", "int8_wo": "int8"}
            assert options["--kv_cache_dtype"] == caches[options["--qformat"]]
            assert options["--calib_size"] == "32"
        if found.tool == "trtllm-build":
            assert options["--use_fp8_context_fmha"] == "disable"


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("0.8.0", "TensorRT-LLM supports it in releases >=0.10, this is 0.8.0"),
        ("0.9.0", "TensorRT-LLM supports it in releases >=0.10, this is 0.9.0"),
    ],
)
def test_qwen2_is_refused_where_no_release_makes_it(planner: Planner, release: str, reason: str) -> None:
    told = planner.refusal("qwen2", release)
    assert "no cell can work" in told
    assert reason in told


def test_without_engines_the_matrix_of_the_script_says_so(planner: Planner) -> None:
    told = planner.refusal("qwen2", NO_ENGINES)
    assert "no cell can work" in told
    assert "no trtllm-build" in told


@pytest.mark.parametrize(
    ("matrix", "release", "cells", "started"),
    [
        ("llama2", "0.8.0", 1, {"convert_checkpoint.py:llama": 1, "trtllm-build": 1, "run.py": 1}),
        ("llama2", "0.12.0", 1, {"convert_checkpoint.py:llama": 1, "trtllm-build": 1, "run.py": 1}),
        ("llama2", "1.2.0", 1, {"convert_checkpoint.py:llama": 1, "trtllm-build": 1, "run.py": 1}),
        ("llama2", NO_ENGINES, 1, {}),
        ("phi3", "0.11.0", 1, {"convert_checkpoint.py:phi": 1, "trtllm-build": 1, "run.py": 1}),
        ("phi3", "0.16.0", 1, {"convert_checkpoint.py:phi": 1, "trtllm-build": 1, "run.py": 1}),
        ("phi3", "1.2.1", 1, {"convert_checkpoint.py:phi": 1, "trtllm-build": 1, "run.py": 1}),
        ("gpt2", "0.10.0", 1, {"convert_checkpoint.py:gpt": 1, "trtllm-build": 1, "run.py": 1}),
        ("gpt2", "0.15.0", 1, {"convert_checkpoint.py:gpt": 1, "trtllm-build": 1, "run.py": 1}),
        ("gpt2", "1.1.0", 1, {"convert_checkpoint.py:gpt": 1, "trtllm-build": 1, "run.py": 1}),
        ("qwen2-tp4", "0.10.0", 1, {"convert_checkpoint.py:qwen": 1, "trtllm-build": 1, "run.py": 1}),
        ("qwen2-tp4", "0.20.0", 1, {"convert_checkpoint.py:qwen": 1, "trtllm-build": 1, "run.py": 1}),
        ("nightly", "0.12.0", 4, {"convert_checkpoint.py:llama": 2, "quantize.py": 2, "trtllm-build": 4, "run.py": 4}),
        ("nightly", NO_ENGINES, 6, {}),
    ],
)
def test_the_other_matrices(planner: Planner, matrix: str, release: str, cells: int, started: dict[str, int]) -> None:
    planned = planner.plan(matrix, release)
    assert len(feasible(planned)) == cells
    assert check_programs(planned, release) == started
    check_workers(planned)
    check_sharing(planned)


def test_a_release_whose_transformers_lacks_the_model_needs_code_that_is_trusted(planner: Planner) -> None:
    told = planner.refusal("phi3", "0.10.0")
    assert "transformers supports it from 4.41.0 on, this is 4.38.2" in told
    assert "and its hub, which has the files' SHA-256, cannot be reached now" in told
    assert "try: plan with access to the hub, list trusted files with their SHA-256" in told
    assert "or use a local directory: model: " in told
    assert "--assume with transformers=VERSION" in told
    assert len(feasible(planner.plan("phi3", "0.10.0,transformers=4.41.0"))) == 1
    trusted = {"phi-3-mini-128k-instruct": {"configuration_phi3.py": "0" * 64}}
    said = planner.plan("phi3", "0.10.0", "--set", f"settings.download.trust_remote_code={json.dumps(trusted)}")
    assert len(feasible(said)) == 1


@pytest.mark.parametrize("matrix", ["gpt2", "phi3"])
def test_models_of_later_releases_are_refused_before(planner: Planner, matrix: str) -> None:
    told = planner.refusal(matrix, "0.8.0")
    assert "TensorRT-LLM supports it in releases >=0." in told


@pytest.mark.parametrize("release", ["1.0.0", "1.2.0"])
def test_both_lanes_side_by_side(planner: Planner, release: str) -> None:
    planned = planner.plan("backends", release)
    assert len(feasible(planned)) == 8
    scripts = {"convert_checkpoint.py:llama": 1, "convert_checkpoint.py:qwen": 1, "quantize.py": 2}
    assert check_programs(planned, release) == {**scripts, "trtllm-build": 4, "run.py": 4}
    check_workers(planned)
    check_sharing(planned)
    check_pytorch(planned)
    runs = {run["id"]: run for run in planned["stage_runs"]}
    for cell in planned["cells"]:
        stages = [runs[name]["stage"] for name in cell["stage_runs"]]
        missing = {"convert"} if cell["axes"]["precision"] == "fp8" else {"quantize"}
        assert stages == [stage for stage in FLOW[cell["axes"]["toolchain"]] if stage not in missing]


def test_a_plan_shows_what_the_openai_front_end_of_triton_is_started_with(planner: Planner) -> None:
    planned = planner.plan("backends", "1.2.0", "--set", "settings.serve.frontend=triton_openai")
    runs = {run["id"]: run for run in planned["stage_runs"]}
    launched = [run for run in runs.values() if run["stage"] == "launch"]
    assert {run["toolchain"] for run in launched} == {ENGINES}, "it serves no other"
    for run in launched:
        server, _ = run["argv"]
        repository = runs[run["inputs"]["repository"]]
        folder, model = (
            f"{{workspace}}/store/{each['stage']}/{each['fingerprint']}/out"
            for each in (repository, runs[repository["inputs"]["model"]])
        )
        assert server[1:6] == [
            "/opt/tritonserver/python/openai/openai_frontend/main.py",
            *("--model-repository", folder, "--tokenizer", model),
        ]
        asked = openai_frontend.parser().parse_args([*server[2:-1], "0"])
        assert asked.host == "127.0.0.1"
        assert server[-2] == "--openai-port"


def test_a_plan_shows_what_trtllm_serve_is_started_with(planner: Planner) -> None:
    fraction = ("--set", "settings.repository.kv_cache_free_gpu_mem_fraction=0.5")
    planned = planner.plan("backends", "1.2.0", "--set", "settings.serve.frontend=trtllm_serve", *fraction)
    runs = {run["id"]: run for run in planned["stage_runs"]}
    launched = [run for run in runs.values() if run["stage"] == "launch"]
    assert {run["toolchain"] for run in launched} == {ENGINES, PYTORCH}

    def artifact(run: str) -> str:
        return f"{{workspace}}/store/{runs[run]['stage']}/{runs[run]['fingerprint']}/out"

    for run in launched:
        server, _ = run["argv"]
        repository = runs[run["inputs"]["repository"]]
        model, sizes = artifact(repository["inputs"]["model"]), repository["params"]
        if run["toolchain"] == ENGINES:
            served = [artifact(run["inputs"]["engine"]), "--tokenizer", model, "--backend", "tensorrt"]
        else:
            served = [model, "--tp_size", str(sizes["tensor_parallel_size"]), "--pp_size", "1"]
            for name in ("max_batch_size", "max_seq_len", "max_num_tokens"):
                served += [f"--{name}", str(sizes[name])]
        settings = f"{artifact(run['inputs']['repository'])}/llm_api.yaml"
        where = ["--extra_llm_api_options", settings, "--host", "127.0.0.1", "--port", "{http_port}"]
        assert server == ["trtllm-serve", "serve", *served, *where]


def test_after_the_engines_one_lane_of_both_is_left(planner: Planner) -> None:
    planned = planner.plan("backends", NO_ENGINES)
    for cell in planned["cells"]:
        engines = cell["axes"]["toolchain"] == ENGINES
        assert cell["feasible"] is not engines
        assert not engines or "no trtllm-build" in cell["reason"]
    assert len(feasible(planned)) == 4
    check_workers(planned)
    check_sharing(planned)
    check_pytorch(planned)


def test_before_pytorch_one_lane_of_both_is_there(planner: Planner) -> None:
    planned = planner.plan("backends", "0.16.0")
    assert {cell["axes"]["toolchain"] for cell in feasible(planned)} == {ENGINES}
    assert {cell["reason"] for cell in planned["cells"] if not cell["feasible"]} == {
        "TensorRT-LLM 0.16.0: its PyTorch backend is a preview before 1.0; use the toolchain tensorrt_llm, or a newer release"
    }
    check_programs(planned, "0.16.0")


def check_pytorch(planned: dict[str, Any]) -> None:
    """The PyTorch backend: weights are served as they are, or from a Hugging Face checkpoint; the layout is the server's."""
    runs = {run["id"]: run for run in planned["stage_runs"]}
    lane = [run for run in runs.values() if run["toolchain"] == PYTORCH and run["scope"] != Scope.IN_SERVICE.value]
    assert {run["stage"] for run in lane} >= {"quantize", "repository", "launch"}
    for run in lane:
        *others, _ = run["argv"]
        assert len(others) == (run["stage"] in {"quantize", "launch"}), (
            "Model Optimizer runs in TensorRT-LLM's own Python"
        )
        given = run["params"]
        axes = next(cell["axes"] for cell in planned["cells"] if cell["id"] == run["cells"][0])
        if run["stage"] == "quantize":
            assert given["checkpoint_format"] == "hugging_face"
            assert (given["precision"], given["kv_cache_precision"]) == ("fp8", "fp8")
            assert not {"tp", "pp"} & set(given)
        elif run["stage"] == "repository":
            source = runs[run["inputs"]["model"]]["stage"]
            assert source == ("quantize" if axes["precision"] == "fp8" else "download")
            assert given["max_seq_len"] == axes["isl"] + axes["osl"]
            assert given["max_batch_size"] == axes["max_batch_size"]
            assert given["tensor_parallel_size"] == axes["tp"]
        elif run["stage"] == "launch":
            assert runs[run["inputs"]["repository"]]["stage"] == "repository"
            assert run["resources"]["gpus"] == axes["tp"] * axes["pp"]


@pytest.mark.parametrize("release", ["0.10.0", "0.11.0", "0.17.0", "1.0.0", "1.2.0", NO_ENGINES])
def test_experts_are_dealt_among_gpus_on_both_lanes(planner: Planner, release: str) -> None:
    """Mixtral in every way of it: what converters have no option for is refused before any download."""
    lanes = [ENGINES] * (release != NO_ENGINES) + [PYTORCH] * (Version(release) >= Version("1.0"))
    gpus = {"tp4pp1": 4, "tp4pp1ep4": 4, "tp4pp2ep2": 8, "tp2pp1ep2": 2}
    dealt = set(gpus) - {"tp4pp1"}
    matrix = planner.workspace.parent / "experts.yaml"
    axes = {
        "model": ["mixtral-8x7b-instruct-v0.1"],
        "precision": ["bf16", "fp8"],
        "parallel": ["tp4", "tp4ep4", "tp4pp2ep2", "tp2ep2"],
        "max_batch_size": [8],
        "lengths": ["1024,256"],
        "toolchain": lanes,
    }
    matrix.write_text(json.dumps({"name": "experts", "axes": axes}), encoding="utf-8")
    planned = planner.plan(str(matrix), release)
    check_programs(planned, release)
    works = {(cell["axes"]["toolchain"], *cell["id"].split("/")[1:3]) for cell in feasible(planned)}
    converts = ENGINES in lanes and release != "0.10.0"
    assert {layout for lane, precision, layout in works if (lane, precision) == (ENGINES, "bf16")} & dealt == (
        dealt if converts else set()
    )
    assert not {layout for lane, precision, layout in works if (lane, precision) == (ENGINES, "fp8")} & dealt
    assert {layout for lane, _, layout in works if lane == PYTORCH} & dealt == (dealt if PYTORCH in lanes else set())
    reasons = " ".join(cell["reason"] for cell in planned["cells"] if cell["axes"].get("ep") and not cell["feasible"])
    assert ("can be distributed over GPUs from 0.11 on, this is 0.10.0" in reasons) is (release == "0.10.0")
    assert ("quantize.py, which creates fp8 here, splits each expert" in reasons) is converts
    for run in planned["stage_runs"]:
        if run["stage"] == "launch":
            assert run["resources"]["gpus"] == gpus[run["cells"][0].split("/")[2]]


DRAFTING: Final = {
    # method -> the first and the last of RELEASES that have it with engines in Triton
    "draft": ("0.18.2", "1.3.0rc3"),
    "medusa": ("0.10.0", "1.3.0rc3"),
    "lookahead": ("0.19.0", "1.3.0rc3"),
    "eagle": ("0.17.0", "1.3.0rc3"),
}
MODES: Final = {"draft": "draft_tokens_external", "lookahead": "lookahead_decoding"}


@pytest.mark.parametrize("release", RELEASES)
def test_engines_draft_by_what_the_release_has(planner: Planner, release: str) -> None:
    """Every program takes what it is told, and a method that the release lacks is refused before any download."""
    folder = planner.workspace.parent
    head = folder / "head"
    head.mkdir()
    (head / "config.json").write_text("{}", encoding="utf-8")
    (head / "medusa_lm_head.safetensors").write_bytes(safetensors(0))
    axes = {
        "model": ["llama-2-7b-chat"],
        "precision": ["bf16", "fp8"],
        "max_batch_size": [8],
        "lengths": ["1024,256"],
        "toolchain": [ENGINES],
        "settings.speculative.method": list(DRAFTING),
    }
    repository = {"decoupled": False, "enable_kv_cache_reuse": True}
    lookahead = {"lookahead_window_size": 4, "lookahead_ngram_size": 3, "lookahead_verification_set_size": 4}
    settings = {
        "draft": {"speculative": {"model": "llama-2-7b-chat", "max_draft_len": 5}, "repository": repository},
        "medusa": {"speculative": {"model": "./head"}},
        "eagle": {"speculative": {"model": "./head"}},
        "lookahead": {"repository": lookahead},
    }
    override = [
        {"where": {"settings.speculative.method": method}, "settings": given} for method, given in settings.items()
    ]
    matrix = folder / "drafting.yaml"
    matrix.write_text(json.dumps({"name": "drafting", "axes": axes, "override": override}), encoding="utf-8")
    planned = planner.plan(str(matrix), release)
    works = {(cell["id"].rpartition("method=")[2], cell["axes"]["precision"]) for cell in feasible(planned)}
    within = {name for name, (first, last) in DRAFTING.items() if Version(first) <= Version(release) <= Version(last)}
    # quantize.py takes heads since 0.11; EAGLE's converter quantizes nothing.
    in_fp8 = within - {"eagle"} - ({"medusa"} if release == "0.10.0" else set())
    assert works == {(name, "bf16") for name in within} | {(name, "fp8") for name in in_fp8}
    modes, drafted = set(), set()
    for run, found in commands(planned):
        options = (releases.table(found.tool, release) or {})[found.tool]
        spellings = {spelling for name, row in options.items() for spelling in (name, *row.get("aliases", ()))}
        assert {word for word in found.arguments if word.startswith("--")} <= spellings, found
        values = arguments.parse(found.tool, options, found.arguments)
        if found.tool == "trtllm-build":
            modes.add(values.get("speculative_decoding_mode"))
            drafted.add((run["params"].get("speculative"), values.get("max_draft_len") or 0))
        if found.tool in {"convert_checkpoint.py:medusa", "convert_checkpoint.py:eagle"}:
            assert "/models/core/" not in found.path
            assert values[f"{found.tool.partition(':')[2]}_model_dir"].endswith("/out")
    assert modes == {MODES.get(name, name) for name in within} | ({None} if "draft" in within else set())
    lengths = {"draft": 5, "medusa": 63, "eagle": 63, "lookahead": 15}
    assert drafted == {(name, lengths[name]) for name in within} | ({(None, 0)} if "draft" in within else set())


TODAY: Final = ("1.2.1", "1.3.0rc20", "1.3.0rc29", "1.4.0rc1")
MODELS: Final = {
    "llama-3.1-8b-instruct": ("bf16", "fp8"),
    "llama-3.1-8b-instruct-fp8": ("as_is",),
    "qwen2.5-7b-instruct": ("bf16", "fp8"),
    "qwen3-8b": ("bf16", "fp8"),
    "qwen3-30b-a3b": ("bf16",),
    "mixtral-8x7b-instruct-v0.1": ("bf16",),
    "mistral-7b-instruct-v0.3": ("bf16", "fp8"),
    "phi-4": ("bf16",),
    "gpt-oss-20b": ("as_is",),
    "gemma-3-1b-it": ("bf16",),
}
CACHE: Final = {
    "kv_cache_free_gpu_mem_fraction": 0.5,
    "enable_kv_cache_reuse": True,
    "max_tokens_in_paged_kv_cache": 4096,
    "kv_cache_host_memory_bytes": 1 << 30,
}


@pytest.mark.parametrize("release", TODAY)
@pytest.mark.parametrize("frontend", ["triton", "trtllm_serve"])
def test_ten_models_at_the_releases_of_today(planner: Planner, release: str, frontend: str) -> None:
    """Every option and every key of a YAML file is one that the release has."""
    precisions = sorted({each for of_model in MODELS.values() for each in of_model})
    exclude = [
        {"model": model, "precision": other}
        for model, own in MODELS.items()
        for other in precisions
        if other not in own
    ]
    axes = {
        "model": list(MODELS),
        "precision": precisions,
        "parallel": ["tp1", "tp2"],
        "max_batch_size": [8],
        "lengths": ["1024,256"],
        "toolchain": [ENGINES, PYTORCH],
    }
    settings = {"serve": {"frontend": frontend}}
    override = [{"where": {"toolchain": PYTORCH}, "settings": {"repository": CACHE}}]
    matrix = planner.workspace.parent / "today.yaml"
    written = {"name": "today", "axes": axes, "exclude": exclude, "settings": settings, "override": override}
    matrix.write_text(json.dumps(written), encoding="utf-8")
    planned = planner.plan(str(matrix), release)
    check_programs(planned, release)
    works = Counter(cell["axes"]["toolchain"] for cell in feasible(planned))
    assert {cell["axes"]["model"] for cell in feasible(planned) if cell["axes"]["toolchain"] == PYTORCH} == {*MODELS}
    assert (works[ENGINES] > 0) is (release in {"1.2.1", "1.3.0rc20"})
    files = 0
    for run in planned["stage_runs"]:
        if (run["toolchain"], run["stage"]) == (PYTORCH, "repository"):
            check_settings_file(run["params"], release)
            files += 1
    assert files == works[PYTORCH]


def check_settings_file(params: dict[str, Any], release: str) -> None:
    """The YAML file of these parameters has only names that the release has, by two records."""
    for changes in ({}, {"speculative": "ngram", "max_draft_len": 4}, {"speculative": "mtp"}, {"speculative": "sa"}):
        if changes == {"speculative": "sa"} and release == "1.2.1":
            continue
        asked = load(WeightsRepository, params | changes)
        served = llmapi.serve_settings(asked, release)
        in_triton = llmapi.yaml_settings(Path("model"), asked, release)
        del in_triton[llmapi.OF_TRITON]
        schema = llm_args.around(release)
        assert schema is not None
        for written in (served, in_triton):
            llm_api.check_names(written, llm_api.of(release))
            if "speculative_config" in written:
                llm_api.check_speculation(
                    written["speculative_config"], {"num_nextn_predict_layers": 1}, llm_api.of(release)
                )
            assert schema.problems(written) == []
