"""What stage runs need of memory and disk: estimates, their corrections by measurements, verdicts, and what would fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.helpers import fabricated, trtllm_cells
from tests.unit.orchestrate.run.test_forecast import cell
from trtllm_pipeline.base.domain import Cell, Needs
from trtllm_pipeline.base.errors import PlanError
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.models.hub import sources
from trtllm_pipeline.orchestrate import flow
from trtllm_pipeline.orchestrate.memory import estimates
from trtllm_pipeline.orchestrate.memory.estimates import DISK, GPU, HOST, LESS, NOT, Corrections, Estimate, Need
from trtllm_pipeline.orchestrate.plan.plan import Plan, of_plan
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.run.forecast import forecast
from trtllm_pipeline.orchestrate.run.loop import Observer
from trtllm_pipeline.orchestrate.run.order import capacities, simulate, tasks
from trtllm_pipeline.orchestrate.store.index import Peak
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains

H100 = parse("tensorrt_llm==1.0.0,sm=90,gpus=8,memory_gib=512")
NO_GPU = "no GPU; no TensorRT-LLM"
LABEL = "convert/embedded/small/fp16"


def llama(precision: str = "fp16", *, tp: int = 1, batch: int = 8, **settings: object) -> Cell:
    """With settings such as `build__max_beam_width`."""
    said = {name.replace("__", "."): value for name, value in settings.items()}
    return trtllm_cells.cell(precision, tp=tp, batch=batch, osl=1408, settings=said)


def stages(made: Cell) -> tuple[object, ...]:
    return toolchains.load(made.toolchain).stages


def needs_of(made: Cell, stage: str, machine: Machine = H100) -> Needs:
    found = estimates.expected(toolchains.load(made.toolchain).stage(stage), made, machine)
    assert found is not None
    return found


def peak(taken: int, *, label: str = LABEL, system: str = NO_GPU) -> Peak:
    return Peak(label, system, {"host": 100}, {"host": taken})


def corrected(*peaks: Peak, label: str = LABEL) -> Estimate:
    return Corrections(peaks, fabricated.MACHINE).of(label, HOST, 1000, 0.2)


def test_an_estimate_is_corrected_by_the_median_ratio_of_what_was_measured() -> None:
    assert corrected() == Estimate(1000, 0.2, 0)
    assert corrected(peak(120)) == Estimate(1200, 0.2, 1), "one measurement says nothing of the spread"
    many = corrected(peak(110), peak(120), peak(150))
    assert (many.value, many.measured) == (1200, 3)
    assert many.error == pytest.approx(0.25)
    assert corrected(peak(120), peak(120)).error == 0.05, "two that agree are not certain"


def test_what_worked_on_less_is_measured_by_the_memory_that_there_was() -> None:
    machine = parse("sm=90,gpus=2,gpu_memory_gib=80")
    has = 80 << 30
    for needs, recorded in (
        (Needs(gpu=6 * has, gpu_least=has // 2), has),
        (Needs(gpu=has // 2, gpu_least=has // 4), has // 2),
        (Needs(gpu=2 * has), 2 * has),
        (Needs(gpu=6 * has, gpu_least=2 * has), 6 * has),
    ):
        assert estimates.expected_by_kind(needs, machine)["gpu"] == recorded


def test_only_what_is_alike_corrects() -> None:
    assert corrected(peak(120, system="NVIDIA H200; 1.0.0")).measured == 0
    other = peak(200, label="convert/embedded/large/fp16")
    assert corrected(other).value == 2000, "another model of the same formula, where nothing nearer is known"
    assert corrected(other, peak(120)).value == 1200
    assert corrected(peak(300, label="convert/tensorrt_llm/small/fp16")).measured == 0
    assert corrected(peak(0)).measured == 0, "a peak that was not measured is none"


def test_another_model_makes_no_cell_impossible() -> None:
    """What a tiny model takes beside its weights is a multiple of them, and next to nothing of a large one's."""
    others = [peak(1000, label="convert/embedded/tiny/fp16")] * 3
    estimate = corrected(*others)
    assert estimate.value == 10_000
    assert not Need("convert", "cell", HOST, estimate, 900).impossible
    assert Need("convert", "cell", HOST, estimate, 700).impossible, "nor without it"
    assert Need("convert", "cell", HOST, corrected(*[peak(1000)] * 3), 900).impossible, "its own does"


def need(value: int, has: int | None, *, error: float = 0.1, least: int | None = None) -> Need:
    return Need("launch", "cell", GPU, Estimate(value, error), has, least)


