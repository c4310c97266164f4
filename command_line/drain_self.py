"""``baton drain --self``, for a preStop hook, which Kubernetes runs before it stops a container."""

import asyncio
from http.client import HTTPConnection, HTTPException

from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.errors import DeadlineExceeded, Invalid, Unavailable

REQUEST_TIMEOUT_SECONDS = 5.0
"""The timeout of one request to a process that may be busy."""

POLL_SECONDS = 0.25
LOOPBACK_BY_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run_drain_self(settings: Settings, timeout_seconds: float | None) -> None:
    """Drain the process whose ops server listens on ``ops_port``; return when the process has no
    work left. Raises Invalid if the port is not set, Unavailable if nothing responds or the process
    does not drain, and DeadlineExceeded if the process still has work after the timeout."""
    if not settings.ops_port:
        raise Invalid(
            f"ops_port is {settings.ops_port}: --self needs the port of the process's ops server"
        )
    if timeout_seconds is None:
        timeout_seconds = settings.endpoint_grace_seconds + settings.drain_timeout_seconds
    host = LOOPBACK_BY_ANY_HOST.get(settings.ops_host, settings.ops_host)
    print(asyncio.run(_drain(host, settings.ops_port, timeout_seconds, SystemClock())))


async def _drain(host: str, port: int, timeout_seconds: float, clock: Clock) -> str:
    until = clock.monotonic() + timeout_seconds
    while True:
        status, text = await asyncio.to_thread(_request_drain, host, port)
        if status == 200:
            return text
        if status != 202:
            raise Unavailable(f"the program at {host}:{port} does not drain: {status} {text}")
        if clock.monotonic() >= until:
            raise DeadlineExceeded(
                f"the program still has work after {timeout_seconds:.0f} s: {text}"
            )
        await clock.sleep(POLL_SECONDS)


def _request_drain(host: str, port: int) -> tuple[int, str]:
    connection = HTTPConnection(host, port, timeout=REQUEST_TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/drain")
        response = connection.getresponse()
        return response.status, response.read(1024).decode(errors="replace").strip()
    except (OSError, HTTPException) as error:
        raise Unavailable(f"nothing responds at {host}:{port}: {error or type(error)}") from error
    finally:
        connection.close()
