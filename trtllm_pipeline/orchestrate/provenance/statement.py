"""The statement of an artifact: in-toto Statement v1 with the provenance predicate v1 of SLSA.

It is derived from the manifest and the job and never stored separately. `docs/reference/provenance.md` describes each field.
 Sources: https://in-toto.io/Statement/v1, https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Json, StateError, digest_file, read_object
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.manifest import Manifest
from trtllm_pipeline.tensorrt import JOB

TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "trtllm-pipeline:stage-run/v1"
"""The format of the parameters, described in docs/reference/provenance.md."""
ALL_FILES: Final = "."
"""Name of the subject for all files together."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_VERSIONS: Final = {"pipeline": "trtllm-pipeline", "commit": "trtllm-pipeline commit"}
_HARDWARE: Final = ("cpu", "cores", "memory_gib", "gpus")
"""Fields of the manifest's system other than versions."""


def statement_of(folder: Path, *, sha256: Mapping[str, str] | None = None, anonymous: bool = False) -> dict[str, Json]:
    """Return the statement of the artifact in `folder`, with the SHA-256 of its files if given by path.

    With `anonymous` it names neither user nor host. Raises StateError if the manifest or the job has changed.
    """
    sealed = manifest.read(folder)
    job = _job(sealed, folder)
    return {
        "_type": TYPE,
        "subject": [*subjects(sealed, sha256 or {})],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": external_parameters(sealed),
                "internalParameters": _internal_parameters(sealed, job, anonymous=anonymous),
                "resolvedDependencies": [*_dependencies(sealed, job)],
            },
            "runDetails": {
                "builder": _builder(sealed),
                "metadata": metadata(sealed),
                "byproducts": [
                    {"name": entry.path, "digest": {"blake3": entry.digest}} for entry in sealed.records if entry.digest
                ],
            },
        },
    }


def subjects(sealed: Manifest, sha256: Mapping[str, str]) -> list[dict[str, Json]]:
    """Return all files as one subject, then each file. The content of a link is its target's text."""
    entries: list[dict[str, Json]] = [{"name": ALL_FILES, "digest": {"dirHashBlake3": sealed.tree}}]
    for entry in sealed.files:
        digest: dict[str, Json] = {"blake3": manifest.content_digest(entry)}
        if entry.path in sha256:
            digest["sha256"] = sha256[entry.path]
        link: dict[str, Json] = {} if entry.link is None else {"annotations": {"link": entry.link}}
        entries.append({"name": entry.path, "digest": digest, **link})
    return entries


def external_parameters(sealed: Manifest) -> dict[str, Json]:
    """Return all parameters that the stage run's result depends on."""
    return {"fingerprint": sealed.fingerprint, "key": json.loads(sealed.key)}


def metadata(sealed: Manifest) -> dict[str, Json]:
    """Return the run, attempt and times."""
    about = sealed.provenance
    finished_s = sealed.seconds("finished_s", 0.0)
    return {
        "invocationId": f"{about.get('run')}/{sealed.stage}-{sealed.fingerprint[:12]}/{about.get('attempt')}",
        "startedOn": _time(finished_s - sealed.seconds("duration_s", 0.0)),
        "finishedOn": _time(finished_s),
    }


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _job(sealed: Manifest, folder: Path) -> dict[str, Any]:
    """Return the job. Empty if `store repair` has set it aside."""
    entry = next((entry for entry in sealed.records if entry.path == JOB), None)
    if entry is None:
        return {}
    try:
        sound = digest_file(folder / JOB) == entry.digest
    except OSError:
        sound = False
    job = read_object(folder / JOB) if sound else None
    if job is None:
        raise StateError(
            f"{folder / JOB}: is not the job that made this artifact",
            hint="`pipeline store verify` shows the changes; `pipeline store repair` sets it aside",
        )
    return job


