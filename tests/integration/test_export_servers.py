"""Exports of a report, received by the real program that they are for: Prometheus' Pushgateway."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fabricated_run import HOSTILE, run
from tests.helpers.launched import responds
from tests.helpers.waiting import eventually
from trtllm_pipeline.show.report.openmetrics import to_openmetrics
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports


@contextmanager
def serving(command: Sequence[str], option: str, ready: str, **options: Any) -> Iterator[str]:
    """HOST:PORT of a program that is told by `option` where to listen, once it answers at the path `ready`."""
    (port,) = unused_ports(1)
    process = subprocess.Popen([*command, option.format(port=port)], start_new_session=True, **options)
    address = f"127.0.0.1:{port}"
    try:
        assert eventually(lambda: process.poll() is not None or responds(f"http://{address}{ready}"))
        assert process.poll() is None, f"{command[0]} ended"
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(120)


@pytest.mark.programs("prometheus-pushgateway")
@pytest.mark.parametrize("hostile", [False, True])
def test_a_push_gateway_keeps_what_is_pushed(hostile: bool, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = to_openmetrics(run(3, hostile=hostile)[0], "run-1")
    with serving(["prometheus-pushgateway"], "--web.listen-address=127.0.0.1:{port}", "/-/ready") as address:
        url = f"http://{address}/metrics/job/nightly"
        pushed = urllib.request.Request(url, text.encode(), method="POST")
        assert urllib.request.urlopen(pushed, timeout=60).status == 200
        page = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()

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
