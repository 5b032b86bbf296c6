"""Deployments of cells that were never built, for tests of what is written for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from trtllm_pipeline.orchestrate.served_cell import ServedCell
from trtllm_pipeline.serve.export import container_images
from trtllm_pipeline.serve.export.deployment import Deployment

KINDS = ("embedded", "engine", "llmapi", "trtllm_serve")


def deployment(kind: str = "engine", gpus: int = 1, **changes: Any) -> Deployment:
    """One of this kind; of the cell only what templates read."""
    cell = SimpleNamespace(
        id="tiny/fp16/tp1pp1/bs4/isl256-osl32",
        model="tiny",
        precision="fp16",
        tp=gpus,
        pp=1,
        max_batch_size=4,
        isl=256,
        osl=32,
        toolchain="embedded" if kind == "embedded" else "tensorrt_llm",
        recipe={"license": "Apache-2.0"},
        settings={"gateway": {}},
    )
    artifact = SimpleNamespace(fingerprint="0123456789abcdef" * 2)
    engine = None if kind in {"llmapi", "trtllm_serve"} else Path("engine")
    served = SimpleNamespace(
        cell=cell,
        engine=engine,
        max_seq_len=288,
        artifacts={"repository": artifact},
        inputs={},
        launch=None,
        drafter=None,
    )
    world_size = 0 if kind == "embedded" else gpus
    release = None if kind == "embedded" else "1.0.0"
    values: dict[str, Any] = {
        "served": cast("ServedCell", served),
        "result": None,
        "name": "tiny-fp16",
        "kind": kind,
        "release": release,
        "image": container_images.CPU
        if release is None
        else container_images.image_for(release, triton=kind != "trtllm_serve"),
        "world_size": world_size,
        "gpus_per_node": 8,
        "gpu": "NVIDIA H100 80GB HBM3" if world_size else None,
        "sm": 90 if world_size else None,
        "load_s": 42.5,
        "bundle_bytes": 3 << 30,
        "memory_bytes": 5 << 30,
        "memory_from": "what was measured",
        "cpus": 6,
        "openai": False,
        "api_keys": True,
        "storage_class": None,
        **changes,
    }
    return Deployment(**values)
