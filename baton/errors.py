"""The exception hierarchy, grouped by what the caller can do about an error.

Errors of other libraries are translated where they occur (``raise … from``). The table and the
functions at the end of this module are the only place that maps errors to gRPC and HTTP statuses.
"""

from dataclasses import dataclass


class BatonError(Exception):
    """The base class of all expected errors. Any other exception that escapes is a bug in Baton."""

    retryable = False


class Invalid(BatonError):
    """A request, setting or file is invalid and must be changed. ``param`` is the name of the
    invalid field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def context_length_message(context_tokens: int, problem: str) -> str:
    """Return the message of an error whose code is ``CONTEXT_LENGTH_EXCEEDED``. Most clients know
    the error by how this message begins: they then shorten the conversation, or ask a model with a
    longer context."""
    return f"This model's maximum context length is {context_tokens} tokens. However, {problem}"


class NotFound(BatonError):
    """The named object does not exist, or no longer exists."""


class Unauthorized(BatonError):
    """Credentials (for example an API key or a signature) are missing, wrong or insufficient."""


class Overloaded(BatonError):
    """A limit was reached. Retry after ``retry_after_seconds``."""

    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(BatonError):
    """A peer is gone, starting or draining. Another peer may be able to serve the request."""

    retryable = True


class Unresponsive(Unavailable):
    """A peer does not answer although its connection has not broken: it hangs, or the network in
    between is down."""


class DeadlineExceeded(BatonError):
    """An operation exceeded its deadline."""

    retryable = True


class Corrupt(BatonError):
    """Data does not match its key, size or checksum. Recompute it."""

    retryable = True


class Conflict(BatonError):
    """What the request relies on is not, or no longer, the case. Begin anew."""

    code = "conflict"


class RequestKilledWorkers(BatonError):
    """The request has crashed several workers, so it is not retried."""

    code = "request_killed_workers"


class Cancelled(BatonError):
    """The caller, or the client on whose behalf it calls, has cancelled the operation or
    disconnected."""


@dataclass(frozen=True, slots=True)
class ErrorMapping:
    """The gRPC status (by name) that reports a kind of error to a peer, and the HTTP status and the
    error type of OpenAI's API that report it to a client."""

    grpc_status: str
    http_status: int
    openai_type: str


ERROR_MAPPINGS: dict[type[BatonError], ErrorMapping] = {
    Invalid: ErrorMapping("INVALID_ARGUMENT", 400, "invalid_request_error"),
    NotFound: ErrorMapping("NOT_FOUND", 404, "invalid_request_error"),
    Unauthorized: ErrorMapping("UNAUTHENTICATED", 401, "authentication_error"),
    Overloaded: ErrorMapping("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    Unavailable: ErrorMapping("UNAVAILABLE", 503, "service_unavailable_error"),
    DeadlineExceeded: ErrorMapping("DEADLINE_EXCEEDED", 504, "timeout_error"),
    Conflict: ErrorMapping("ABORTED", 409, "invalid_request_error"),
    Corrupt: ErrorMapping("DATA_LOSS", 500, "server_error"),
    Cancelled: ErrorMapping("CANCELLED", 499, "server_error"),
    RequestKilledWorkers: ErrorMapping("FAILED_PRECONDITION", 500, "server_error"),
    BatonError: ErrorMapping("INTERNAL", 500, "server_error"),
}


def error_mapping(error: BaseException) -> ErrorMapping:
    """Return the mapping of the error's class, or of its nearest base class that has a mapping.
    Exceptions that are not a BatonError are mapped like BatonError, to INTERNAL."""
    for kind in type(error).__mro__:
        if kind in ERROR_MAPPINGS:
            return ERROR_MAPPINGS[kind]
    return ERROR_MAPPINGS[BatonError]


def error_from_grpc_status(status_name: str, message: str) -> BatonError:
    """Return the error for a gRPC status, on the client side of a call: the inverse of
    :func:`error_mapping`."""
    for kind, mapping in ERROR_MAPPINGS.items():
        if mapping.grpc_status == status_name:
            return kind(message)
    return BatonError(message)
