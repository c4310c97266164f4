"""A large response that holds memory until its client has read it."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.response_writer import send_body


class HeldResponse(Response):
    """A JSON response. ``release`` is called once the client has read all of it but what fits into
    the connection's buffers, or has disconnected."""

    def __init__(self, data: bytes, release: Callable[[], None]) -> None:
        super().__init__(data, media_type="application/json")
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await send_body(send, bytes(self.body))
        finally:
            self._release()
