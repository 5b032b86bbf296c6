"""Errors in the form of OpenAI's API: a status, and an object with message, type, param and code."""

from __future__ import annotations

import json
from typing import Final

CONTEXT_LENGTH: Final = "context_length_exceeded"
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response to a request. `reason` is one word for metrics."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        reason: str = "invalid",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.reason = reason

    @property
    def body(self) -> bytes:
        """The JSON for the client, in a response or in an event of a stream that has started."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode(errors="replace")

    @property
    def headers(self) -> dict[str, str]:
        fields = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            fields["WWW-Authenticate"] = "Bearer"
        return fields


def bad(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """400 for one field of a request."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """503: the server behind the gateway is currently unavailable."""
    return ApiError(503, message, code="server_unavailable", retry_after_s=1, reason="unavailable")


def unsupported(param: str, message: str) -> ApiError:
    """400 for a field that this model or server does not support."""
    return bad(param, message, code="unsupported_parameter")


def missing(param: str, article: str = "a") -> ApiError:
    return bad(param, f"you must provide {article} {param} parameter", code="missing_required_parameter")


def bad_gateway(message: str) -> ApiError:
    """502: the server behind the gateway failed."""
    return ApiError(502, message, code="bad_gateway", reason="upstream")


def timed_out(limit_s: float) -> ApiError:
    """504: the server behind the gateway did not complete its response."""
    return ApiError(504, f"no complete response within {limit_s:g} s", code="timeout", reason="timeout")
