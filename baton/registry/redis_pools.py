"""Connections to the primary that ``redis_url`` leads to: a server, or what Sentinels say.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… (TLS), unix://[…@]/PATH
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…]/SERVICE[/DB], rediss+sentinel://…

User, password and the options after "?" are the server's, as redis-py names them. Those of the
Sentinels are ``sentinel_username`` and ``sentinel_password``; TLS and its options hold for both.
"""

import asyncio
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from baton.registry.limits import MAX_CONNECTION_SECONDS

SENTINEL_PORT = 26379
SENTINEL_SECONDS = 0.5
"""The timeout of a call to one Sentinel; then the next one is asked."""

_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_SENTINEL_FORM = "redis+sentinel://HOST:26379,HOST:26379/SERVICE"
_SENTINEL_OPTIONS = {
    "socket_timeout": SENTINEL_SECONDS,
    "socket_connect_timeout": SENTINEL_SECONDS,
    "retry": Retry(NoBackoff(), 1),
}


class RedisPool(BlockingConnectionPool):
    """Connections that are at most ``MAX_CONNECTION_SECONDS`` old when a call begins."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._connected_at: WeakKeyDictionary[AbstractConnection, float] = WeakKeyDictionary()

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._connected_at.get(connection, now) > MAX_CONNECTION_SECONDS:
            await connection.disconnect()
        if not connection.is_connected:
            self._connected_at[connection] = now
        await super().ensure_connection(connection)


class SentinelPool(SentinelConnectionPool, RedisPool):
    """Connections to the primary of a service. Each new one asks Sentinels for it."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def open_pool(url: str, **options: Any) -> RedisPool:
    """Return the connections that ``url`` describes; ``options`` are redis-py's, for all of them.
    Raises ValueError if ``url`` has none of the forms above."""
    if urlsplit(url).scheme in _SENTINEL_SCHEMES:
        return _sentinel_pool(url, options)
    return RedisPool(**options | parse_url(url))


def _sentinel_pool(url: str, options: dict[str, Any]) -> SentinelPool:
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    sentinels = [_host_port(each) for each in hosts.split(",")]
    if not service or not (database or "0").isdigit():
        raise ValueError(f"it should be {_SENTINEL_FORM}, and may end with /DB, a number")
    scheme = _SENTINEL_SCHEMES[parts.scheme]
    server = parts._replace(scheme=scheme, netloc=f"{login}@server", path=f"/{database or 0}")
    of_server: dict[str, Any] = options | parse_url(server.geturl())
    del of_server["host"]
    tls = {name: of_server[name] for name in of_server if name.startswith("ssl_")}
    tls["ssl"] = of_server.pop("connection_class", None) is not None
    login_of_sentinels = {
        name: of_server.pop(f"sentinel_{name}", None) for name in ("username", "password")
    }
    of_sentinels = _SENTINEL_OPTIONS | tls | login_of_sentinels
    sentinel = Sentinel(sentinels, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    service = unquote(service)
    return SentinelPool(service, sentinel, **of_server | tls)  # type: ignore[no-untyped-call]


def _host_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"it should be {_SENTINEL_FORM}, but a host is missing")
    return parts.hostname, parts.port or SENTINEL_PORT
