"""Our configuration, alerts and dashboard in a real Prometheus (Debian's package), over pages as servers give them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.helpers import metrics_pages
from trtllm_pipeline.serve.kept import prometheus_setup
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports

pytestmark = [
    pytest.mark.programs("prometheus", "promtool"),
]
PANELS = json.loads(prometheus_setup.DASHBOARD.read_text())["panels"]
STARTS_S = 60.0
TRTLLM_SERVE_PATH = "/prometheus/metrics"
STEPS = 4


def ask(address: str, expression: str, at_s: str = "") -> list[dict[str, object]]:
    """What an instant query gives, now or at a time."""
    query = urllib.parse.urlencode({"query": expression, "time": at_s})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=60) as answer:
        return json.load(answer)["data"]["result"]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a Prometheus that has scraped a gateway, a Triton and a trtllm-serve a few times, and one that is down."""
    workspace, folder = tmp_path_factory.mktemp("workspace"), tmp_path_factory.mktemp("prometheus")
    (workspace / "serve").mkdir()
    prometheus_setup.write(folder, workspace, prometheus_url="http://127.0.0.1:9090", ttft_p99_s=2.0)
    config = (folder / "prometheus.yml").read_text()
    (folder / "prometheus.yml").write_text(config.replace("5s", "500ms"))
    steps, gateway = {name: itertools.count(1) for name in ("triton", "serve")}, metrics_pages.Gateway()

    def gateway_page() -> str:
        gateway.step()
        return gateway.page()

    pages = {
        "/gateway": gateway_page,
        "/triton": lambda: metrics_pages.triton(next(steps["triton"])),
        TRTLLM_SERVE_PATH: lambda: metrics_pages.trtllm_serve(next(steps["serve"])),
    }
    address = f"127.0.0.1:{unused_ports(1)[0]}"
    with metrics_pages.served(pages) as host:
        labels = {"/gateway": "gateway", "/triton": "triton", TRTLLM_SERVE_PATH: "trtllm-serve"}
        targets = [
            {"targets": [host], "labels": {"server": "one", "part": part, "__metrics_path__": path}}
            for path, part in labels.items()
        ]
        gone = {"targets": ["127.0.0.1:1"], "labels": {"server": "gone", "part": "triton"}}
        command = ["prometheus", "--config.file", str(folder / "prometheus.yml"), "--web.listen-address", address]
        process = subprocess.Popen(
            [*command, "--storage.tsdb.path", str(folder / "data"), "--log.level", "error"],
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        # A running Prometheus sees the targets come, by itself.
        (workspace / "serve" / "prometheus.json").write_text(json.dumps([*targets, gone]))
        try:
            deadline = time.monotonic() + STARTS_S
            while True:
                try:
                    found = ask(address, "count_over_time(up[1m])")
                except OSError:
                    found = []
                if len(found) == 4 and all(int(each["value"][1]) >= STEPS for each in found):  # type: ignore[index]
                    break
                assert process.poll() is None
                assert time.monotonic() < deadline, found
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize(
    ("expression", "title"),
    [(target["expr"], panel["title"]) for panel in PANELS for target in panel.get("targets", ())],
)
def test_every_query_of_the_dashboard_gives_data(prometheus: str, expression: str, title: str) -> None:
    for variable in ("server", "instance", "model"):
        expression = expression.replace(f"${variable}", ".*")
    found = ask(prometheus, expression.replace("$__rate_interval", "1m"))
    assert found, title
    assert any(each["value"][1] != "NaN" for each in found), title  # type: ignore[index]


def test_what_the_panels_say_is_what_happened(prometheus: str) -> None:
    # All at one time, up to which every target has been scraped: the tokens go on between two queries.
    at_s = str(ask(prometheus, "min(timestamp(up))")[0]["value"][1])  # type: ignore[index]

    def value(title: str) -> float:
        (panel,) = (panel for panel in PANELS if panel["title"] == title)
        expression = panel["targets"][0]["expr"].replace("$__rate_interval", "1m")
        for variable in ("server", "instance", "model"):
            expression = expression.replace(f"${variable}", ".*")
        return float(ask(prometheus, expression, at_s)[0]["value"][1])  # type: ignore[index, arg-type]

    assert value("Servers down") == 1
    assert value("Queued") == 1
    assert value("KV cache in use") == pytest.approx(0.25)
    assert value("Error ratio") == pytest.approx(1 / 6, rel=0.01)  # of a step's six requests one is a 504
    assert value("Output tokens") == pytest.approx(2 * value("Input tokens"), rel=0.01)
    assert value("Batch size") == pytest.approx(2)


def test_promtool_accepts_the_files(tmp_path: Path) -> None:
    (tmp_path / "serve").mkdir()
    prometheus_setup.write(tmp_path / "out", tmp_path, prometheus_url="http://127.0.0.1:9090", ttft_p99_s=2.0)
    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "out" / "prometheus.yml")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "5 rules found" in done.stdout


