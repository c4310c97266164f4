"""An error as an OpenAI client sees it."""

from typing import Any

import orjson

from baton.errors import Invalid, Overloaded, RequestKilledWorkers, error_mapping

STATUS_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
    504: "timeout",
}

MAX_CHARACTERS = 1000
"""Of a message, and of a field's name: what was sent may be repeated, but not megabytes of it."""

MAX_RETRY_AFTER_SECONDS = 7 * 24 * 3600.0

REQUEST_ERROR = "invalid_request_error"


class ApiError(Exception):
    """``headers`` are added to the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = REQUEST_ERROR,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": _truncate(str(self)),
            "type": self.kind,
            "param": _truncate(self.param) if self.param is not None else None,
            "code": self.code,
        }
        return {"error": error}

    @property
    def json(self) -> bytes:
        return orjson.dumps(self.body)


def to_api_error(error: BaseException) -> ApiError:
    """Any error as a problem. What a bug says is not for clients."""
    if isinstance(error, ApiError):
        return error
    mapping = error_mapping(error)
    if mapping.grpc_status == "INTERNAL":
        return ApiError(500, "internal error", kind=mapping.openai_type)
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = _retry_after(error.retry_after_seconds)
    if isinstance(error, RequestKilledWorkers):
        headers["x-should-retry"] = "false"  # clients try a 500 again by themselves
        message, kind = str(error), mapping.openai_type
        return ApiError(mapping.http_status, message, kind=kind, code=error.code, headers=headers)
    param, code = (error.param, error.code) if isinstance(error, Invalid) else (None, None)
    return ApiError(
        mapping.http_status,
        str(error) or type(error).__name__,
        kind=mapping.openai_type,
        param=param,
        code=code or STATUS_CODES.get(mapping.http_status),
        headers=headers,
    )


def _retry_after(seconds: float) -> str:
    """Whole seconds. What a peer told may be no number at all."""
    return str(max(1, round(seconds))) if 0 <= seconds <= MAX_RETRY_AFTER_SECONDS else "1"


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "…"
