"""Reads a pinned model's configuration before the download to find out how its weights are quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Json
from trtllm_pipeline.models.files.quantization import FILES, QuantizedWeights, quantization

_LONGEST: Final = 1 << 20
"""Size limit of a configuration. Known ones have a few thousand bytes."""


def quantized(pinned: Mapping[str, Json], *, folder: Path | None, offline: bool) -> QuantizedWeights | None:
    """The quantization of a pinned source's weights, and the file that states it. None for unquantized weights.

    Raises DownloadError if the files cannot be read now.
    """
    return quantization({name: configuration(pinned, name, folder=folder, offline=offline) for name in FILES})


def configuration(
    pinned: Mapping[str, Json], name: str, *, folder: Path | None, offline: bool
) -> Mapping[str, Any] | None:
    """The JSON file `name` of a pinned source. None if it is missing or not an object, which the download reports.

    Raises DownloadError if it cannot be read now.
    """
    if "local" in pinned:
        path = None if folder is None else folder / name
        text = path.read_bytes()[:_LONGEST] if path is not None and path.is_file() else None
    elif "hugging_face" in pinned or "modelscope" in pinned:
        text = _fetch(pinned, name, offline=offline)
    else:
        text = None  # from a package or generated: our own converter writes it
    try:
        value = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _fetch(pinned: Mapping[str, Json], name: str, *, offline: bool) -> bytes | None:
    import httpx

    from trtllm_pipeline.models.hub import hub_errors, hugging_face, modelscope

    if "hugging_face" in pinned:
        model, commit = str(pinned["hugging_face"]), str(pinned["revision"])
        if (cached := hugging_face.cached_file(model, commit, name)) is not None:
            return cached.read_bytes()[:_LONGEST]
        if offline or hugging_face.offline_by_environment():
            if hugging_face.cached_folder(model, commit) is not None:
                return None  # the model exists, without this file
            raise hub_errors.offline(hub_errors.HUGGING_FACE, model)
        hub, headers, url = hub_errors.HUGGING_FACE, hugging_face.headers(), hugging_face.file_url(model, commit, name)
    else:
        model = str(pinned["modelscope"])
        if offline:
            raise hub_errors.offline(hub_errors.MODELSCOPE, model)
        listed = {file.path: file.url for file in modelscope.listing(model, str(pinned["revision"]))}
        if name not in listed:
            return None
        hub, headers, url = hub_errors.MODELSCOPE, modelscope.headers(), listed[name]
    try:
        limits = httpx.Timeout(hub_errors.CONNECT_TIMEOUT_S * 3, connect=hub_errors.CONNECT_TIMEOUT_S)
        with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=limits) as response:
            if response.status_code == httpx.codes.NOT_FOUND:
                return None
            if response.status_code != httpx.codes.OK:
                raise hub_errors.refusal(hub, model, response.status_code, response.headers)
            text = b""
            for chunk in response.iter_bytes():
                text += chunk
                if len(text) > _LONGEST:
                    return None
            return text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise hub_errors.unreachable(hub, model, url, error) from error
