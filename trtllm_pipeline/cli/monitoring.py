"""`pipeline serve monitoring` and `pipeline serve top`: what running servers do, over time and now."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, emit_rendered, note, rendered


def monitoring(
    output_dir: Annotated[str, options.option("--output-dir", "DIR", "New or empty folder for the files.")],
    prometheus_url: Annotated[
        str, options.option("--prometheus-url", "URL", "Where Grafana will find Prometheus.")
    ] = "http://127.0.0.1:9090",
    ttft_p99_s: Annotated[
        float,
        options.option(
            "--ttft-p99-s", "SECONDS", "Alert when the 99th percentile of the time to first token is over this."
        ),
    ] = 2.0,
    workspace: options.Workspace = options.WORKSPACE,
) -> None:
    """Write what Prometheus and Grafana need to watch the kept servers: targets, alert rules, a dashboard.

    The targets follow the servers as they come and go; the files are written once for a workspace.

    examples:
      pipeline serve monitoring --output-dir monitoring
      prometheus --config.file monitoring/prometheus.yml --web.listen-address 127.0.0.1:9090
    """
    from trtllm_pipeline.hosting.monitoring import write

    options.positive("--ttft-p99-s", ttft_p99_s)
    folder = options.empty_folder(output_dir)
    written = write(folder, Path(workspace), prometheus_url=prometheus_url, ttft_p99_s=ttft_p99_s)
    emit("\n".join(str(folder / name) for name in written))
    note(f"next: prometheus --config.file {shlex.quote(str(folder / 'prometheus.yml'))}")


def top(
    urls: Annotated[
        list[str] | None,
        options.option(
            "-u --url",
            "URL",
            "Watch a metrics page instead of the kept servers: HOST:PORT or http(s)://HOST:PORT/PATH; can be given "
            "several times.",
        ),
    ] = None,
    once: Annotated[bool, options.switch("--once", "Print one sample and end.")] = False,
    interval_s: Annotated[float, options.option("--interval-s", "SECONDS", "Time between two samples.")] = 1.0,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Show live what servers do: requests, tokens, time to first token, queue, KV cache, GPUs.

    It shows the kept servers of a workspace, with rates and percentiles of the last 10 s; q ends it. JSON is one sample, and
    so is text where stdout is no terminal.

    examples:
      pipeline serve top
      pipeline serve top --once --format json
      pipeline serve top --url localhost:8002
    """
    from trtllm_pipeline.hosting import top

    options.positive("--interval-s", interval_s)
    folder, given = Path(workspace), urls or ()
    if format == "json":
        emit_json(top.once(folder, given, interval_s=interval_s).to_json())
    elif once or not sys.stdout.isatty():
        sample = top.once(folder, given, interval_s=interval_s)
        emit_rendered(rendered(top.TopPicture(sample)))
    else:
        top.live(folder, given, interval_s=interval_s)
