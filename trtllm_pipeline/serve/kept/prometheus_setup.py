"""Files for Prometheus and Grafana to watch the managed servers of a workspace.

`write_targets` keeps `WORKSPACE/serve/prometheus.json` up to date, a list of scrape targets that Prometheus rereads
when it changes (`file_sd`). `write` creates a directory with everything else: scrape configuration, alert rules,
dashboard.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import reading, write_json, writing
from trtllm_pipeline.serve.kept.servers import FOLDER, KeptServer, State, find, metrics_urls

DASHBOARD: Final = PACKAGE / "data" / "dashboard.json"
"""For Grafana 11 and later. Its queries use variables for data source, server, instance and model."""
_ALERTS: Final = PACKAGE / "data" / "alerts.yml"
TARGETS_FILE: Final = "prometheus.json"
JOB: Final = "pipeline"
SCRAPE_S: Final = 5
REFRESH_S: Final = 30
"""Interval at which Prometheus rereads the targets' file without file system events."""


def write_targets(workspace: Path) -> None:
    """Update the list of scrape targets. Call it after a server was started, restarted or removed.

    A dead server keeps its targets until it is restarted or removed, so that alerts report it.
    """
    folder = workspace / FOLDER
    if not folder.is_dir():
        return
    with _alone(folder):
        file = folder / TARGETS_FILE
        before = _before(file)
        targets: list[dict[str, Any]] = []
        for server in find(workspace):
            now = {target["labels"]["part"]: target for target in _targets(server)}
            if server.state is State.READY:
                targets += now.values()
            elif server.state is not State.STOPPED:
                targets += {**before.get(server.name, {}), **now}.values()
        if targets:
            write_json(file, targets)
        else:
            file.unlink(missing_ok=True)  # Prometheus treats it as an empty list


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Serializes keepers: each sees the targets written before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _before(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Existing targets by server and part. Empty if the file is missing or damaged."""
    targets: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        for target in json.loads(reading.read_bytes(file)):
            labels = target["labels"]
            targets.setdefault(labels["server"], {})[labels["part"]] = target
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return targets


def _targets(server: KeptServer) -> list[dict[str, Any]]:
    cell = {} if server.cell is None else {"cell": server.cell}
    return [
        {
            "targets": [parts.netloc],
            "labels": {
                "server": server.name,
                "part": part,
                **cell,
                **({} if parts.path == "/metrics" else {"__metrics_path__": parts.path}),
            },
        }
        for part, parts in ((part, urlsplit(url)) for part, url in metrics_urls(server.folder).items())
    ]


def prometheus_config(workspace: Path) -> dict[str, Any]:
    file = workspace.absolute() / FOLDER / TARGETS_FILE
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{3 * SCRAPE_S}s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": JOB, "file_sd_configs": [{"files": [str(file)], "refresh_interval": f"{REFRESH_S}s"}]}
        ],
    }


def alert_rules(ttft_p99_s: float = 2.0) -> Any:
    import yaml

    return yaml.safe_load(_ALERTS.read_text(encoding="utf-8").replace("TTFT_P99_S", f"{ttft_p99_s:g}"))


def grafana_files(folder: Path, prometheus_url: str) -> dict[str, Mapping[str, Any]]:
    """Grafana's provisioning files for the data source and the dashboard, by path."""
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": True,
        "jsonData": {"timeInterval": f"{SCRAPE_S}s"},
    }
    provider = {"name": JOB, "type": "file", "options": {"path": str(folder.absolute() / "grafana" / "dashboards")}}
    return {
        "grafana/provisioning/datasources/prometheus.yml": {"apiVersion": 1, "datasources": [source]},
        "grafana/provisioning/dashboards/pipeline.yml": {"apiVersion": 1, "providers": [provider]},
    }


def write(folder: Path, workspace: Path, *, prometheus_url: str, ttft_p99_s: float) -> list[str]:
    """Write everything into `folder`. Returns the relative paths of the files."""
    import yaml

    write_targets(workspace)
    files = {
        "prometheus.yml": prometheus_config(workspace),
        "alerts.yml": alert_rules(ttft_p99_s),
        **grafana_files(folder, prometheus_url),
    }
    board = "grafana/dashboards/pipeline.json"
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        writing.write_lines(path, (yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True).rstrip(),))
    (folder / board).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(DASHBOARD, folder / board)
    return [*files, board]
