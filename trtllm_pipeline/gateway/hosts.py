"""Which names a gateway may be reached by, so that no web page reaches it by a name of its own (DNS rebinding)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from trtllm_pipeline.gateway.api_error import ApiError
from trtllm_pipeline.gateway.config import GatewayConfig
from trtllm_pipeline.serving.command_lines import reachable

_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
_PORT: Final = re.compile(r":\d*$")


class Hosts:
    """Checks the header field Host. A page of another site can make a browser resolve its own name to 127.0.0.1, and would then
    read what the gateway answers; but the browser still sends that name.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """Accept any name if others can reach the gateway anyway, or if it needs keys, which no page has."""
        self._checks = config.api_keys_file is None and reachable(config.host) is None
        own = f"[{config.host}]" if ":" in config.host else config.host
        self._allowed = {_name(each) for each in (*_LOOPBACK, own, *config.params.allowed_hosts)}

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise ApiError 403 for a name that is not allowed. A request without Host is not a browser's."""
        if not self._checks:
            return
        for field, value in headers:
            if field == b"host" and _name(text := value.decode("latin-1")) not in self._allowed:
                raise ApiError(
                    403,
                    f"the request is addressed to {text[:200]!r}; this gateway listens on loopback without keys and answers "
                    f"requests to {', '.join(sorted(self._allowed))}. --allowed-hosts adds a name",
                    code="host_not_allowed",
                    reason="host",
                )


def _name(host: str) -> str:
    """A host without its port, as it is compared."""
    return _PORT.sub("", host.strip()).lower().removesuffix(".")