GATEWAY = 'server="one",model="qwen"'
TTFT = "pipeline_gateway_time_to_first_token_seconds_bucket"
BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
ALERTS: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    # alert -> series that fire it, series that do not, how long that takes
    "PipelineServerDown": (
        {'up{job="pipeline",part="triton",server="one"}': "0x20"},
        {
            'up{job="pipeline",part="triton",server="one"}': "1x20",
            'up{job="pipeline",part="trtllm-serve",server="one"}': "0x20",
        },
        "2m",
    ),
    "PipelineTimeToFirstToken": (
        {f'{TTFT}{{{GATEWAY},le="{bound}"}}': f"0+{grows}x60" for bound, grows in (("2", 0), ("3", 9), ("+Inf", 9))},
        {f'{TTFT}{{{GATEWAY},le="{bound}"}}': f"0+{grows}x60" for bound, grows in (("1", 9), ("2", 9), ("+Inf", 9))},
        "8m",
    ),
    "PipelineErrors": (
        {
            f'pipeline_gateway_requests_total{{{GATEWAY},endpoint="a",status="{status}"}}': f"0+{grows}x60"
            for status, grows in (("200", 9), ("502", 1))
        },
        {
            f'pipeline_gateway_requests_total{{{GATEWAY},endpoint="a",status="{status}"}}': f"0+{grows}x60"
            for status, grows in (("200", 9), ("429", 9), ("499", 9))
        },
        "8m",
    ),
    "PipelineQueueFull": (
        {
            f"pipeline_gateway_requests_queued{{{GATEWAY}}}": "15x20",
            f"pipeline_gateway_requests_queued_limit{{{GATEWAY}}}": "16x20",
        },
        {
            f"pipeline_gateway_requests_queued{{{GATEWAY}}}": "0x20",
            f"pipeline_gateway_requests_queued_limit{{{GATEWAY}}}": "0x20",
        },
        "2m",
    ),
    "PipelineKvCacheFull": (
        {
            f'{BLOCKS}{{server="one",kv_cache_block_type="{kind}"}}': f"{number}x60"
            for kind, number in (("used", 99), ("max", 100))
        },
        {
            f'{BLOCKS}{{server="one",kv_cache_block_type="{kind}"}}': f"{number}x60"
            for kind, number in (("used", 90), ("max", 100))
        },
        "12m",
    ),
}


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    rules = prometheus_setup.alert_rules()
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    assert {rule["alert"] for rule in rules["groups"][0]["rules"]} == set(ALERTS)
    cases = []
    for name, (fires, silent, after) in ALERTS.items():
        labels = {
            "severity": next(
                rule["labels"]["severity"] for rule in rules["groups"][0]["rules"] if rule["alert"] == name
            )
        }
        for series, expected in ((fires, 1), (silent, 0)):
            cases.append(
                {
                    "name": f"{name} {expected}",
                    "interval": "15s",
                    "input_series": [{"series": each, "values": values} for each, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing",severity="{labels["severity"]}"}}) or vector(0)',
                            "eval_time": after,
                            "exp_samples": [{"labels": "{}", "value": expected}],
                        }
                    ],
                }
            )
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": cases}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
