"""Exports one verified cell as files that serve it elsewhere.

All container targets serve the bundle: they mount it read-only at a fixed path and run its `start`.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.orchestrate import Store
from trtllm_pipeline.serve.export import bundle, container_images, manifests
from trtllm_pipeline.serve.export.deployment import Deployment

TARGETS: Final = ("bundle", "compose", "kubernetes", "lws", "kserve", "hub")
_WRITERS: Final[dict[str, Callable[[Deployment, Path], None]]] = {
    "bundle": bundle.write,
    "compose": manifests.write_compose,
    **{target: partial(manifests.write_base, target) for target in manifests.RESOURCES},
}
_READY: Final = {
    "kubernetes": "--for=condition=available {limit} deployment/{name}",
    "lws": "--for=condition=available {limit} leaderworkerset/{name}",
    "kserve": "--for=condition=ready {limit} inferenceservice/{name}",
}
"""Target in a cluster -> the condition for `kubectl wait`."""
_READY_MINUTES: Final = 30
"""Minimum time for pulling the image and loading the engine."""
_BUILD: Final = "docker build -f CLONE/Dockerfile.cpu -t {image} CLONE"
"""CLONE is a clone of this project."""


def check_targets(deployment: Deployment, targets: Sequence[str]) -> None:
    """Raise UsageError for a target that cannot serve the cell, before anything is written."""
    if deployment.nodes > 1:
        one = next((each for each in ("compose", "kubernetes", "kserve") if each in targets), None)
        if one is not None:
            raise UsageError(
                f"--to {one}: {deployment.world_size} GPUs are more than the {deployment.gpus_per_node} of a node",
                hint="--to lws runs it on several nodes; --gpus-per-node N if yours have more",
            )
        if deployment.kind == "llmapi":
            raise UsageError(
                f"Triton's llmapi model runs on one node, and {deployment.world_size} GPUs are more than the "
                f"{deployment.gpus_per_node} of a node",
                hint="settings.serve.frontend: trtllm_serve serves these weights on several",
            )
    elif "lws" in targets:
        raise UsageError(
            "--to lws is for several nodes, and one is enough for this cell",
            hint="--to kubernetes, or --gpus-per-node N where yours have fewer than its GPUs",
        )


def export_targets(deployment: Deployment, targets: Sequence[str], folder: Path) -> dict[str, Path]:
    """Write each of `targets` into a directory of the same name below the empty `folder`. Returns the directories.

    An incomplete export is removed: a full disk leaves nothing that looks finished. Raises UsageError, StateError,
    OSError.
    """
    check_targets(deployment, targets)
    # A hub gets a bundle. If both are requested, they are the same.
    wanted = list(dict.fromkeys("bundle" if each == "hub" else each for each in targets))
    try:
        for target in wanted:
            part = folder / target
            part.mkdir()
            _WRITERS[target](deployment, part)
    except BaseException:
        for each in os.listdir(folder):
            shutil.rmtree(folder / each, ignore_errors=True)
        raise
    return {target: folder / target for target in wanted}


def next_steps(deployment: Deployment, store: Store, folders: Mapping[str, Path]) -> dict[str, list[str]]:
    """The commands to type after the export, by target. `bundle` has the one that writes a missing bundle."""
    targets = [target for target in folders if target == "compose" or target in _READY]
    if not targets:
        return {}
    out = folders[targets[0]].parent
    bundle = folders.get("bundle", out.with_name(f"{out.name}-bundle") / "bundle")
    steps = {} if "bundle" in folders else {"bundle": [_bundle_command(deployment, store, bundle.parent)]}
    local = container_images.CPU in deployment.images  # in no registry
    for target in targets:
        folder, name = folders[target], deployment.name
        if target == "compose":
            steps[target] = [
                *([_BUILD.format(image=container_images.CPU)] if local else []),
                f"BUNDLE={shlex.quote(str(bundle))} docker compose --file {shlex.quote(f'{folder}/compose.yaml')} up --detach --wait",
            ]
        else:
            limit = f"--timeout={max(_READY_MINUTES, math.ceil(deployment.start_limit_s / 60))}m"
            image = f"REGISTRY/{container_images.CPU}"
            keys = f'kubectl create secret generic {name}-api-keys --from-literal=keys="$(openssl rand -hex 24)"'
            steps[target] = [
                *([f"{_BUILD.format(image=image)} && docker push {image}"] if local else []),
                shlex.join(["grep", "-rn", "CHOOSE", str(folder)]),
                *([keys] if deployment.openai and deployment.api_keys else []),
                shlex.join(["kubectl", "apply", "-k", f"{folder}/overlay"]),
                shlex.join(["sh", f"{folder}/fill/{manifests.FILL_SCRIPT}", str(bundle)]),
                f"kubectl wait {_READY[target].format(name=name, limit=limit)}",
            ]
    return steps


def _bundle_command(deployment: Deployment, store: Store, folder: Path) -> str:
    request = deployment.served.request
    words = ["pipeline", "export", str(deployment.served.cell.id), "--to", "bundle", "--output-dir", str(folder)]
    words += ["--matrix", str(request.matrix), *(word for value in request.sets for word in ("--set", value))]
    words += [] if request.toolchain is None else ["--toolchain", request.toolchain]
    return shlex.join([*words, "--workspace", str(store.workspace)])
