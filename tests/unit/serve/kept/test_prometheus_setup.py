from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_pipeline.serve.kept import prometheus_setup
from trtllm_pipeline.serve.kept.servers import Keeper, KeptRecord, State

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "metrics.md"
TRITON = {
    "http": "127.0.0.1:8000",
    "grpc": "127.0.0.1:8001",
    "metrics": "127.0.0.1:8002",
    "pid": 1,
    "model": "ensemble",
}


def keep(workspace: Path, name: str, state: str, service: dict[str, Any] | None, gateway: str | None = None) -> Path:
    """A managed server, as its files say."""
    folder = workspace / "serve" / name
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {
        "toolchain": "embedded",
        "model": "tiny",
        "cell": "tiny/int8",
        "gateway": gateway is not None,
    }
    KeptRecord(**about, state=State(state), since_s=0.0, started_s=0.0, keeper=Keeper.here()).write(folder)
    for file, content in (("service.json", service), ("gateway.json", gateway and {"url": gateway})):
        (folder / file).unlink(missing_ok=True)
        if content:
            (folder / file).write_text(json.dumps(content))
    return folder


def targets(workspace: Path) -> list[dict[str, Any]]:
    prometheus_setup.write_targets(workspace)
    file = workspace / "serve" / "prometheus.json"
    return json.loads(file.read_bytes()) if file.exists() else []


def test_a_server_and_its_gateway_are_targets(tmp_path: Path) -> None:
    keep(tmp_path, "one", "ready", TRITON, "http://127.0.0.1:9000")
    assert targets(tmp_path) == [
        {"targets": ["127.0.0.1:9000"], "labels": {"server": "one", "part": "gateway", "cell": "tiny/int8"}},
        {"targets": ["127.0.0.1:8002"], "labels": {"server": "one", "part": "triton", "cell": "tiny/int8"}},
    ]


def test_the_openai_front_end_of_triton_has_the_metrics_of_triton(tmp_path: Path) -> None:
    about = {"kind": "openai", "url": "http://127.0.0.1:8000", "metrics": "127.0.0.1:8000"}
    keep(tmp_path, "one", "ready", {**TRITON, **about})
    (one,) = targets(tmp_path)
    assert (one["targets"], one["labels"]["part"]) == (["127.0.0.1:8000"], "triton")


def test_trtllm_serve_is_scraped_where_it_has_text(tmp_path: Path) -> None:
    keep(tmp_path, "one", "ready", {**TRITON, "kind": "openai", "url": "http://127.0.0.1:8000", "metrics": None})
    assert targets(tmp_path) == [
        {
            "targets": ["127.0.0.1:8000"],
            "labels": {
                "server": "one",
                "part": "trtllm-serve",
                "cell": "tiny/int8",
                "__metrics_path__": "/prometheus/metrics",
            },
        }
    ]


def test_a_server_that_died_stays_a_target_and_one_that_was_stopped_does_not(tmp_path: Path) -> None:
    for name in ("dies", "stops"):
        keep(tmp_path, name, "ready", TRITON)
    assert [each["labels"]["server"] for each in targets(tmp_path)] == ["dies", "stops"]
    keep(tmp_path, "dies", "failed", None)
    keep(tmp_path, "stops", "stopped", None)
    assert [each["labels"]["server"] for each in targets(tmp_path)] == ["dies"]


def test_what_is_started_again_stays_a_target_meanwhile(tmp_path: Path) -> None:
    keep(tmp_path, "one", "ready", TRITON, "http://127.0.0.1:9000")
    before = targets(tmp_path)
    for service, gateway in ((TRITON, None), (None, "http://127.0.0.1:9000"), (None, None)):
        keep(tmp_path, "one", "restarting", service, gateway)
        assert sorted(targets(tmp_path), key=str) == sorted(before, key=str)


def test_a_server_that_never_answered_is_no_target(tmp_path: Path) -> None:
    keep(tmp_path, "one", "starting", None)
    assert targets(tmp_path) == []


@pytest.mark.parametrize("damage", ["", "{", "[1]", '[{"labels": {}}]', '{"a": 1}'])
def test_a_damaged_file_is_written_anew(tmp_path: Path, damage: str) -> None:
    keep(tmp_path, "one", "failed", None)
    (tmp_path / "serve" / "prometheus.json").write_text(damage)
    assert targets(tmp_path) == []


def test_everything_is_written_and_refers_to_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "monitoring"
    names = prometheus_setup.write(folder, tmp_path, prometheus_url="http://127.0.0.1:9090", ttft_p99_s=0.5)
    assert sorted(names) == sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert [(folder / each).exists() for each in config["rule_files"]] == [True]
    files = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert files == [str(tmp_path / "serve" / "prometheus.json")]
    provider = yaml.safe_load((folder / "grafana/provisioning/dashboards/pipeline.yml").read_text())["providers"][0]
    assert [each.name for each in Path(provider["options"]["path"]).iterdir()] == ["pipeline.json"]
    assert " > 0.5\n" in (folder / "alerts.yml").read_text()


def test_every_metric_of_dashboard_and_alerts_is_documented() -> None:
    rules = prometheus_setup.alert_rules()["groups"][0]["rules"]
    panels = json.loads(prometheus_setup.DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    names = {
        re.sub(r"_bucket$", "", name)
        for expression in (*expressions, *(rule["expr"] for rule in rules))
        for name in re.findall(r"\b(?:pipeline_gateway|nv|trtllm|process)_\w+", expression)
    }
    document = DOCUMENT.read_text()
    assert sorted(name for name in names if f"`{name}`" not in document) == []
    assert sorted(rule["alert"] for rule in rules if f"`{rule['alert']}`" not in document) == []


def test_variables_of_the_dashboard_are_those_that_its_queries_use() -> None:
    board = json.loads(prometheus_setup.DASHBOARD.read_text())
    used = set(re.findall(r"\$(\w+)", json.dumps(board["panels"]).replace("${datasource}", "$datasource")))
    assert used == {each["name"] for each in board["templating"]["list"]} | {"__rate_interval"}
