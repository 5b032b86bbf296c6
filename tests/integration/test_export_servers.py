"""Exports of a report, received by the real programs that they are for: Prometheus' Pushgateway and MLflow's server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import needed
from tests.helpers.fabricated_run import HOSTILE, run
from trtllm_pipeline.report import tracking
from trtllm_pipeline.report.openmetrics import to_openmetrics

pytestmark = pytest.mark.integration
MLFLOW_SERVER = os.environ.get("MLFLOW_SERVER")
"""The `mlflow` of an environment with the whole package, whose server the extra [mlflow] does without."""


@contextmanager
def serving(command: Sequence[str], option: str, ready: str, timeout_s: float, **options: Any) -> Iterator[str]:
    """HOST:PORT of a program that is told by `option` where to listen, once it answers at the path `ready`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, option.format(port=port)], start_new_session=True, **options)
    address, deadline = f"127.0.0.1:{port}", time.monotonic() + timeout_s
    try:
        while True:
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"http://{address}{ready}", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, f"{command[0]} does not answer"
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(120)


@needed.programs("prometheus-pushgateway")
@pytest.mark.parametrize("hostile", [False, True])
def test_a_push_gateway_keeps_what_is_pushed(hostile: bool, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = to_openmetrics(run(3, hostile=hostile)[0], "run-1")
    with serving(["prometheus-pushgateway"], "--web.listen-address=127.0.0.1:{port}", "/-/ready", 30) as address:
        url = f"http://{address}/metrics/job/nightly"
        pushed = urllib.request.Request(url, text.encode(), method="POST")
        assert urllib.request.urlopen(pushed, timeout=10).status == 200
        page = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()

    def samples(page: str) -> dict[tuple[str, ...], float]:
        return {
            (
                sample.name,
                *sorted(f"{name}={value}" for name, value in sample.labels.items() if name not in GIVEN),
            ): sample.value
            for family in parser.text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith("pipeline_cell_")
        }

    kept = samples(page)
    assert kept == samples(text)
    assert len(kept) > 50
    assert any(f"model={HOSTILE}" in name for name in kept) == hostile


GIVEN = frozenset({"job", "instance"})
"""Labels that the gateway adds."""


@pytest.mark.slow
@pytest.mark.skipif(MLFLOW_SERVER is None, reason="MLFLOW_SERVER names no mlflow with a server")
def test_a_server_of_mlflow_shows_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    assert MLFLOW_SERVER is not None
    store = [f"--backend-store-uri=sqlite:///{tmp_path}/mlflow.db", f"--artifacts-destination={tmp_path}/artifacts"]
    command = [MLFLOW_SERVER, "server", "--host=127.0.0.1", "--workers=1", *store]
    rows = run(3)[0]
    with serving(command, "--port={port}", "/health", 180, cwd=tmp_path) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}")
        results: Any = SimpleNamespace(rows=rows, matrix="my.yaml", runs=SimpleNamespace(newest=tmp_path / "run-1"))
        assert tracking.track("mlflow", results, None) == f"3 cells logged: http://{address}"
        client = mlflow.MlflowClient(f"http://{address}")
        experiment = client.get_experiment_by_name("my")
        runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
        assert set(runs) == {row.id for row in rows}
        assert {each.info.status for each in runs.values()} == {"FINISHED"}
        one = runs[rows[1].id]
        told = client.get_metric_history(one.info.run_id, "output_tokens_per_s")
        assert {each.step: each.value for each in told} == {
            level.concurrency: level.output_tokens_per_s for level in rows[1].levels
        }
    assert not (tmp_path / "run-1").exists(), "nothing is written as files where there is a server"
