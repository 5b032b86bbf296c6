"""What holds for all tests."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.helpers import needed, waiting

TESTS = Path(__file__).parent
INTEGRATION, UNIT = TESTS / "integration", TESTS / "unit"
LONGEST = (
    *("test_serve", "test_trtllm_backends", "test_pipeline", "test_report_html", "test_doctor_deep", "test_slurm"),
    *("test_first_hour", "test_openai_lanes", "test_json_schemas", "test_export", "test_remote_commands"),
    *("test_nightly", "test_read_only", "test_triton_service", "test_trtllm_repository", "test_diagnosis"),
)
"""Files that take a minute and more, the longest first."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Apply the tiers. Thorough are integration tests without the marker `seam`, and those that need optional programs,
    but for the sweeps of .ci/nightly.
    """
    programs = item.get_closest_marker("programs")
    if not item.get_closest_marker("nightly") and (
        programs or (INTEGRATION in item.path.parents and not item.get_closest_marker("seam"))
    ):
        item.add_marker(pytest.mark.thorough)
    for name in programs.args if programs else ():
        reason = needed.missing(name)
        item.add_marker(pytest.mark.skipif(reason is not None, reason=str(reason)))
    if UNIT not in item.path.parents and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(900))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files. In alphabetical order, one worker would go on alone with them in the end."""
    place = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let conditions take their time, within pytest's own limit of the test."""
    waiting.patience_s = 50.0 if UNIT in item.path.parents else 240.0


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integration tests do not fail because this machine is busy. tests/patient does the same in other processes."""
    if INTEGRATION in request.path.parents:
        from trtllm_pipeline.measure.load import validity

        monkeypatch.setattr(validity, "MAX_LAG_MS", math.inf)


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are processors: about half of its time, a test waits for what it started."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Let tests send signals, to themselves and to what they start, however the test run itself was started.

    In the background of a script SIGINT is ignored, under nohup SIGHUP; both are inherited. No example has to be quick:
    other programs use the machine as well. The tests' own leases on the machine: they do not wait for another run of
    this user that measures, nor it for them.
    """
    if not hasattr(config, "workerinput"):  # the workers inherit it
        leases = TemporaryDirectory(prefix="pipeline-tests-")
        config.add_cleanup(leases.cleanup)
        os.environ["XDG_RUNTIME_DIR"] = leases.name
        paths = (str(TESTS / "patient"), os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        # Threads of numpy's BLAS wait actively for each other: on a busy machine small products take ten times as long.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("untimed", deadline=None)
        settings.load_profile("untimed")
