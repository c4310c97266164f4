"""One short error tree, by what the caller can do about it.

A foreign error is translated where it enters (``raise … from``). The two tables at the end
are the only place where an error becomes a gRPC status or an HTTP status.
"""

from dataclasses import dataclass


class BatonError(Exception):
    """Base of everything that the world does to us. Our own bugs are AssertionErrors."""

    retryable = False


class Invalid(BatonError):
    """The caller asked wrongly and must ask otherwise. ``param`` names what was wrong."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFound(BatonError):
    """What was named does not exist (any more)."""


class Unauthorized(BatonError):
    """No key, or a wrong one."""


class Overloaded(BatonError):
    """A bound was reached. Try again after ``retry_after_seconds``."""

    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(BatonError):
    """A peer is gone, starting or draining. Another one may do."""

    retryable = True


class Unresponsive(Unavailable):
    """A peer does not answer, though its connection has not broken: it stands still, or the network
    between is gone."""


class DeadlineExceeded(BatonError):
    """A phase took longer than it was given."""

    retryable = True


class Corrupt(BatonError):
    """Bytes are not what their key, size or checksum says. Recompute."""

    retryable = True


class RequestKilledWorkers(BatonError):
    """A request that workers died of. It is not tried again."""

    code = "request_killed_workers"


class Cancelled(BatonError):
    """The caller, or the client behind it, went away."""


@dataclass(frozen=True, slots=True)
class ErrorMapping:
    """How one kind of error looks to a peer (gRPC status name) and to a client (HTTP)."""

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
    Corrupt: ErrorMapping("DATA_LOSS", 500, "server_error"),
    Cancelled: ErrorMapping("CANCELLED", 499, "server_error"),
    RequestKilledWorkers: ErrorMapping("FAILED_PRECONDITION", 500, "server_error"),
    BatonError: ErrorMapping("INTERNAL", 500, "server_error"),
}


def error_mapping(error: BaseException) -> ErrorMapping:
    """The mapping of the nearest class that has one; anything foreign is INTERNAL."""
    for kind in type(error).__mro__:
        if kind in ERROR_MAPPINGS:
            return ERROR_MAPPINGS[kind]
    return ERROR_MAPPINGS[BatonError]


def error_from_grpc_status(status_name: str, message: str) -> BatonError:
    """The inverse of :func:`error_mapping`, for the client side of a call."""
    for kind, mapping in ERROR_MAPPINGS.items():
        if mapping.grpc_status == status_name:
            return kind(message)
    return BatonError(message)
