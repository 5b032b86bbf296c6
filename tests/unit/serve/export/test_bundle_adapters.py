"""LoRA adapters in a bundle: what a client sends of them, and how the card says to ask for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.helpers.adapters import random_pairs, write_adapter
from tests.helpers.broken_repositories import write_engine
from tests.helpers.deployments import deployment
from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus
from trtllm_pipeline.orchestrate.served_cell import ServedCell
from trtllm_pipeline.serve.export import bundle, card, manifests
from trtllm_pipeline.serve.export.deployment import Deployment

NAMED = {"sql": "./sql", "chat": "./chat"}


def with_adapters(kind: str, adapter: object) -> Deployment:
    served: Any = deployment(kind).served
    cell = SimpleNamespace(**{**vars(served.cell), "ep": 1, "dp": 1, "settings": {"lora": {"adapter": adapter}}})
    built = {"launch": SimpleNamespace(inputs={}), "artifacts": {}}
    result = CellResult(CellId(cell.id), {}, CellStatus.DONE)
    return deployment(
        kind, served=cast("ServedCell", SimpleNamespace(**{**vars(served), **built, "cell": cell})), result=result
    )


def test_beside_each_adapter_of_an_engine_is_what_a_client_sends(tmp_path: Path) -> None:
    write_engine(tmp_path / "engine", "1.2.0")
    for place, rank in (("adapter", 2), ("adapter2", 4)):
        write_adapter(tmp_path / place, random_pairs({"q_proj": (16, 16)}, rank=rank))
    bundle.write_tensors(with_adapters("engine", NAMED), tmp_path)
    shapes = {path.parent.name: np.load(path).shape for path in tmp_path.glob("*/model.lora_weights.npy")}
    assert shapes == {"adapter": (1, 2, 2 * 32), "adapter2": (1, 2, 4 * 32)}
    assert np.load(tmp_path / "adapter2" / "model.lora_config.npy").tolist() == [[[1, 0, 4], [1, 1, 4]]]


@pytest.mark.parametrize("kind", ["llmapi", "trtllm_serve"])
def test_other_servers_read_the_folder_themselves(tmp_path: Path, kind: str) -> None:
    write_adapter(tmp_path / "adapter", random_pairs({"q_proj": (16, 16)}, rank=2))
    bundle.write_tensors(with_adapters(kind, "./sql"), tmp_path)
    assert not [*tmp_path.rglob("*.npy")]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("engine", '| chat | `adapter2/` | `"lora_task_id": 2` |'),
        ("llmapi", '| chat | `adapter2/` | `"lora_id": 2, "lora_name": "chat", "lora_path": "PATH/adapter2"` |'),
        (
            "trtllm_serve",
            '| chat | `adapter2/` | `"lora_request": {"lora_name": "chat", "lora_int_id": 2, "lora_path": "PATH/adapter2"}` |',
        ),
    ],
)
def test_the_card_says_how_a_request_asks_for_each(kind: str, row: str) -> None:
    assert row in card.text(with_adapters(kind, NAMED)).splitlines()
    assert "LoRA" not in card.text(with_adapters(kind, None))


def test_a_gateway_in_front_offers_each_from_the_bundle() -> None:
    (model,) = manifests.gateway_config(with_adapters("engine", NAMED), "triton").models
    assert model.adapters == {"sql": Path("/models/adapter"), "chat": Path("/models/adapter2")}
    with_gateway = replace(with_adapters("engine", NAMED), openai=True)
    assert "`MODEL:ADAPTER`" in card.text(with_gateway)
