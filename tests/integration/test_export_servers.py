"""Exports of a report, received by the real program that they are for: Prometheus' Pushgateway."""

from __future__ import annotations

import subprocess
import urllib.request

import pytest

from tests.helpers.fabricated_run import HOSTILE, run
from tests.helpers.launched import responds
from tests.helpers.waiting import eventually
from trtllm_pipeline.show.report.openmetrics import to_openmetrics
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports


@pytest.mark.programs("prometheus-pushgateway")
def test_a_push_gateway_keeps_what_is_pushed() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = to_openmetrics(run(3, hostile=True)[0], "run-1")
    address = f"127.0.0.1:{unused_ports(1)[0]}"
    with subprocess.Popen(["prometheus-pushgateway", f"--web.listen-address={address}"]) as process:
        try:
            assert eventually(lambda: process.poll() is not None or responds(f"http://{address}/-/ready"))
            url = f"http://{address}/metrics/job/nightly"
            pushed = urllib.request.Request(url, text.encode(), method="POST")
            assert urllib.request.urlopen(pushed, timeout=60).status == 200
            page = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
        finally:
            process.terminate()

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
    assert any(f"model={HOSTILE}" in name for name in kept)


GIVEN = frozenset({"job", "instance"})
"""Labels that the gateway adds."""
