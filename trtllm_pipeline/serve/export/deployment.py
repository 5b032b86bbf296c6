"""The deployed cell, as every target sees it: its server, the server's needs, and the measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.base import StateError, UsageError, count, disk, size
from trtllm_pipeline.models import model_names
from trtllm_pipeline.orchestrate import CellResult, StageRun, Store, manifest, provenance, served_cell
from trtllm_pipeline.serve.export import container_images, kubernetes_names
from trtllm_pipeline.serve.kept.serve_target import require_text
from trtllm_pipeline.tensorrt import MODEL as LLMAPI_MODEL
from trtllm_pipeline.tensorrt import SERVE_FILE, catalog, companions

DEFAULT_LOAD_S: Final = 200.0
"""Assumed load time of a server without a measurement. Three times this is ten minutes."""
VOLUME_BYTES_PER_S: Final = 100_000_000
"""Assumed read rate of a volume. The machine that measured the load time may have read the weights from its page cache."""
FILL_LIMIT_S: Final = 6 * 3600
"""Time for filling the volume. Servers wait for it."""
_GIB: Final = 1 << 30
_LABEL_DOMAIN: Final = "app.kubernetes.io"
BESIDE: Final = (*companions.NAMES, catalog.DRAFTER, catalog.VISUAL)
"""Server inputs other than the engine or weights: the bundle has a directory of the same name for each."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One verified cell, as used by templates and the card."""

    served: served_cell.ServedCell
    result: CellResult
    name: str
    """Name of every object created for it: a DNS label."""
    kind: str
    """`embedded`, `engine` (Triton with an engine), `llmapi` (Triton with the LLM API) or `trtllm_serve`."""
    release: str | None
    image: str
    world_size: int
    """GPUs; 0 for the embedded toolchain."""
    gpus_per_node: int
    gpu: str | None
    """Name of the GPU on which it was verified."""
    sm: int | None
    load_s: float | None
    """Seconds from the start of the server until it was ready, if measured."""
    bundle_bytes: int
    memory_bytes: int
    memory_from: str
    """Source of `memory_bytes`, in words."""
    cpus: int
    openai: bool
    api_keys: bool
    """True if that gateway requires API keys in Kubernetes."""
    storage_class: str | None

    @property
    def model(self) -> str:
        """Model name in requests to the server."""
        if self.kind == "trtllm_serve":  # the last part of the path given to trtllm-serve
            return "model" if self.served.engine is None else "engine"
        if self.kind == "llmapi":
            return LLMAPI_MODEL
        return model_names.ENSEMBLE if self.served.drafter is None else model_names.BLS_MODEL

    @property
    def sees(self) -> bool:
        return catalog.VISUAL in self.served.launch.inputs

    @property
    def nodes(self) -> int:
        return max(1, -(-self.world_size // self.gpus_per_node))

    @property
    def gpus_of_pod(self) -> int:
        return self.world_size // self.nodes

    @property
    def ready_path(self) -> str:
        """Returns 200 when the server and its models are ready."""
        return "/health" if self.kind == "trtllm_serve" else "/v2/health/ready"

    @property
    def live_path(self) -> str:
        """Returns 200 as long as the server is alive."""
        return "/health" if self.kind == "trtllm_serve" else "/v2/health/live"

    @property
    def start_limit_s(self) -> int:
        """Timeout of the start: three times the measured time, or a cold read of the bundle if that takes longer."""
        cold_s = self.bundle_bytes / VOLUME_BYTES_PER_S
        return max(60, math.ceil(max(3 * (self.load_s or DEFAULT_LOAD_S), cold_s) / 10) * 10)

    @property
    def start_limit_words(self) -> str:
        """Explains `start_limit_s`."""
        loaded = (
            f"The load time was not measured; {DEFAULT_LOAD_S:.0f} s are assumed."
            if self.load_s is None
            else f"It took {self.load_s:.0f} s to load when it was verified, perhaps from the page cache."
        )
        return (
            f"{loaded} Limit: three times that, or reading {size(self.bundle_bytes)} at "
            f"{VOLUME_BYTES_PER_S // 1_000_000} MB/s if that takes longer."
        )

    @property
    def progress_limit_s(self) -> int:
        """Timeout of a rollout in Kubernetes: filling the volume, pulling the image, and the start."""
        return FILL_LIMIT_S + 600 + self.start_limit_s

    @property
    def gateway_image(self) -> str:
        """The embedded toolchain's image also has the gateway."""
        return self.image if self.kind == catalog.EMBEDDED else container_images.CPU

    @property
    def images(self) -> list[str]:
        return list(dict.fromkeys([self.image, *([self.gateway_image] if self.openai else [])]))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the repository in `bundle.json`: it tells the bundle from others of the same name."""
        return self.served.artifacts["repository"].fingerprint

    @property
    def labels(self) -> dict[str, str]:
        labels = {
            "name": "triton" if self.kind != "trtllm_serve" else "trtllm-serve",
            "instance": self.name,
            "version": self.release or self.fingerprint[:12],
            "component": "inference-server",
            "part-of": kubernetes_names.label_value(self.served.cell.model),
            "managed-by": "trtllm-pipeline",
        }
        return {label(key): kubernetes_names.label_value(value) for key, value in labels.items()}

    @property
    def gpu_product(self) -> str | None:
        """The node label that selects the GPU: its name with dashes, as NVIDIA's GPU feature discovery writes it."""
        return None if self.gpu is None else kubernetes_names.label_value("-".join(self.gpu.split()))

    @property
    def storage(self) -> str:
        """Size of the volume: the bundle plus a tenth."""
        return f"{max(1, math.ceil(self.bundle_bytes * 1.1 / _GIB))}Gi"

    @property
    def cpus_of_pod(self) -> int:
        return max(1, self.cpus // self.nodes)

    @property
    def memory(self) -> str:
        return f"{math.ceil(self.memory_bytes / _GIB)}Gi"

    @property
    def memory_limit(self) -> str:
        """Twice that: the limit at which the kernel kills a server with a memory leak."""
        return f"{2 * math.ceil(self.memory_bytes / _GIB)}Gi"


def label(name: str) -> str:
    """The key of one of Kubernetes' recommended labels."""
    return f"{_LABEL_DOMAIN}/{name}"


def check(served: served_cell.ServedCell, store: Store, policy: provenance.Policy) -> CellResult:
    """The cell's results. Raises UsageError unless its server was tested and no stage failed, StateError
    for damaged artifacts and for signatures that `policy` does not accept.

    Every byte of its artifacts is read. A performance measurement is optional: the card notes its absence.
    """
    if served.cell.toolchain in catalog.SERVERS:
        raise UsageError(
            f"{served.cell.id}: a server of others is not exported: {served.cell.toolchain} has images and charts of its own",
            hint="pipeline plan --format json has its command line",
        )
    result = served.result(store)
    problem = result.unfit if result.failed_stage is not None else None
    run = next(run for run in _runs(served) if run.stage.name == "repository")
    made_of = [served.plan.stage_runs[each].stage.name for each in run.inputs.values()]
    missing = next((stage for stage in made_of if stage not in served.artifacts), None)
    if missing is not None:
        problem = f"{missing} is missing, which its repository was built from"
    if problem is None and "smoke" not in served.artifacts:
        problem = "its server was never tested (smoke)"
    if problem is not None:
        raise UsageError(
            f"{served.cell.id} is not verified: {problem}",
            hint=served_cell.run_command(served.request, store, until=missing),
        )
    for artifact in served.all_artifacts.values():
        for finding in manifest.inspect(artifact.folder, contents=True):
            if finding.kind is manifest.Kind.DAMAGED:
                raise StateError(
                    f"{finding}: nothing is exported from damaged files",
                    hint=f"pipeline store verify --workspace {store.workspace} sets them aside; then run again",
                )
    provenance.require((artifact.folder for artifact in served.artifacts.values()), policy)
    return result


def describe(
    served: served_cell.ServedCell,
    result: CellResult,
    store: Store,
    *,
    name: str | None = None,
    image: str | None = None,
    gpus_per_node: int = 8,
    openai: bool = False,
    api_keys: bool = True,
    storage_class: str | None = None,
) -> Deployment:
    """The deployment of a checked cell. Raises UsageError for a cell that cannot be deployed."""
    cell, machine = served.cell, served.plan.machine
    kind = _kind(served)
    world_size = 0 if kind == catalog.EMBEDDED else cell.tp * cell.pp
    release = machine.tensorrt_llm.release if kind != catalog.EMBEDDED and machine.tensorrt_llm else None
    if cell.settings["serve"]["frontend"] == "triton_openai":
        raise UsageError(
            "cells served by Triton's own OpenAI front end are not exported",
            hint="--set settings.serve.frontend=triton; --openai puts the gateway in front of it",
        )
    if cell.settings["serve"]["frontend"] == "disaggregated":
        raise UsageError(
            "disaggregated servers are not exported",
            hint="--set settings.serve.frontend=trtllm_serve exports one server",
        )
    if openai:
        require_text(served.inputs)
    if openai and kind == "trtllm_serve":
        raise UsageError("--openai: trtllm-serve is an OpenAI server already", hint="leave it out")
    if world_size > gpus_per_node and world_size % gpus_per_node:
        raise UsageError(
            f"{world_size} GPUs cannot be split evenly over nodes of {gpus_per_node}", hint="--gpus-per-node N"
        )
    bundle_bytes = sum(
        disk.folder_bytes(folder)
        for folder in (served.engine, *(served.inputs.get(name) for name in ("model", *BESIDE)))
        if folder is not None
    )
    memory_bytes, memory_from = _memory(served, store, bundle_bytes)
    return Deployment(
        served=served,
        result=result,
        name=kubernetes_names.dns_label(str(cell.id))
        if name is None
        else kubernetes_names.checked_name("--name", name),
        kind=kind,
        release=release,
        image=_image(image, kind, release),
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        gpu=machine.gpus[0].name if world_size and machine.gpus else None,
        sm=machine.sm if world_size else None,
        load_s=_load_s(served, store),
        bundle_bytes=bundle_bytes,
        memory_bytes=memory_bytes,
        memory_from=memory_from,
        cpus=machine.cpus if kind == catalog.EMBEDDED else 4 + 2 * world_size,
        openai=openai,
        api_keys=api_keys,
        storage_class=None if storage_class is None else kubernetes_names.checked_storage_class(storage_class),
    )


def _image(given: str | None, kind: str, release: str | None) -> str:
    if given is not None:
        container_images.parts(given)  # refuses invalid references
        return given
    return (
        container_images.CPU if release is None else container_images.image_for(release, triton=kind != "trtllm_serve")
    )


def _kind(served: served_cell.ServedCell) -> str:
    if served.cell.toolchain == catalog.EMBEDDED:
        return catalog.EMBEDDED
    if (served.repository / SERVE_FILE).exists():
        return "trtllm_serve"
    return "engine" if "engine" in served.launch.inputs else "llmapi"


def _memory(served: served_cell.ServedCell, store: Store, bundle_bytes: int) -> tuple[int, str]:
    """Host memory that the server needs, including `/dev/shm`, and the source of the figure: the same as in a plan."""
    host, shared = served.host_memory(store)
    if host is None:
        return bundle_bytes + 8 * _GIB, "the size of the weights plus 8 GiB: the model's dimensions are not known"
    margin = f"plus {host.error:.0%} for the estimate's error"
    if host.measured:
        return host.most + shared, f"what {count(host.measured, 'such server')} took, {margin}"
    return host.most + shared, f"the server's estimated memory, {margin}, not measured"


def _load_s(served: served_cell.ServedCell, store: Store) -> float | None:
    """Seconds from the start of the launch stage to that of the smoke test, which only waits for the server."""
    smoke = next((run for run in _runs(served) if run.stage.name == "smoke"), None)
    if smoke is None:
        return None
    attempts = store.index.attempts((smoke.fingerprint,)).get(smoke.fingerprint)
    if attempts is None:
        return None
    launches = [
        attempt.started_s
        for attempt in store.index.attempts_of(attempts.run)
        if attempt.fingerprint == served.launch.fingerprint and attempt.started_s <= attempts.started_s
    ]
    return attempts.started_s - launches[-1] if launches else None


def _runs(served: served_cell.ServedCell) -> list[StageRun]:
    runs = served.plan.stage_runs
    return [runs[run] for run in served.plan.by_cell[served.cell.id]]
