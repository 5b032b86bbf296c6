"""`pipeline store provenance`: the provenance of artifacts, and its signatures."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from trtllm_pipeline.base import UsageError, count
from trtllm_pipeline.orchestrate import provenance as library
from trtllm_pipeline.orchestrate import runs
from trtllm_pipeline.show.cli import completion, options
from trtllm_pipeline.show.cli.output import emit, emit_json, note

PASSPHRASE = "PIPELINE_SIGNING_PASSPHRASE"  # noqa: S105 - the name of a variable


def provenance(
    name: Annotated[
        str | None,
        options.argument(
            "ARTIFACT|STAGE|CELL",
            "Artifact id, fingerprint prefix, stage or cell (default: all artifacts).",
            complete=completion.cells,
        ),
    ] = None,
    workspace: options.Workspace = options.WORKSPACE,
    sign: Annotated[
        Path | None, options.option("--sign", "KEY", "Sign with this private key (PEM file, Ed25519 or ECDSA P-256).")
    ] = None,
    attach: Annotated[
        Path | None, options.option("--attach", "FILE", "Attach this envelope, signed elsewhere, to the artifact.")
    ] = None,
    anonymous: Annotated[bool, options.switch("--anonymous", "Omit user and host from the statement.")] = False,
    require_signed: options.RequireSigned = False,
    trusted_keys: options.TrustedKeys = None,
    format: Annotated[
        Literal["text", "json", "statement", "envelope", "sigstore"], options.option("--format", None, "Output format.")
    ] = "text",
) -> None:
    """Show the provenance of artifacts (inputs, commands, versions, host, time) and its signatures.

    `statement` prints in-toto statements, `envelope` signed statements, and `sigstore` Sigstore bundles, one per line.
    The passphrase of an encrypted key is read from PIPELINE_SIGNING_PASSPHRASE or prompted for. The exit code is 1 if
    verification fails.

    examples:
      pipeline store provenance 'smollm2*/int8_wo/*/bs4'
      pipeline store provenance --sign signing.pem
      pipeline store provenance build-4a46c422fbf3 --require-signed --trusted-keys trusted/
    """
    policy = library.policy(trusted_keys, required=require_signed)
    store = options.known_store(workspace)
    folders = [artifact.folder for artifact in runs.find_artifacts(store, name)]
    if attach is not None:
        if len(folders) != 1:
            raise UsageError(
                f"--attach: {len(folders)} artifacts are selected", hint="name one artifact, e.g. build-4a46c422fbf3"
            )
        library.attach(store, folders[0], library.read_file(attach))
    if sign is not None:
        key = library.SigningKey.read(sign, _passphrase)
        new = sum(library.sign(store, folder, key, anonymous=anonymous) for folder in folders)
        before = "" if new == len(folders) else f"; {len(folders) - new} signed before"
        note(f"signed {count(new, 'statement')} with key {key.keyid}{before}")
        if trusted_keys is None:
            policy = library.Policy((replace(key.public, name=sign.name),))
    described = [library.Described.of(folder, policy, anonymous=anonymous) for folder in folders]
    if format == "json":
        emit_json({"schema": 1, "artifacts": [each.to_json() for each in described]})
    elif format == "text":
        emit("\n\n".join(each.text() for each in described))
    elif format == "statement":
        for folder in folders:
            emit(library.statement_line(folder, anonymous=anonymous))
    else:
        for envelope in map(library.envelope_of, folders):
            emit(envelope.text() if format == "envelope" else "\n".join(envelope.bundles()))
    findings = [finding for each in described for finding in each.looked.findings]
    for finding in findings:
        note(str(finding))
    raise typer.Exit(1 if findings else 0)


def _passphrase() -> str:
    given = os.environ.get(PASSPHRASE)
    if given is None and not sys.stdin.isatty():
        raise UsageError(
            "the key is encrypted, and there is no terminal to prompt for its passphrase", hint=f"set {PASSPHRASE}"
        )
    return given if given is not None else str(typer.prompt("passphrase of the key", hide_input=True, err=True))
