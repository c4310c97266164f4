"""The adapters that the cluster is to serve. Routers write this list on behalf of admins; workers
follow it."""

from typing import Any, Protocol, cast

import orjson
import structlog

from baton.clock import Clock, SystemClock
from baton.core.adapter import (
    ADAPTER_DIGEST_BYTES,
    MAX_ADAPTERS,
    AdapterEntry,
    is_adapter_name,
)
from baton.errors import Invalid, Overloaded, Unauthorized
from baton.registry.entry_signing import EntrySigner
from baton.registry.redis_client import call_redis, connect_redis

MAX_ENTRY_BYTES = 8192
MAX_PATH = 4096
VALID_SECONDS = 10 * 365 * 86_400.0
"""An entry has no lease: it stays until it is removed. Its signature has to name an end."""

# KEYS: the hash. ARGV: name, entry, maximum number of entries, whether to keep an existing entry.
_PUT = """
local present = redis.call('HEXISTS', KEYS[1], ARGV[1])
if present == 1 and ARGV[4] == '1' then return 1 end
if present == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

log = structlog.get_logger(__name__)


class AdapterRegistry(Protocol):
    """The list of adapters, by name. Methods raise Unavailable if it can't be reached in time.

    ``database_id`` identifies the database that the last answer of :meth:`adapters` came from. If
    it changes, the database has lost its data, so that missing entries were not removed by an
    admin.
    """

    database_id: str

    async def adapters(self) -> list[AdapterEntry]:
        """Return all adapters, ordered by name."""
        ...

    async def put_adapter(self, entry: AdapterEntry, *, keep_existing: bool = False) -> None:
        """Add an adapter, or replace the one with its name unless ``keep_existing`` is set. Raises
        Overloaded if there are ``MAX_ADAPTERS`` others."""
        ...

    async def remove_adapter(self, name: str) -> bool:
        """Remove an adapter. Return whether there was one."""
        ...

    async def close(self) -> None: ...


class MemoryAdapterRegistry:
    """An implementation for a single process."""

    def __init__(self) -> None:
        self.database_id = "memory"
        self._entries: dict[str, AdapterEntry] = {}

    async def adapters(self) -> list[AdapterEntry]:
        return [self._entries[name] for name in sorted(self._entries)]

    async def put_adapter(self, entry: AdapterEntry, *, keep_existing: bool = False) -> None:
        if keep_existing and entry.name in self._entries:
            return
        if entry.name not in self._entries and len(self._entries) >= MAX_ADAPTERS:
            raise _too_many()
        self._entries[entry.name] = entry

    async def remove_adapter(self, name: str) -> bool:
        return self._entries.pop(name, None) is not None

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class RedisAdapterRegistry:
    """A hash in Redis or Valkey, in the namespace ``cluster``. With a ``secret``, only entries of
    programs that know it are accepted: a folder that anyone can name would be loaded by all
    workers."""

    def __init__(
        self, url: str, cluster: str, secret: str | None = None, clock: Clock | None = None
    ) -> None:
        self.database_id = ""
        self._url = url
        self._redis = connect_redis(url)
        self._signer = EntrySigner(secret, f"{cluster}/adapters", clock or SystemClock())
        self._key = f"baton:{cluster}:adapters"
        self._database_id_key = f"baton:{cluster}:memory"
        self._ignored: set[str] = set()  # names of rejected entries, which have been logged

    async def adapters(self) -> list[AdapterEntry]:
        pipeline = self._redis.pipeline()
        pipeline.hgetall(self._key)
        pipeline.get(self._database_id_key)
        found, database_id = await self._call(pipeline.execute())
        self.database_id = (database_id or b"").decode("utf-8", "replace")
        names = sorted(found)[:MAX_ADAPTERS]
        entries = [self._entry(name.decode("utf-8", "replace"), found[name]) for name in names]
        return [entry for entry in entries if entry is not None]

    async def put_adapter(self, entry: AdapterEntry, *, keep_existing: bool = False) -> None:
        signed = self._signer.sign(entry_to_json(entry), VALID_SECONDS)
        arguments: list[Any] = [entry.name, signed, MAX_ADAPTERS, int(keep_existing)]
        if not await self._call(self._redis.eval(_PUT, 1, self._key, *arguments)):
            raise _too_many()

    async def remove_adapter(self, name: str) -> bool:
        return bool(await self._call(self._redis.hdel(self._key, name)))

    async def close(self) -> None:
        await self._redis.aclose()

    def _entry(self, name: str, signed: bytes) -> AdapterEntry | None:
        """Parse an entry. Return None if it is not trusted or not valid, which is logged once."""
        try:
            entry = entry_from_json(self._signer.verify(signed[:MAX_ENTRY_BYTES]))
            if entry.name != name:
                raise Invalid(f"the entry describes another adapter, {entry.name}")
        except (Unauthorized, Invalid) as error:
            if name not in self._ignored and len(self._ignored) < MAX_ADAPTERS:
                self._ignored.add(name)
                log.warning("adapter_entry_ignored", adapter=name, error=str(error))
            return None
        self._ignored.discard(name)
        return entry

    async def _call(self, call: Any) -> Any:
        return await call_redis(self._url, cast(Any, call))


def entry_to_json(entry: AdapterEntry) -> bytes:
    fields = {"name": entry.name, "path": entry.path, "model": entry.model}
    return orjson.dumps(fields | {"digest": entry.digest.hex()})


def entry_from_json(data: bytes) -> AdapterEntry:
    """Parse an entry. Raises Invalid if ``data`` is not one."""
    try:
        raw = orjson.loads(data)
        entry = AdapterEntry(
            str(raw["name"]), str(raw["path"]), bytes.fromhex(raw["digest"]), str(raw["model"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise Invalid(f"the entry is not a valid adapter: {error}") from error
    if not is_adapter_name(entry.name) or len(entry.digest) != ADAPTER_DIGEST_BYTES:
        raise Invalid("the entry is not a valid adapter: its name or digest is wrong")
    if not 0 < len(entry.path) <= MAX_PATH:
        raise Invalid(f"an adapter's path must have 1 to {MAX_PATH} characters")
    return entry


def _too_many() -> Overloaded:
    return Overloaded(f"the cluster has {MAX_ADAPTERS} adapters already, the maximum")
