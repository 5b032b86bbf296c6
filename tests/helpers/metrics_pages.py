"""Metrics pages as servers give them, for programs that read them: with a GPU and TensorRT-LLM, which tests do not have.

`triton` is the page of a real Triton 2.51 with an ensemble, and what TensorRT-LLM's backend and a GPU add to such pages,
by their documentation. `trtllm_serve` is by TensorRT-LLM's documentation as well. Counters grow by their value each step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from trtllm_pipeline.serve.gateway.prometheus_metrics import GatewayMetrics

GPU = "GPU-0b0e4a1c-0000-0000-0000-000000000000"
_TRITON_MODELS = {"ensemble": 1, "preprocessing": 1, "tensorrt_llm": 1, "postprocessing": 1, "tensorrt_llm_bls": 0}
_OF_TRITON = {
    "nv_inference_count": 4,
    "nv_inference_exec_count": 2,
    "nv_inference_request_duration_us": 90_000,
    "nv_inference_queue_duration_us": 1_000,
    "nv_inference_compute_input_duration_us": 200,
    "nv_inference_compute_infer_duration_us": 80_000,
    "nv_inference_compute_output_duration_us": 300,
}


def triton(step: int) -> str:
    """A page of Triton with TensorRT-LLM's backend, after `step` steps of 4 requests, 400 input and 800 output tokens."""
    lines = []
    for model, share in _TRITON_MODELS.items():
        labels = f'model="{model}",version="1"'
        lines.append(f"nv_inference_request_success{{{labels}}} {4 * share * step}")
        lines.append(f'nv_inference_request_failure{{model="{model}",reason="BACKEND",version="1"}} {share * step}')
        lines += [f"{name}{{{labels}}} {value * share * step}" for name, value in _OF_TRITON.items()]
        lines.append(f"nv_inference_pending_request_count{{{labels}}} {2 * share}")
    labels = 'model="tensorrt_llm",version="1"'
    for family, label, values in (
        ("request_metrics", "request_type", {"active": 6, "scheduled": 4, "context": 1, "waiting": 2, "max": 64}),
        (
            "kv_cache_block_metrics",
            "kv_cache_block_type",
            {"max": 1000, "free": 750, "used": 250, "reused": 40, "tokens_per": 64, "fraction": 0.25},
        ),
        ("runtime_memory_metrics", "memory_type", {"gpu": 1_610_236, "cpu": 0, "pinned": 0}),
    ):
        lines += [f'nv_trt_llm_{family}{{{label}="{name}",{labels}}} {value}' for name, value in values.items()]
    for way, tokens in (("input", 400), ("output", 800)):
        kind = f'response_metric_type="total_{way}_tokens",{labels}'
        lines += [
            f'nv_llm_{way}_token_len_bucket{{{kind},le="+Inf"}} {4 * step}',
            f"nv_llm_{way}_token_len_count{{{kind}}} {4 * step}",
            f"nv_llm_{way}_token_len_sum{{{kind}}} {tokens * step}",
        ]
    gpu = {"utilization": 0.87, "memory_used_bytes": 60e9, "memory_total_bytes": 80e9, "power_usage": 412.5}
    lines += [f'nv_gpu_{name}{{gpu_uuid="{GPU}"}} {value:f}' for name, value in gpu.items()]
    return "\n".join([*lines, "nv_cpu_utilization 0", ""])


def trtllm_serve(step: int) -> str:
    """A page of trtllm-serve after `step` steps of 4 requests with a time to first token of 0.1 to 0.25 s."""
    labels = 'engine_type="trtllm",model_name="qwen"'
    lines = [f'trtllm_request_success_total{{finished_reason="stop",{labels}}} {4 * step}']
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency", "request_queue_time"):
        lines += [
            f'trtllm_{name}_seconds_bucket{{le="{bound}",{labels}}} {count * step}'
            for bound, count in (("0.1", 0), ("0.25", 4), ("0.5", 4), ("+Inf", 4))
        ]
        lines += [
            f"trtllm_{name}_seconds_sum{{{labels}}} {0.8 * step}",
            f"trtllm_{name}_seconds_count{{{labels}}} {4 * step}",
        ]
    gauges = {
        "num_requests_running": 3,
        "num_requests_waiting": 1,
        "kv_cache_utilization": 0.5,
        "kv_cache_hit_rate": 0.2,
    }
    return "\n".join([*lines, *(f"trtllm_{name}{{{labels}}} {value}" for name, value in gauges.items()), ""])


def dcgm(step: int, *, gpus: int = 1, host: str = "node") -> str:
    """A page of DCGM exporter, by NVIDIA's documentation, of busy GPUs after `step` collections, each of 350.5 J."""
    fields = {
        "SM_CLOCK": ("gauge", "SM clock frequency (in MHz).", 1755),
        "GPU_TEMP": ("gauge", "GPU temperature (in C).", 58),
        "POWER_USAGE": ("gauge", "Power draw (in W).", 350.5),
        "TOTAL_ENERGY_CONSUMPTION": ("counter", "Total energy consumption since boot (in mJ).", 350_500 * step),
        "GPU_UTIL": ("gauge", "GPU utilization (in %).", 97),
        "FB_FREE": ("gauge", "Framebuffer memory free (in MiB).", 9_000),
        "FB_USED": ("gauge", "Framebuffer memory used (in MiB).", 71_680),
    }
    lines = []
    for field, (kind, words, value) in fields.items():
        name = f"DCGM_FI_DEV_{field}"
        lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        for gpu in range(gpus):
            labels = f'gpu="{gpu}",UUID="GPU-{host}-{gpu}",pci_bus_id="00000000:0{gpu}:00.0",device="nvidia{gpu}"'
            lines.append(f'{name}{{{labels},modelName="NVIDIA H100 80GB HBM3",Hostname="{host}"}} {value}')
    return "\n".join([*lines, ""])


class Gateway:
    """A gateway's page, by the real GatewayMetrics. Each step of 0.1 s and more answers 4 requests of 100 + 200 tokens."""

    def __init__(self, model: str = "qwen") -> None:
        self.metrics = GatewayMetrics()
        self.metrics.add(model)
        self.metrics.limits(model, in_flight=8, queued=16)
        self._model = model
        waiting = self.metrics.request(model, "/v1/chat/completions")
        waiting.queued()
        self.metrics.request(model, "/v1/chat/completions").started()

    def step(self) -> None:
        """Answer four requests; one more fails, and one is rejected."""
        for _ in range(4):
            request = self.metrics.request(self._model, "/v1/chat/completions")
            request.queued()
            request.started()
            for _ in range(4):
                request.output()
                request.tokens(50)
            request.usage(100, 200)
            request.tool_calls(1)
            request.finish(200)
        request = self.metrics.request(self._model, "/v1/completions")
        request.started()
        request.upstream_error("timeout")
        request.finish(504)
        request = self.metrics.request(self._model, "/v1/completions")
        request.rejected("queue_full")
        request.finish(429)

    def page(self) -> str:
        """The page as it is now."""
        return self.metrics.page()[0].decode()


@contextmanager
def served(pages: Mapping[str, Callable[[], str]]) -> Iterator[str]:
    """Pages by path at HOST:PORT while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            body = (page() if page else "none").encode()
            self.send_response(200 if page else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
