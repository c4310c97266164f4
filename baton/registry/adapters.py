"""The adapters that the cluster is to serve. Routers write this list on behalf of admins; workers
follow it."""

import secrets
from collections.abc import Sequence
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
from baton.registry.entry_scan import PAGE_ENTRIES, EntryScan, NamedEntry, named_entries
from baton.registry.entry_signing import EntrySigner
from baton.registry.limits import (
    MAX_ADAPTER_BYTES,
    MAX_ID_BYTES,
    MAX_LOGGED_ENTRIES,
    MAX_PATH_CHARACTERS,
)
from baton.registry.redis_client import call_redis, connect_redis

VALID_SECONDS = 10 * 365 * 86_400.0
"""An entry has no lease: it stays until it is removed. Its signature has to name an end."""

_ID_FIELD = ""
"""A field of the hash that names it, and no adapter. If the hash is lost, so is its name."""

# KEYS: the hash. ARGV: a cursor, the number of entries. Returns the next cursor, the entries as
# name, value, name, value …, and the name of the hash. Of a value that is too long, it returns a
# part, which is not valid.
_SCAN = f"""
local found, entries = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2]), {{}}
for i = 1, #found[2], 2 do
  local name, value = found[2][i], found[2][i + 1]
  if name ~= '{_ID_FIELD}' and #name <= {MAX_ID_BYTES} then
    entries[#entries + 1] = name
    entries[#entries + 1] = string.sub(value, 1, {MAX_ADAPTER_BYTES} + 1)
  end
end
return {{found[1], entries, redis.call('HGET', KEYS[1], '{_ID_FIELD}')}}
"""
# KEYS: the hash. ARGV: name, new entry, the entry that it replaces, or '' for none.
_REPLACE = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') == ARGV[3] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
return 1
"""

log = structlog.get_logger(__name__)


class AdapterRegistry(Protocol):
    """The list of adapters, by name. Methods raise Unavailable if it can't be reached in time.

    ``database_id`` identifies the list that the last answer of :meth:`adapters` came from. If it
    changes, the list was lost, so that missing entries were not removed by an admin.
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
        self._ignored: set[str] = set()  # names of rejected entries, which have been logged
        self._entries = EntryScan(self._scan, self._look_up, self._entry, MAX_ADAPTERS)

    async def adapters(self) -> list[AdapterEntry]:
        return await self._entries.read()

    async def put_adapter(self, entry: AdapterEntry, *, keep_existing: bool = False) -> None:
        known = {each.name for each in await self.adapters()}
        if entry.name not in known and len(known) >= MAX_ADAPTERS:
            raise Overloaded(f"the cluster has {MAX_ADAPTERS} adapters already, the maximum")
        self._entries.expect(entry.name)
        signed = self._signer.sign(entry_to_json(entry), VALID_SECONDS)
        if not keep_existing:
            await self._call(self._redis.hset(self._key, entry.name, signed))
            return
        present = await self._call(self._redis.hget(self._key, entry.name)) or b""
        if self._entry(entry.name, present) is None:
            sent = self._redis.eval(_REPLACE, 1, self._key, entry.name, signed, present)
            await self._call(sent)

    async def remove_adapter(self, name: str) -> bool:
        return bool(await self._call(self._redis.hdel(self._key, name)))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _scan(self, cursor: bytes) -> tuple[bytes, Sequence[NamedEntry]]:
        sent = self._redis.eval(_SCAN, 1, self._key, cursor, PAGE_ENTRIES)
        next_cursor, entries, list_id = await self._call(sent)
        self.database_id = (list_id or await self._new_id()).decode("utf-8", "replace")
        return next_cursor, named_entries(entries)

    async def _look_up(self, names: Sequence[str]) -> Sequence[NamedEntry]:
        values = await self._call(self._redis.hmget(self._key, list(names)))
        return [(n, value) for n, value in zip(names, values, strict=True) if value is not None]

    async def _new_id(self) -> bytes:
        """Name the hash, unless another program has just done so; return its name."""
        await self._call(self._redis.hsetnx(self._key, _ID_FIELD, secrets.token_hex(8)))
        return await self._call(self._redis.hget(self._key, _ID_FIELD)) or b""

    def _entry(self, name: str, signed: bytes) -> AdapterEntry | None:
        """Parse an entry. Return None if it is not trusted or not valid, which is logged once."""
        try:
            entry = entry_from_json(self._signer.verify(signed[:MAX_ADAPTER_BYTES]))
            if entry.name != name:
                raise Invalid(f"the entry describes another adapter, {entry.name}")
        except (Unauthorized, Invalid) as error:
            if signed and name not in self._ignored and len(self._ignored) < MAX_LOGGED_ENTRIES:
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
    if not 0 < len(entry.path) <= MAX_PATH_CHARACTERS:
        raise Invalid(f"an adapter's path must have 1 to {MAX_PATH_CHARACTERS} characters")
    return entry
