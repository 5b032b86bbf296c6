"""Limits and default sampling of a gateway. Matrix settings and command-line options derive from them.

There is no `from __future__ import annotations`, since field types are read at runtime.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

from trtllm_pipeline.tensorrt import Param, params

_Setting: Final = partial(Param, runtime=True)
_OF_MODEL: Final = "the model's generation_config.json"


@dataclass(frozen=True, kw_only=True)
class GatewayParams:
    """Limits and default sampling of a gateway. They do not affect the output of any stage."""

    temperature: Annotated[
        float | None,
        _Setting("temperature of requests that set none; 0 is greedy", ge=0, le=100, null=f"{_OF_MODEL}, or 1"),
    ] = None
    top_p: Annotated[float | None, _Setting("top_p of requests that set none", gt=0, le=1, null=_OF_MODEL)] = None
    top_k: Annotated[int | None, _Setting("top_k of requests that set none", ge=0, null=_OF_MODEL)] = None
    repetition_penalty: Annotated[
        float | None, _Setting("repetition penalty of requests that set none", gt=0, le=100, null=_OF_MODEL)
    ] = None
    max_tokens: Annotated[
        int | None,
        _Setting(
            "maximum output tokens of requests that set none",
            ge=1,
            le=params.MOST_TOKENS,
            null="as many as fit for chat, 16 for completions",
        ),
    ] = None
    stop: Annotated[tuple[str, ...], _Setting("stop texts, in addition to those of a request")] = ()
    end_id: Annotated[int | None, _Setting("token that ends the output", ge=0, null="the server's")] = None
    pad_id: Annotated[int | None, _Setting("token that pads batches", ge=0, null="the server's")] = None
    max_concurrency: Annotated[
        int, _Setting("maximum requests in progress per model", ge=1, le=params.MOST_IN_FLIGHT)
    ] = 128
    max_queue: Annotated[
        int,
        _Setting("maximum waiting requests per model; further ones are refused (429)", ge=0, le=params.MOST_IN_FLIGHT),
    ] = 256
    queue_timeout_s: Annotated[float, _Setting("timeout of waiting requests [s], then 429", gt=0, le=1e9)] = 60.0
    max_connections: Annotated[
        int,
        _Setting(
            "maximum client connections; requests on further ones are refused (503)", ge=1, le=params.MOST_IN_FLIGHT
        ),
    ] = 1024
    max_body_bytes: Annotated[
        int, _Setting("maximum request size [bytes]; larger ones are refused (413)", ge=1024, le=1 << 28)
    ] = 2 << 20
    body_timeout_s: Annotated[float, _Setting("timeout for receiving a request body [s], then 408", gt=0, le=1e9)] = (
        30.0
    )
    generation_timeout_s: Annotated[float, _Setting("timeout of one response [s], then 504", gt=0, le=1e9)] = 600.0
    write_timeout_s: Annotated[
        float, _Setting("timeout for a client that does not read its response [s]", gt=0, le=1e9)
    ] = 30.0
    keep_alive_s: Annotated[float, _Setting("timeout of idle connections [s]", gt=0, le=1e9)] = 30.0
    stop_timeout_s: Annotated[
        float, _Setting("time for running responses to finish when the gateway stops [s]", ge=0, le=1e9)
    ] = 10.0
    allowed_hosts: Annotated[
        tuple[str, ...],
        _Setting(
            "accepted Host headers in addition to localhost, 127.0.0.1 and [::1], if the gateway listens on loopback without "
            "API keys"
        ),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...], _Setting("web origins whose pages may use the gateway: SCHEME://HOST[:PORT], or * for all")
    ] = ()
    renderers: Annotated[int, _Setting("processes per model that render chat templates", ge=1, le=64)] = 2
