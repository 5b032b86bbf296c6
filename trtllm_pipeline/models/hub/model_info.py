"""Hugging Face's API response for a model, in strict types: its content is untrusted."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class _Listed(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Lfs(_Listed):
    sha256: str


class _Sibling(_Listed):
    rfilename: str
    size: Annotated[int, Field(ge=0)] | None = None
    blob_id: Annotated[str | None, Field(alias="blobId")] = None
    lfs: _Lfs | None = None


class ModelInfo(_Listed):
    """A hub's description of a model. Other keys are ignored."""

    sha: str | None = None
    gated: bool | str = False
    siblings: list[_Sibling] = []
