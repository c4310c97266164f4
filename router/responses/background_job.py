"""One background response that this router generates."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import structlog

from baton.errors import BatonError
from router.errors import ApiError
from router.responses.response_lease import LeaseKey
from router.responses.response_status import CANCELLED, failed_response, with_status
from router.responses.stored_response import StoredResponse

log = structlog.get_logger(__name__)

GenerateResponse = Callable[[str], Awaitable[StoredResponse]]
"""Generates the response with this id, and returns it with its final status. Raises ApiError or
BatonError: then the response fails."""


@dataclass(slots=True, eq=False)
class BackgroundJob:
    """Runs ``generate``, which another task can cancel. ``held`` has the resources that the job
    holds until its end, such as the request's admission."""

    key: LeaseKey
    stored: StoredResponse
    """The response as it was last, or is to be, stored."""
    generate: GenerateResponse
    held: ExitStack
    _is_cancelled: bool = False
    _scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    _is_generating: bool = False

    def cancel(self) -> None:
        """End the generation. Idempotent; has no effect once the response is generated."""
        if self._is_generating and not self._is_cancelled:
            self._scope.reschedule(asyncio.get_running_loop().time())
        self._is_cancelled = True

    async def run(self) -> StoredResponse:
        """Generate the response and return it with its final status, also if it fails or is
        cancelled. Call once."""
        if self._is_cancelled:
            return with_status(self.stored, CANCELLED)
        try:
            async with self._scope:
                self._is_generating = True
                try:
                    return await self.generate(self.key.response_id)
                finally:
                    self._is_generating = False
        except Exception as error:
            if self._scope.expired():
                return with_status(self.stored, CANCELLED)
            if not isinstance(error, BatonError | ApiError | TimeoutError):
                log.exception("background_response_crashed", response=self.key.response_id)
            return failed_response(self.stored, error)
