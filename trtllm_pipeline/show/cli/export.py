"""`pipeline export`: deployment files of one verified cell."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, emit_as, note


def export(
    ctx: typer.Context,
    cell: Annotated[
        str, options.argument("CELL", "Cell id, pattern or part of an id.", complete=options.completion.cells)
    ],
    to: Annotated[
        str,
        options.option(
            "--to", "TARGETS", "Targets, separated by commas: bundle, compose, kubernetes, lws, kserve, hub."
        ),
    ],
    output_dir: Annotated[
        str,
        options.option(
            "--output-dir", "DIR", "New or empty directory for the files, with a subdirectory for each target."
        ),
    ],
    matrix: options.MatrixOrLatest = None,
    sets: options.Sets = None,
    workspace: options.Workspace = options.WORKSPACE,
    toolchain: options.Toolchain = None,
    name: Annotated[
        str | None, options.option("--name", "NAME", "Name of the created objects (default: from the cell's id).")
    ] = None,
    image: Annotated[
        str | None,
        options.option("--image", "IMAGE", "Container image (default: NVIDIA's image with the engine's release)."),
    ] = None,
    openai: Annotated[
        bool, options.switch("--openai", "Add an OpenAI endpoint in front of Triton: chat, completions, metrics.")
    ] = False,
    require_keys: Annotated[
        bool, options.switch("--require-keys", "(Kubernetes) Require API keys, from a Secret, at the OpenAI endpoint.")
    ] = True,
    gpus_per_node: Annotated[
        int, options.option("--gpus-per-node", "N", "GPUs per node. More ranks use several nodes.", min=1)
    ] = 8,
    storage_class: Annotated[
        str | None, options.option("--storage-class", "NAME", "(Kubernetes) Storage class of the volume.")
    ] = None,
    repository: Annotated[
        str | None, options.option("--repository", "ORG/NAME", "Repository on the hub, for --to hub.")
    ] = None,
    upload: Annotated[
        bool, options.switch("--upload", "Upload to the hub. Without it, --to hub only lists the files.")
    ] = False,
    public: Annotated[
        bool, options.switch("--public", "Create a public repository. By default a new repository is private.")
    ] = False,
    require_signed: options.RequireSigned = False,
    trusted_keys: options.TrustedKeys = None,
    format: options.TextOrJson = "text",
) -> None:
    """Write the files that serve one verified cell elsewhere.

    The cell's server must have passed its tests and no stage may have failed. Every file is verified again. The bundle is
    a directory with engine, tokenizer, repository, start script, checksums and engine card, for any host. The other
    targets mount it.

    examples:
      pipeline export 'smollm2*/int8_wo/*/bs4' --to bundle,compose --output-dir exported
      pipeline export 'smollm2*/int8_wo/*/bs4' --to kubernetes --openai --output-dir exported
      pipeline export 'smollm2*/int8_wo/*/bs4' --to hub --repository me/smollm2 --output-dir exported
    """
    from trtllm_pipeline.orchestrate import provenance, served_cell
    from trtllm_pipeline.serve import cell_export, deployment, hub

    targets = _targets(to)
    if "hub" in targets:
        hub.check_repository(repository)
    elif upload or repository is not None:
        raise UsageError("--upload and --repository require --to hub", hint="add --to hub")
    if not require_keys and not openai:
        raise UsageError("--no-require-keys requires --openai", hint="add --openai")
    store = options.known_store(workspace)
    served = served_cell.served_cell(
        options.request_or_latest(ctx, store, matrix, [cell], sets, toolchain=toolchain), store
    )
    folder = options.empty_folder(output_dir)  # before every file is read
    described = deployment.describe(
        served,
        deployment.check(served, store, provenance.policy(trusted_keys, required=require_signed)),
        store,
        name=name,
        image=image,
        gpus_per_node=gpus_per_node,
        openai=openai,
        api_keys=require_keys,
        storage_class=storage_class,
    )
    folders = cell_export.export_targets(described, targets, folder)
    summary: dict[str, Any] = {
        "schema": 1,
        "cell": str(served.cell.id),
        "name": described.name,
        "targets": {target: str(folder) for target, folder in folders.items()},
        "hub": None,
        "next_commands": cell_export.next_steps(described, store, folders),
    }
    if "hub" in targets and repository is not None:
        summary["hub"] = hub.publish(
            folders["bundle"], repository, message=f"{served.cell.id}", upload=upload, private=not public
        )
    emit_as(format, summary, text=lambda _: "\n".join(f"{target}\t{folder}" for target, folder in folders.items()))
    if format == "text":
        _say(summary["hub"], upload=upload)
        for target, steps in summary["next_commands"].items():
            note("\n".join([f"next, for {target}:", *(f"  {step}" for step in steps)]))


def _targets(text: str) -> list[str]:
    from trtllm_pipeline.serve import cell_export

    targets = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [target for target in targets if target not in cell_export.TARGETS]
    if unknown or not targets:
        raise UsageError(
            f"--to {text}: unknown target {unknown[0]!r}" if unknown else "--to: no target given",
            hint=f"expected one or more of {', '.join(cell_export.TARGETS)}",
        )
    return list(dict.fromkeys(targets))


def _say(hub: dict[str, Any] | None, *, upload: bool) -> None:
    if hub is None:
        return
    if upload:
        emit(f"hub\t{hub['url']}")
        return
    for name, size_bytes in hub["files"].items():
        emit(f"{size_bytes:>15,}  {name}")
    note(f"nothing was uploaded: --upload uploads these {len(hub['files'])} files to {hub['repository']}")
