"""`pipeline serve monitoring`: Prometheus and Grafana files for the managed servers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, note


def monitoring(
    output_dir: Annotated[str, options.option("--output-dir", "DIR", "New or empty directory for the files.")],
    prometheus_url: Annotated[
        str, options.option("--prometheus-url", "URL", "Prometheus URL for Grafana.")
    ] = "http://127.0.0.1:9090",
    ttft_p99_s: Annotated[
        float, options.duration("--ttft-p99-s", "Alert if the 99th percentile of the time to first token exceeds this.")
    ] = 2.0,
    workspace: options.Workspace = options.WORKSPACE,
) -> None:
    """Write Prometheus and Grafana files for the managed servers: targets, alert rules, a dashboard.

    The targets update as servers start and stop. Write the files once per workspace.

    examples:
      pipeline serve monitoring --output-dir monitoring
      prometheus --config.file monitoring/prometheus.yml --web.listen-address 127.0.0.1:9090
    """
    from trtllm_pipeline.serve import write

    options.positive("--ttft-p99-s", ttft_p99_s)
    folder = options.empty_folder(output_dir)
    written = write(folder, Path(workspace), prometheus_url=prometheus_url, ttft_p99_s=ttft_p99_s)
    emit("\n".join(str(folder / name) for name in written))
    note(f"next: prometheus --config.file {shlex.quote(str(folder / 'prometheus.yml'))}")
