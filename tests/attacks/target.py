"""The attacked cluster, as an attacker sees it."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from testkit.machine import SYSTEM_CLOCK

REQUESTS_PER_MINUTE = 60
REQUEST_SECONDS = 60.0
VIOLATION_PREFIX = "harm: "
"""The prefix of outcomes that violate the guarantee whatever the neighbour's streams show."""


@dataclass(frozen=True)
class MemberAddress:
    """A process of the cluster, and where it can be reached on the members' network.

    ``grpc`` and ``framed_address`` are host:port, or empty. ``listening`` has the host:port of
    every TCP socket that the process listens on, including ``grpc`` and ``framed_address``."""

    id: str
    role: str
    pid: int
    grpc: str = ""
    framed_address: str = ""
    listening: tuple[str, ...] = ()


@dataclass
class AttackTarget:
    """A cluster under attack for ``seconds`` from now.

    ``url`` is the router's. ``attacker_key`` allows 60 requests a minute. ``neighbour_key`` belongs
    to the other tenant; attacks use it only to look for leaks of that tenant's data, never to
    impersonate it. ``cluster_secret`` is only for attacks by a compromised member. ``outcomes``
    counts the requests by HTTP status or name of the error, and violations (``VIOLATION_PREFIX``).
    """

    url: str
    attacker_key: str
    neighbour_key: str
    cluster_secret: str
    redis_url: str
    members: tuple[MemberAddress, ...]
    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._began = SYSTEM_CLOCK()
        self._turns = 0

    @property
    def seconds_left(self) -> float:
        return max(self._began + self.seconds - SYSTEM_CLOCK(), 0.0)

    @property
    def is_over(self) -> bool:
        return not self.seconds_left

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the router's HTTP server."""
        url = httpx.URL(self.url)
        return url.host, url.port or 80

    def of_role(self, *roles: str) -> list[MemberAddress]:
        """Return the members whose role is one of ``roles``: router, conductor, prefill, decode,
        kvstore."""
        return [member for member in self.members if member.role in roles]

    async def wait_for_rate_limit(self) -> bool:
        """Wait until the attacker's limit allows one more request: first 60 at once, then one a
        second. Return False if the attack is over."""
        due = self._began + (self._turns - REQUESTS_PER_MINUTE) * 60 / REQUESTS_PER_MINUTE
        self._turns += 1
        await asyncio.sleep(min(max(due - SYSTEM_CLOCK(), 0.0), self.seconds_left))
        return not self.is_over

    async def sleep(self, seconds: float) -> None:
        """Sleep, but not beyond the attack's end."""
        await asyncio.sleep(min(seconds, self.seconds_left))

    def record_violation(self, how: str) -> None:
        """Record that the guarantee of ``tests.neighbour`` was violated in a way that does not show
        in the neighbour's streams."""
        self.outcomes[VIOLATION_PREFIX + how] += 1

    async def repeat_concurrently(
        self, act: Callable[[], Awaitable[object]], concurrency: int
    ) -> None:
        """Call ``act`` repeatedly until the attack is over, with ``concurrency`` calls at a time,
        as fast as the attacker's limit allows."""

        async def lane() -> None:
            while await self.wait_for_rate_limit():
                await act()

        async with asyncio.TaskGroup() as lanes:
            for _ in range(concurrency):
                lanes.create_task(lane())

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Open an HTTP client with the attacker's key."""
        headers = {"authorization": f"Bearer {self.attacker_key}"}
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=REQUEST_SECONDS, trust_env=False
        ) as client:
            yield client

    async def post(
        self, client: httpx.AsyncClient, path: str, body: Any = None, **options: Any
    ) -> httpx.Response | None:
        """Send one request and read the response. ``body`` is sent as JSON; ``options`` are passed
        to httpx. Return None if there was no response, or if the attack ended first, which closes
        the connection. Does not wait for the attacker's rate limit."""
        try:
            async with asyncio.timeout(self.seconds_left):
                options = {"json": body, **options} if body is not None else options
                answer = await client.post(path, **options)
        except (httpx.HTTPError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1
            return None
        self.outcomes[str(answer.status_code)] += 1
        return answer

    @contextlib.asynccontextmanager
    async def connection(
        self, address: tuple[str, int] | str | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a TCP connection to ``address`` (a pair, or host:port), by default to the router.
        Raises OSError when it is refused."""
        host, port = self.address if address is None else _pair(address)
        reader, writer = await asyncio.open_connection(host, port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send(
        self, data: bytes, address: tuple[str, int] | str | None = None, wait_seconds: float = 5.0
    ) -> bytes:
        """Send bytes over a new connection, by default to the router; return what is received until
        the other side closes or ``wait_seconds`` have passed. Return what has arrived so far,
        possibly nothing, if the connection is refused or breaks."""
        answer = b""
        try:
            async with self.connection(address) as (reader, writer):
                writer.write(data)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(wait_seconds, self.seconds_left)):
                        await writer.drain()
                        while part := await reader.read(1 << 16):
                            answer += part
        except OSError as error:
            self.outcomes[type(error).__name__] += 1
        self.outcomes[_status_of(answer)] += 1
        return answer


def listening_sockets_of(pid: int) -> tuple[str, ...]:
    """Return every TCP socket on which a local process listens, as host:port."""
    found = psutil.Process(pid).net_connections("tcp")
    ours = [entry.laddr for entry in found if entry.status == psutil.CONN_LISTEN]
    return tuple(sorted(_joined(address.ip, address.port) for address in ours))


def _pair(address: tuple[str, int] | str) -> tuple[str, int]:
    if not isinstance(address, str):
        return address
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _status_of(answer: bytes) -> str:
    """Return the HTTP status of a response, "other bytes" if it isn't HTTP, or "closed" if it is
    empty."""
    if answer.startswith(b"HTTP/1."):
        return answer[9:12].decode("ascii", "replace")
    return "other bytes" if answer else "closed"