def _internal_parameters(sealed: Manifest, job: Mapping[str, Any], *, anonymous: bool) -> dict[str, Json]:
    key = json.loads(sealed.key)
    about = sealed.provenance
    system = about.get("system")
    parameters: dict[str, Json] = {}
    if job:
        given = job.get("params") or {}
        runtime = {
            name: value for name, value in given.items() if name not in key.get("params", {}) and value is not None
        }
        parameters = {name: job.get(name) for name in ("commands", "environment", "timeout_s", "gpus")}
        parameters = _without_places({**parameters, "runtime": runtime}, job)
    parameters |= {name: about[name] for name in ("cpu_s", "max_rss_bytes") if name in about}
    if isinstance(system, dict):
        parameters["system"] = {name: system[name] for name in _HARDWARE if name in system}
    if "made_by" in about and not anonymous:
        parameters["made_by"] = about["made_by"]
    return parameters


def _without_places(value: Any, job: Mapping[str, Any]) -> Any:
    """`value` with names for this machine's directories, which mean nothing elsewhere and reveal user names."""
    attempt = str(job.get("attempt", ""))
    workspace = os.path.dirname(os.path.dirname(attempt))
    places = {attempt: "{attempt}", workspace: "{workspace}", str(Path.home()): "~"}
    patterns = {re.escape(place): name for place, name in places.items() if len(place) > 1}
    patterns[r"/root|/home/[^/:,\s]+"] = "~"  # the builder's home directory, if another user reads it

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: replaced(each) for name, each in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        if isinstance(value, str):
            for pattern, name in patterns.items():
                value = re.sub(rf"(?<![\w./-])(?:{pattern})(?=[/:,]|$)", name, value)
        return value

    return replaced(value)


def _dependencies(sealed: Manifest, job: Mapping[str, Any]) -> Iterator[Json]:
    """Yield inputs by fingerprint (and digest if recorded), files of the user, and the source of a model.

    The source of a model that is identified by its content is only in the job.
    """
    key = json.loads(sealed.key)
    digests = sealed.provenance.get("inputs")
    digests = digests if isinstance(digests, dict) else {}
    for name, fingerprint in manifest.inputs(sealed).items():
        dependency: dict[str, Json] = {"name": f"inputs/{name}", "uri": f"trtllm-pipeline:stage-run/{fingerprint}"}
        yield {**dependency, "digest": {"dirHashBlake3": digests[name]}} if name in digests else dependency
    for name, digest in key.get("files", {}).items():
        yield {"name": f"files/{name}", "digest": {"blake3": digest}}
    source = key.get("params", {}).get("source") or (job.get("params") or {}).get("source")
    if isinstance(source, dict):
        yield from _source(source)


def _source(source: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the pinned source of a downloaded model. Package URLs are https://github.com/package-url/purl-spec."""
    revision = str(source.get("revision", ""))
    commit: dict[str, Json] = {"digest": {"gitCommit": revision}} if _COMMIT.fullmatch(revision) else {}
    if "hugging_face" in source:
        yield {"name": "model", "uri": f"pkg:huggingface/{source['hugging_face']}@{revision}", **commit}
    elif "modelscope" in source:
        yield {"name": "model", "uri": f"git+https://www.modelscope.cn/{source['modelscope']}.git@{revision}", **commit}
    elif "package_index" in source:
        name, _, version = str(source["package_index"]).partition("==")
        member = {"annotations": {"member": source["member"]}} if "member" in source else {}
        digest = {"digest": {"sha256": source["sha256"]}} if "sha256" in source else {}
        yield {"name": "model", "uri": f"pkg:pypi/{name}@{version}", **digest, **member}


def _builder(sealed: Manifest) -> dict[str, Json]:
    """Return the release that built it, and the versions of its tools."""
    system = sealed.provenance.get("system")
    versions = system if isinstance(system, dict) else {}
    version = {
        _VERSIONS.get(name, name): str(value) for name, value in versions.items() if value and name not in _HARDWARE
    }
    return {"id": f"pkg:generic/trtllm-pipeline@{versions.get('pipeline') or 'unknown'}", "version": {**version}}
