"""Packages and programs that only some machines have, and the reasons for which tests are skipped without them.

A test that needs a program carries the marker `programs`, or calls `program` if only some of its cases need it.
"""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any, Final

import pytest

PROGRAMS: Final = {
    "chromium": "chromium",
    "docker-compose": "docker-compose",
    "git": "git",
    "kubectl": "kubernetes-client",
    "mkfs.ext4": "e2fsprogs",
    "mpirun": "openmpi-bin",
    "munged": "munge",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "prometheus-pushgateway": "prometheus-pushgateway",
    "promtool": "prometheus",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "systemd-analyze": "systemd",
}
"""Program -> its package in Debian and Ubuntu."""
_OTHER_NAMES: Final = {"chromium": ("chromium-browser", "google-chrome", "google-chrome-stable")}


def program(name: str) -> str:
    """Path of a program in PROGRAMS. Skips the test without it."""
    if reason := missing(name):
        pytest.skip(reason)
    return str(_find(name))


def missing(name: str) -> str | None:
    """Why a test is skipped; `.ci/run` recognizes these words."""
    return None if _find(name) else f"needs the program {name}: apt install {PROGRAMS[name]}"


def _find(name: str) -> str | None:
    return next((path for each in (name, *_OTHER_NAMES.get(name, ())) if (path := shutil.which(each))), None)


def quantize_package(name: str) -> Any:
    """A module of the extra [quantize]. Skips the test file without it; where CI_QUANTIZE is set, that is an error."""
    if os.environ.get("CI_QUANTIZE"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason="part of the extra [quantize]")
