"""Limits and default sampling of a gateway. Matrix settings and command-line options derive from them.

There is no `from __future__ import annotations`, since field types are read at runtime.
"""

from dataclasses import dataclass
from typing import Annotated

from trtllm_pipeline.tensorrt import Param, params


@dataclass(frozen=True, kw_only=True)
class GatewayParams:
    """Limits and default sampling of a gateway. They do not affect the output of any stage."""

    temperature: Annotated[
        float | None,
        Param(
            "temperature of requests that set none; 0 is greedy",
            ge=0,
            le=100,
            null="the model's generation_config.json, or 1",
            runtime=True,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Param("top_p of requests that set none", gt=0, le=1, null="the model's generation_config.json", runtime=True),
    ] = None
    top_k: Annotated[
        int | None,
        Param("top_k of requests that set none", ge=0, null="the model's generation_config.json", runtime=True),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Param(
            "repetition penalty of requests that set none",
            gt=0,
            le=100,
            null="the model's generation_config.json",
            runtime=True,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Param(
            "maximum output tokens of requests that set none",
            ge=1,
            le=params.MOST_TOKENS,
            null="as many as fit for chat, 16 for completions",
            runtime=True,
        ),
    ] = None
    stop: Annotated[tuple[str, ...], Param("stop texts, in addition to those of a request", runtime=True)] = ()
    end_id: Annotated[int | None, Param("token that ends the output", ge=0, null="the server's", runtime=True)] = None
    pad_id: Annotated[int | None, Param("token that pads batches", ge=0, null="the server's", runtime=True)] = None
    max_concurrency: Annotated[
        int, Param("maximum requests in progress per model", ge=1, le=params.MOST_IN_FLIGHT, runtime=True)
    ] = 128
    max_queue: Annotated[
        int,
        Param(
            "maximum waiting requests per model; further ones are refused (429)",
            ge=0,
            le=params.MOST_IN_FLIGHT,
            runtime=True,
        ),
    ] = 256
    queue_timeout_s: Annotated[
        float, Param("timeout of waiting requests [s], then 429", gt=0, le=1e9, runtime=True)
    ] = 60.0
    max_connections: Annotated[
        int,
        Param(
            "maximum client connections; requests on further ones are refused (503)",
            ge=1,
            le=params.MOST_IN_FLIGHT,
            runtime=True,
        ),
    ] = 1024
    max_body_bytes: Annotated[
        int, Param("maximum request size [bytes]; larger ones are refused (413)", ge=1024, le=1 << 28, runtime=True)
    ] = 2 << 20
    body_timeout_s: Annotated[
        float, Param("timeout for receiving a request body [s], then 408", gt=0, le=1e9, runtime=True)
    ] = 30.0
    generation_timeout_s: Annotated[
        float, Param("timeout of one response [s], then 504", gt=0, le=1e9, runtime=True)
    ] = 600.0
    write_timeout_s: Annotated[
        float, Param("timeout for a client that does not read its response [s]", gt=0, le=1e9, runtime=True)
    ] = 30.0
    keep_alive_s: Annotated[float, Param("timeout of idle connections [s]", gt=0, le=1e9, runtime=True)] = 30.0
    stop_timeout_s: Annotated[
        float, Param("time for running responses to finish when the gateway stops [s]", ge=0, le=1e9, runtime=True)
    ] = 10.0
    allowed_hosts: Annotated[
        tuple[str, ...],
        Param(
            "accepted Host headers in addition to localhost, 127.0.0.1 and [::1], if the gateway listens on loopback without "
            "API keys",
            runtime=True,
        ),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...],
        Param("web origins whose pages may use the gateway: SCHEME://HOST[:PORT], or * for all", runtime=True),
    ] = ()
    renderers: Annotated[int, Param("processes per model that render chat templates", ge=1, le=64, runtime=True)] = 2
