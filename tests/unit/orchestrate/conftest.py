"""A workspace of its own for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trtllm_pipeline.orchestrate.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "w")
    yield store
    store.close()
