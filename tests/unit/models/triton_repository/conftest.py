from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.broken_repositories import Case, copy, write_good


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def case(good: Path, tmp_path: Path) -> Case:
    """A good repository that a test may break."""
    return copy(good, tmp_path / "case")