@pytest.mark.parametrize(
    ("found", "verdict", "impossible"),
    [
        (need(100, 200), "fits", False),
        (need(100, 105), "tight", False),
        (need(100, 95), NOT, False),
        (need(100, 80), NOT, True),
        (need(100, 80, least=50), LESS, False),
        (need(100, 40, least=50), NOT, True),
        (need(100, None), "unknown", False),
    ],
)
def test_a_verdict_takes_the_error_into_account(found: Need, verdict: str, impossible: bool) -> None:
    assert (found.verdict, found.impossible) == (verdict, impossible)


def test_nothing_is_refused_for_an_assumption() -> None:
    guess = dataclasses.replace(need(100, 10), assumed=True)
    assert (guess.verdict, guess.impossible) == ("tight", False)
    little = dataclasses.replace(H100, shared_bytes=64 << 20)
    assert estimates.infeasible(llama(tp=4), stages(llama()), little, no_measurements(little)) is None
    launch, four = toolchains.load("tensorrt_llm").stage("launch"), llama(tp=4)
    expected = estimates.expected(launch, four, little)
    shown = estimates.of_stage(expected, launch, four, little, no_measurements(little), "launch/x/y/z")
    assert {each.resource: each.verdict for each in shown}[estimates.SHARED] == "tight"


def test_headroom_is_what_is_left() -> None:
    assert need(100, 130).headroom == 30
    assert need(100, None).headroom is None
    assert need(100, 130).to_json()["headroom_bytes"] == 30


# What TensorRT-LLM takes


def test_a_server_needs_weights_the_cache_of_its_batch_and_what_the_runtime_adds() -> None:
    one, eight = (needs_of(llama(batch=batch), "launch") for batch in (1, 8))
    assert one.gpu_least == pytest.approx(one.gpu, rel=0.01)
    weights = 2 * 8.03e9
    assert weights < one.gpu < 1.35 * weights
    assert eight.gpu > one.gpu
    assert eight.gpu_least < eight.gpu
    halved = needs_of(llama(tp=2, batch=8), "launch")
    assert halved.gpu < 0.65 * eight.gpu
    assert halved.shared > eight.shared, "ranks exchange data"


def test_a_server_that_streams_weights_keeps_a_share_of_them_on_the_gpu_and_all_on_the_host() -> None:
    streamed = llama(build__weight_streaming=True, repository__gpu_weights_percent=0.25)
    whole, part = (needs_of(each, "launch") for each in (llama(), streamed))
    weights = 2 * 8.03e9
    assert whole.gpu - part.gpu == pytest.approx(0.75 * weights, rel=0.1)
    assert part.host - whole.host == pytest.approx(weights, rel=0.1)
    assert needs_of(streamed, "build").assumed == ("gpu",), "nobody has told what building takes"
    checked = toolchains.load("tensorrt_llm").stage("check")
    assert (checked.read(streamed).gpu_weights_percent, checked.read(llama()).gpu_weights_percent) == (0.25, 1.0)


def test_the_cache_gets_a_share_of_what_is_left() -> None:
    half, most = (needs_of(llama(repository__kv_cache_free_gpu_mem_fraction=share), "launch") for share in (0.5, 0.9))
    assert half.gpu > most.gpu


def test_a_build_needs_the_engine_on_the_gpu_and_twice_on_the_host() -> None:
    built = needs_of(llama(), "build")
    assert built.leaves < built.gpu < built.leaves + (1 << 30)
    assert built.host == 5 * (1 << 30) + 2 * built.leaves
    assert needs_of(llama(tp=2), "build").host > built.host, "each rank has a worker of its own"


def test_quantizing_is_spread_over_the_gpus_that_hold_the_model() -> None:
    small = parse("tensorrt_llm==1.0.0,sm=90,gpus=4,gpu_memory_gib=10,examples=no")
    alone = parse("tensorrt_llm==1.0.0,sm=90,gpus=1,examples=no")
    assert needs_of(llama("fp8"), "quantize", small).gpu < needs_of(llama("fp8"), "quantize", alone).gpu
    by_script = needs_of(llama("fp8"), "quantize", parse("tensorrt_llm==1.0.0,sm=90,gpus=1"))
    assert by_script.gpu > 1.4 * 2 * 8.03e9


@pytest.mark.parametrize(("gib", "at_a_time"), [(64, 1), (128, 2), (None, 2)])
def test_what_does_not_fit_into_the_hosts_memory_together_runs_one_after_another(
    gib: int | None, at_a_time: int
) -> None:
    """Two builds, of 37 GB each."""
    on = parse("tensorrt_llm==1.0.0,sm=90,gpus=8" + (f",memory_gib={gib}" if gib else ""))
    plan = trtllm_cells.plan(llama("fp16"), llama("bf16"), on=on)
    builds = [run for run in plan.stage_runs.values() if run.stage.name == "build"]
    assert len(builds) == 2
    takes = {run.id: 100.0 for run in builds}
    assert simulate(plan, takes, capacities(on), takes) == 200 / at_a_time
    runs = {task.id: task for task in tasks(plan, takes, lambda _run: 100.0, on=capacities(on))}
    assert all(task.resources.gpus == 1 for task in runs.values())


