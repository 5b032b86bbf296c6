"""One model of the gateway: its server, which may restart at any time, and its admission of requests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Hashable
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from trtllm_pipeline.base import ServerError
from trtllm_pipeline.measure import Service
from trtllm_pipeline.orchestrate import GatewayParams
from trtllm_pipeline.serve.gateway.admission import Admission
from trtllm_pipeline.serve.gateway.api_error import ApiError, unavailable
from trtllm_pipeline.serve.gateway.dialects import dialect_for
from trtllm_pipeline.serve.gateway.gateway_config import OF_TRITON, OfferedModel
from trtllm_pipeline.serve.gateway.model_texts import ModelTexts
from trtllm_pipeline.serve.gateway.openai_backend import OpenAiBackend
from trtllm_pipeline.serve.gateway.triton_backend import TritonBackend

Backend = TritonBackend | OpenAiBackend
_LOG: Final = logging.getLogger(__name__)
_FAILED_S: Final = 0.5
"""How long a failed connection to a server is remembered."""
_GRPC_PORT: Final = 8001
_LOG_EVERY_S: Final = 10.0
"""One server may cause thousands of failures."""


class ModelServer:
    """A model and its server."""

    def __init__(self, model: OfferedModel, params: GatewayParams) -> None:
        """Read the model's directory. Raises DownloadError for files that cannot be read, UsageError for an unknown dialect."""
        dialect_for(model.dialect, None)  # not only at the first request
        self.model = model
        self.params = params
        self.admission = Admission(
            model.max_concurrency or params.max_concurrency, params.max_queue, params.queue_timeout_s
        )
        self.texts = None if model.model_folder is None else ModelTexts(model.model_folder, params.renderers)
        self._backend: Backend | None = None
        self._key: Hashable = None
        self._failed: tuple[float, ApiError] | None = None
        self._lock = asyncio.Lock()
        self._logged_s = float("-inf")
        self._unlogged = 0

    async def prepare(self) -> None:
        """Prepare everything that the first request would wait for: start processes, query the server."""
        warm = [] if self.texts is None else [self.texts.warm()]
        reached, *_ = await asyncio.gather(self._reach(), *warm, return_exceptions=True)
        # An unreachable server may still be starting.
        if isinstance(reached, ApiError) and reached.reason == "upstream":
            _LOG.warning("model %s: %s", self.model.name, reached.message)

    async def _reach(self) -> None:
        backend = await self.backend()
        if isinstance(backend, TritonBackend):
            for name in self.model.names:
                with suppress(ApiError):  # each request for the adapter gets its own error
                    await backend.adapter(name)

    async def backend(self) -> Backend:
        """The server's current backend. Raises ApiError if it does not respond."""
        key = self._current()
        if self._backend is not None and self._key == key and not self._backend.broken:
            return self._backend
        async with self._lock:
            key = self._current()
            if key is None:
                raise unavailable(f"the server of model {self.model.name} is not running")
            if self._backend is None or self._key != key or self._backend.broken:
                self.forget()
                if self._failed is not None and time.monotonic() - self._failed[0] < _FAILED_S:
                    raise self._failed[1]  # tasks that waited for the lock need not wait for the server as well
                try:
                    self._backend, self._key = await self._connect(), key
                except ApiError as error:
                    self._failed = time.monotonic(), error
                    raise
            return self._backend

    def forget(self) -> None:
        """Query the server again before the next request."""
        if self._backend is not None:
            self._backend.close()
        self._backend = self._key = None

    def log_failure(self, name: str, error: ApiError) -> None:
        """Log the failure of a request for the offered model `name`, at most once in `_LOG_EVERY_S`."""
        now = time.monotonic()
        if now - self._logged_s < _LOG_EVERY_S:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} failures before it are not in this log)" if self._unlogged else ""
        _LOG.warning("a request for model %s failed with %d: %s%s", name, error.status, json.dumps(error.message), more)
        self._logged_s, self._unlogged = now, 0

    async def ready(self) -> bool:
        try:
            return await (await self.backend()).ready()
        except (ApiError, OSError):
            return False

    def tidy(self) -> None:
        """Close connections that have been idle for some time."""
        if self._backend is not None:
            self._backend.forget_idle(self._backend.idle_s)

    def close(self) -> None:
        self.forget()
        if self.texts is not None:
            self.texts.close()

    def _current(self) -> Hashable:
        """Identifies the server. None for a missing service.json."""
        if self.model.service is None:
            return self.model.url
        try:
            status = self.model.service.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    async def _connect(self) -> Backend:
        service = self._service()
        if service.kind == "openai":
            if unused := [name for name in OF_TRITON if getattr(self.params, name) is not None]:
                _LOG.warning(
                    "%s of the gateway is not used for model %s: OpenAI-compatible servers have no such input",
                    " and ".join(unused),
                    self.model.name,
                )
            return OpenAiBackend(service, self.model, self.params)
        return await TritonBackend.connect(service, self.model, self.params, self.texts)

    def _service(self) -> Service:
        if self.model.service is not None:
            try:
                return Service.read(self.model.service)
            except ServerError as error:
                raise unavailable(f"the server of model {self.model.name} is not running") from error
        assert self.model.url is not None
        url = urlsplit(self.model.url)
        if url.scheme == "grpc":
            address = url.netloc if url.port else f"{url.netloc.removesuffix(':')}:{_GRPC_PORT}"
            return Service("", address, None, None, self.model.server_model or "", None)
        name = self.model.server_model or self.model.name
        return Service(self.model.url, "", None, None, name, None, "openai")
