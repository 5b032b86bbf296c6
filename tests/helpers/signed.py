"""Artifacts that were never built, and keys to sign them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tests.helpers.fabricated import recorded
from trtllm_pipeline.base.fingerprints import canonical, fingerprint
from trtllm_pipeline.orchestrate.provenance import SigningKey
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt.stage.base import JOB


def key_text(name: str) -> str:
    return canonical(
        {
            "schema": 1,
            "stage": "build",
            "version": 1,
            "params": {"name": name, "max_batch_size": 4},
            "inputs": {"checkpoint": "0" * 32},
            "files": {"rows": "c" * 64},
        }
    )


def publish(store: Store, name: str = "a", files: dict[str, str] | None = None, **about: Any) -> Artifact:
    attempt = store.begin("run", "build", fingerprint(key_text(name)))
    for path, text in (files or {"config.json": "{}", "deep/weights": name}).items():
        file = attempt.out / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    job = {
        "commands": [
            ["trtllm-build", "--output_dir", str(attempt.out), "--checkpoint_dir", f"{store.artifacts_dir}/x"]
        ],
        "environment": {"HOME_OF": "/home/ann/models"},
        "params": {"name": name, "max_batch_size": 4, "workers": 2},
        "attempt": str(attempt.folder),
        "timeout_s": 60.0,
        "gpus": ["GPU-1"],
    }
    (attempt.folder / JOB).write_text(json.dumps(job))
    attempt.log.write_text("said\n")
    system = {"cpu": "x", "cores": 2, "gpus": ["NVIDIA H100, 80 GiB"], "driver": "570", "tensorrt_llm": None}
    known = {"run": "r", "attempt": 1, "finished_s": 1e9, "duration_s": 0.5, "system": {**system, "pipeline": "0.1.0"}}
    return recorded(store, attempt, key_text(name), "build/toy/m/fp16", {**known, **about})


def write_key(folder: Path, name: str, key: Any = None, passphrase: bytes | None = None) -> Path:
    """A private key beside `trusted/NAME.pem`, its public half."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    secret = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    path = folder / f"{name}.key"
    path.touch(0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    (folder / "trusted").mkdir(exist_ok=True)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "trusted" / f"{name}.pem").write_bytes(public)
    return path


def read_key(path: Path) -> SigningKey:
    return SigningKey.read(path, lambda: pytest.fail("no passphrase is needed"))