def test_beams_take_logits_and_a_cache_of_their_answers() -> None:
    one, four = llama(), trtllm_cells.cell(osl=1024, settings={"build.max_beam_width": 4})
    one = dataclasses.replace(one, osl=1024)
    more = needs_of(four, "launch").gpu - needs_of(one, "launch").gpu
    answers = 3 * 1024 * 8 * 131072 / 0.9
    logits = 28.7 * 3 * 8 * 128256
    assert answers + logits <= more <= answers + 2 * logits


# What cannot work, and what would


def no_measurements(machine: Machine) -> Corrections:
    return Corrections((), machine)


def test_what_needs_more_host_memory_than_there_is_cannot_work() -> None:
    made = llama()
    little = dataclasses.replace(H100, memory_bytes=8 << 30)
    why = estimates.infeasible(made, stages(made), little, no_measurements(little))
    assert "of host memory" in why
    assert why.endswith("; use a machine with more, or a smaller model")
    assert estimates.infeasible(made, stages(made), H100, no_measurements(H100)) is None
    unknown = dataclasses.replace(H100, memory_bytes=None)
    assert estimates.infeasible(made, stages(made), unknown, no_measurements(unknown)) is None


@pytest.mark.parametrize(
    ("stage", "remedy"),
    [
        ("launch", "a larger tp or pp, or a smaller precision, reduces it"),
        ("quantize", "use more or larger GPUs, or precision as_is with a published model that is already quantized"),
    ],
)
def test_a_refusal_for_memory_has_a_way_on(stage: str, remedy: str) -> None:
    made = trtllm_cells.cell("int4_awq")
    little = dataclasses.replace(H100, gpus=tuple(dataclasses.replace(gpu, memory_bytes=1 << 30) for gpu in H100.gpus))
    why = estimates.infeasible(
        made, [each for each in stages(made) if each.name == stage], little, no_measurements(little)
    )
    assert why.endswith(f"1.0 GiB available; {remedy}")


def test_a_measurement_that_fitted_makes_it_possible_again() -> None:
    made = llama()
    little = dataclasses.replace(H100, memory_bytes=10 << 30)
    label = f"build/{made.toolchain}/{made.model}/{made.precision}"
    system = estimates.system(little)
    took = [Peak(label.replace("build", stage), system, {"host": 100}, {"host": 10}) for stage in ("build", "convert")]
    assert estimates.infeasible(made, stages(made), little, Corrections(took, little)) is None


def test_what_was_measured_is_kept_and_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = next(iter(fabricated.plan(cell()).stage_runs.values()))
    attempt = store.begin("run-1", "convert", run.fingerprint)
    store.index.add_peak(attempt.id, peak(120))
    store.close()
    (tmp_path / "state.db").unlink()
    again = Store(tmp_path)
    assert again.index.peaks() == [peak(120)], "rebuilt from the history"
    again.close()


def test_of_each_stage_the_run_that_needs_most_is_shown() -> None:
    small, large = (dataclasses.replace(need(value, 200), cell=str(value)) for value in (10, 20))
    assert estimates.tightest([small, large]) == [large]
    # Of GPUs of several types, the smaller may be the tighter.
    crowded = dataclasses.replace(small, has=small.estimate.value)
    assert estimates.tightest([crowded, dataclasses.replace(large, has=1 << 60)]) == [crowded]


def test_a_full_disk_is_known_before() -> None:
    plan = fabricated.plan(cell())
    found = of_plan(plan, plan.stage_runs.values(), no_measurements(plan.machine), 1000)
    (disk,) = (each for each in found if each.resource == DISK)
    assert disk.impossible


def disk_of(plan: Plan, store: Store | None = None) -> int:
    (disk,) = (each for each in forecast(plan, store).needs if each.resource == DISK)
    return disk.estimate.value


def test_what_a_broken_download_has_left_needs_no_disk_again(tmp_path: Path) -> None:
    plan = fabricated.plan(cell())
    store = Store(tmp_path / "ws")
    before = disk_of(plan, store)
    source = fabricated.stage_run(plan, plan.cells[0], "download").params.source
    with sources._kept(source, store.work_dir / "partial") as kept:
        (kept / "model.safetensors").write_bytes(bytes(5_000_000))
    assert disk_of(plan, store) == before - 5_000_000
    with sources._kept({**source, "revision": "2"}, store.work_dir / "partial") as kept:
        (kept / "model.safetensors").write_bytes(bytes(5_000_000))
    assert disk_of(plan, store) == before - 5_000_000, "another revision's do not help"
    store.close()


