"""``baton drain --self``: what a container does before Kubernetes ends it (its preStop hook)."""

import asyncio
from http.client import HTTPConnection, HTTPException

from baton.clock import Clock, SystemClock
from baton.config import Settings
from baton.errors import DeadlineExceeded, Invalid, Unavailable

ASK_SECONDS = 5.0
"""For one answer of a process that may be busy."""

POLL_SECONDS = 0.25
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run_drain_self(settings: Settings, timeout_seconds: float | None) -> None:
    """Returns when the program at ``ops_port`` has nothing left to do. Raises Invalid without such
    a port, Unavailable when nobody answers, DeadlineExceeded when something is left."""
    if not settings.ops_port:
        raise Invalid(
            f"ops_port is {settings.ops_port}: --self asks the program that listens there"
        )
    if timeout_seconds is None:
        timeout_seconds = settings.endpoint_grace_seconds + settings.drain_seconds
    host = ANY_HOST.get(settings.ops_host, settings.ops_host)
    print(asyncio.run(_drain(host, settings.ops_port, timeout_seconds, SystemClock())))


async def _drain(host: str, port: int, timeout_seconds: float, clock: Clock) -> str:
    until = clock.monotonic() + timeout_seconds
    while True:
        status, told = await asyncio.to_thread(_ask, host, port)
        if status == 200:
            return told
        if status != 202:
            raise Unavailable(f"the program at {host}:{port} does not drain: {status} {told}")
        if clock.monotonic() >= until:
            raise DeadlineExceeded(f"after {timeout_seconds:.0f} s something is left to do: {told}")
        await clock.sleep(POLL_SECONDS)


def _ask(host: str, port: int) -> tuple[int, str]:
    connection = HTTPConnection(host, port, timeout=ASK_SECONDS)
    try:
        connection.request("POST", "/drain")
        answer = connection.getresponse()
        return answer.status, answer.read(1024).decode(errors="replace").strip()
    except (OSError, HTTPException) as error:
        raise Unavailable(f"nobody answers at {host}:{port}: {error or type(error)}") from error
    finally:
        connection.close()
