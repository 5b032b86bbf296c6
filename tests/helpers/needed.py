"""Packages that only some environments have."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def quantize_package(name: str) -> Any:
    """A module of the extra [quantize]. Skips the test file without it; where CI_QUANTIZE is set, that is an error."""
    if os.environ.get("CI_QUANTIZE"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason="part of the extra [quantize]")
