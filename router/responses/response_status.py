"""The statuses of a response, and the final states of background responses that failed or were
cancelled."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from baton.errors import DeadlineExceeded
from router.errors import ApiError, to_api_error
from router.responses.stored_response import EncodedResponse, StoredResponse

QUEUED, IN_PROGRESS, CANCELLED, FAILED = "queued", "in_progress", "cancelled", "failed"

UNFINISHED_STATUSES = frozenset({QUEUED, IN_PROGRESS})
"""Any other status is final."""

ROUTER_ENDED = "the router that generated this response ended"

ERROR_CODES: Mapping[int, str] = MappingProxyType(
    {400: "invalid_prompt", 429: "rate_limit_exceeded"}
)
"""The codes that OpenAI's API has for a failed response, by HTTP status; any other status becomes
``server_error``."""


def is_unfinished(stored: StoredResponse | EncodedResponse) -> bool:
    return stored.status in UNFINISHED_STATUSES


def with_status(stored: StoredResponse, status: str, **fields: Any) -> StoredResponse:
    return replace(stored, response={**stored.response, "status": status, **fields})


def failed_response(stored: StoredResponse, error: BaseException) -> StoredResponse:
    """Return the response with the status ``failed`` and with ``error`` as its error."""
    if isinstance(error, TimeoutError):
        error = DeadlineExceeded("the answer was not complete in time")
    return failed_with(stored, to_api_error(error))


def failed_with(stored: StoredResponse, error: ApiError) -> StoredResponse:
    return with_status(stored, FAILED, error=failure(error))


def failure(error: ApiError) -> dict[str, str]:
    """Return the field ``error`` of a response that failed."""
    code = ERROR_CODES.get(error.status, "server_error")
    return {"code": code, "message": error.body["error"]["message"]}


def router_ended(stored: StoredResponse) -> StoredResponse:
    """Return the response with the status failed, and an error that says that the router which
    generated it has stopped."""
    return failed_with(stored, ApiError(500, ROUTER_ENDED))