def test_a_folder_on_the_same_disk_needs_no_room_and_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its large files are linked, or share their data."""
    hub = cell()
    source = {"source": {"local": "0" * 64}, "folder": str(tmp_path)}
    local = dataclasses.replace(hub, recipe={**hub.recipe, **source})
    plan, store = fabricated.plan(local), Store(tmp_path / "ws")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(70 << 20)
    (tmp_path / "config.json").write_text("{}")
    assert disk_of(fabricated.plan(hub), store) - disk_of(plan, store) == 70 << 20
    monkeypatch.setattr("trtllm_pipeline.models.hub.local._COPIED_BYTES", 80 << 20)
    assert disk_of(plan, store) == disk_of(fabricated.plan(hub), store)
    took = [forecast(each, store).times for each in (plan, fabricated.plan(hub))]
    (from_folder, from_hub) = (next(times[run].value for run in times if run.startswith("download")) for times in took)
    assert from_folder - 2000 < (from_hub - 2000) / 10, "beside the 2 s that every download takes"
    store.close()


def test_a_wheel_is_on_the_disk_beside_what_is_unpacked_of_it() -> None:
    hub = cell()
    wheel = dataclasses.replace(hub, recipe={**hub.recipe, "source": {"package_index": "wheel==1", "sha256": "0" * 64}})
    weights = needs_of(hub, "download").leaves
    assert needs_of(wheel, "download").scratch == weights
    assert disk_of(fabricated.plan(wheel)) - disk_of(fabricated.plan(hub)) == weights


@pytest.mark.parametrize(("tp", "frontend", "mib"), [(1, "triton", 64), (2, "triton", 192), (2, "trtllm_serve", 128)])
def test_shared_memory_is_that_of_triton_and_of_ranks(tp: int, frontend: str, mib: int) -> None:
    made = llama(tp=tp, serve__frontend=frontend)
    little = parse("tensorrt_llm==1.0.0,sm=90,gpus=2,shm_gib=0.1")
    launch = toolchains.load(made.toolchain).stage("launch")
    found = estimates.of_stage(needs_of(made, "launch"), launch, made, little, no_measurements(little), "x")
    (shared,) = (each for each in found if each.resource == estimates.SHARED)
    assert (shared.estimate.value, shared.has) == (mib << 20, little.shared_bytes)
    assert shared.verdict == ("fits" if mib == 64 else "tight"), "an assumption refuses nothing"


def test_a_run_that_its_disk_cannot_hold_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    matrix = tmp_path / "matrix.yaml"
    axes = "model: [tiny], precision: [fp16], max_batch_size: [1], lengths: ['16,16']"
    matrix.write_text(f"name: full\ntoolchain: embedded\naxes: {{{axes}}}\n", encoding="utf-8")
    monkeypatch.setattr("trtllm_pipeline.orchestrate.run.forecast._free_bytes", lambda _folder: 1000)
    store = Store(tmp_path / "ws")
    with pytest.raises(PlanError, match=r"of disk, .* is free"):
        flow.run(Request(matrix, until="convert"), store, Observer())
    assert list(store.runs_dir.iterdir()) == []
    store.close()


def test_the_error_of_a_server_of_long_prompts_is_that_of_its_activations() -> None:
    usual = needs_of(llama(), "launch")
    long = llama(batch=1, build__max_num_tokens=128_000, build__gather_context_logits=True)
    at_once = needs_of(dataclasses.replace(long, isl=127_000, osl=1_000), "launch")
    assert usual.error == 0.15
    activations = 39.6e9  # measured, with the logits of every token
    assert at_once.gpu * (1 + at_once.error) > at_once.gpu + 0.3 * activations


def test_rows_that_nobody_asked_for_are_as_many_as_fit() -> None:
    little = parse("tensorrt_llm==1.0.0,sm=90,gpus=1,gpu_memory_gib=20,examples=no")
    made, asked = llama("fp8"), llama("fp8", quantize__batch_size=64)
    quantize = toolchains.load(made.toolchain).stage("quantize")

    def verdict(cell: Cell) -> str:
        shown = estimates.of_stage(
            needs_of(cell, "quantize", little), quantize, cell, little, no_measurements(little), "x"
        )
        return next(each.verdict for each in shown if each.resource == GPU)

    assert verdict(made) == "tight"
    assert verdict(asked) == LESS
