"""The registry in Redis: one key per member, which expires with its lease, and a set of ids."""

import secrets
from collections.abc import Sequence
from typing import Any, cast

import structlog

from baton.clock import Clock, SystemClock
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.errors import Invalid, Unauthorized, Unavailable
from baton.registry.entry_scan import PAGE_ENTRIES, EntryScan, NamedEntry, named_entries
from baton.registry.entry_signing import EntrySigner
from baton.registry.limits import MAX_ID_BYTES, MAX_LOGGED_ENTRIES, MAX_MEMBER_BYTES, MAX_MEMBERS
from baton.registry.member_codec import member_from_json, member_to_json
from baton.registry.redis_client import call_redis, connect_redis

MAX_ENTRY_BYTES = MAX_MEMBER_BYTES + 128

# A value that is not a member, or has an impossible generation (over 64 bits), counts as older than
# any generation. The first line of a signed entry is the member.
_IS_NEWER = f"""
local function is_newer(present, generation)
  if type(present) ~= 'string' or #present > {MAX_ENTRY_BYTES} then return false end
  local ok, member = pcall(cjson.decode, string.match(present, '^[^\\n]*'))
  local other = ok and type(member) == 'table' and tonumber(member.generation)
  return other and other < 2 ^ 64 and other > tonumber(generation)
end
local present = redis.pcall('GET', KEYS[1])
"""
# KEYS: the member, the set of ids. ARGV: the entry, generation, ttl in ms, id, an entry that is to
# be overwritten whatever its generation is. Returns the newer entry, if there is one.
_ANNOUNCE = f"""{_IS_NEWER}
if is_newer(present, ARGV[2]) and present ~= ARGV[5] then return present end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
return false
"""
# KEYS as above. ARGV: generation, id.
_WITHDRAW = f"""{_IS_NEWER}
if is_newer(present, ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
return 1
"""

# KEYS: two keys. Writes as members do, which a server may refuse though it answers a PING.
_PROBE = """
for _, key in ipairs(KEYS) do redis.call('SET', key, '', 'PX', 1000) end
return 1
"""

# A call returns entries as name, value, name, value … Of a value that is too long, it returns a
# part, which is not valid. Ids that have no entry, or can have none, are removed.
_ENTRIES = f"""
local entries = {{}}
local function add(ids, prefix, id)
  local value = false
  if #id <= {MAX_ID_BYTES} then
    value = redis.pcall('GETRANGE', prefix .. id, 0, {MAX_ENTRY_BYTES})
  end
  if type(value) == 'string' and value ~= '' then
    entries[#entries + 1] = id
    entries[#entries + 1] = value
  else
    redis.pcall('SREM', ids, id)
  end
end
"""
# KEYS: the set of ids, the database's id. ARGV: the beginning of the members' keys, a cursor, the
# number of entries. Returns the next cursor, the entries and the database's id.
_SCAN = f"""{_ENTRIES}
local found = redis.call('SSCAN', KEYS[1], ARGV[2], 'COUNT', ARGV[3])
for _, id in ipairs(found[2]) do add(KEYS[1], ARGV[1], id) end
return {{found[1], entries, redis.call('GET', KEYS[2])}}
"""
# KEYS: the set of ids. ARGV: the beginning of the members' keys, then ids. Returns the entries.
_LOOK_UP = f"""{_ENTRIES}
for i = 2, #ARGV do add(KEYS[1], ARGV[1], ARGV[i]) end
return entries
"""

ATTEMPTS = 3
"""Attempts to overwrite an entry that another program, which is not a member, keeps writing."""

log = structlog.get_logger(__name__)


class RedisRegistry:
    """A registry in Redis or Valkey, in the namespace ``cluster``. With a ``secret``, only members
    that know it are accepted.

    All calls share one connection, so members are read from the server that has taken this
    member's own announcement. While announcements fail, :meth:`members` raises Unavailable: if
    Redis refuses writes, no other member can renew its lease either, and after a failover the old
    primary may still be read. Calls are not retried, so that each loss of the connection is an
    outage to :class:`~baton.registry.membership.Membership`: the server behind it may be another
    one, which lacks the latest announcements."""

    def __init__(
        self, url: str, cluster: str, secret: str | None = None, clock: Clock | None = None
    ) -> None:
        self._signer = EntrySigner(secret, cluster, clock or SystemClock())
        self._ignored: set[str] = set()  # ids of rejected entries, which have been logged
        self._url = url
        self._redis = connect_redis(url, max_connections=1, retries=0)
        self._prefix = f"baton:{cluster}:member:"
        self._ids = f"baton:{cluster}:members"
        self._database_id_key = f"baton:{cluster}:memory"
        self._probe_keys = (f"baton:{cluster}:probe", f"baton:{cluster}:probes")
        self._failed_announcement: Unavailable | None = None
        self.database_id = ""
        self._entries = EntryScan(self._scan, self._look_up, self._member, MAX_MEMBERS)

    async def announce(self, member: Member, ttl_seconds: float) -> bool:
        entry, forged = self._signer.sign(member_to_json(member), ttl_seconds), b""
        generation, ttl_ms = str(member.generation), str(round(ttl_seconds * 1000))
        for _ in range(ATTEMPTS):
            arguments = [entry, generation, ttl_ms, member.id, forged]
            newer = await self._announce(member.id, arguments)
            if newer is None:
                return True
            if self._member(member.id, newer) is not None:
                return False
            forged = newer
        raise Unavailable(f"a program that is not a member keeps writing the entry of {member.id}")

    async def _announce(self, member_id: str, arguments: list[Any]) -> bytes | None:
        try:
            newer: bytes | None = await self._script(_ANNOUNCE, member_id, arguments)
        except Unavailable as error:
            self._failed_announcement = error
            raise
        self._failed_announcement = None
        return newer

    async def withdraw(self, member_id: WorkerId, generation: Incarnation) -> None:
        await self._script(_WITHDRAW, member_id, [str(generation), member_id])

    async def members(self) -> list[Member]:
        if self._failed_announcement is not None:
            raise Unavailable(f"this member's lease can't be renewed: {self._failed_announcement}")
        return await self._entries.read()

    async def _scan(self, cursor: bytes) -> tuple[bytes, Sequence[NamedEntry]]:
        keys = (self._ids, self._database_id_key)
        sent = self._redis.eval(_SCAN, len(keys), *keys, self._prefix, cursor, PAGE_ENTRIES)
        next_cursor, entries, name = await self._call(sent)
        self.database_id = (name or await self._new_database_id()).decode("utf-8", "replace")
        return next_cursor, named_entries(entries)

    async def _look_up(self, names: Sequence[str]) -> Sequence[NamedEntry]:
        sent = self._redis.eval(_LOOK_UP, 1, self._ids, self._prefix, *names)
        return named_entries(await self._call(sent))

    def _member(self, name: str, entry: bytes) -> Member | None:
        """Parse the entry of member ``name``. Return None if it is not trusted or not valid, which
        is logged once."""
        try:
            member = _parsed(name, self._signer.verify(entry))
        except (Unauthorized, Invalid) as error:
            if name not in self._ignored and len(self._ignored) < MAX_LOGGED_ENTRIES:
                self._ignored.add(name)
                if isinstance(error, Unauthorized):
                    log.warning("untrusted_member", member=name, error=str(error))
                else:
                    log.warning("malformed_member", member=name, error=str(error))
            return None
        self._ignored.discard(name)
        return member

    async def _new_database_id(self) -> bytes:
        """Give the database an id, unless another member has just done so; return the database's
        id."""
        await self._call(self._redis.set(self._database_id_key, secrets.token_hex(8), nx=True))
        name: bytes | None = await self._call(self._redis.get(self._database_id_key))
        return name or b""

    async def ping(self) -> None:
        """Check that Redis answers, and accepts what members write."""
        await self._call(self._redis.eval(_PROBE, 2, *self._probe_keys))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _script(self, script: str, member_id: str, arguments: list[Any]) -> Any:
        keys = [self._prefix + member_id, self._ids]
        return await self._call(self._redis.eval(script, len(keys), *keys, *arguments))

    async def _call(self, call: Any) -> Any:
        return await call_redis(self._url, cast(Any, call))


def _parsed(name: str, content: bytes) -> Member:
    """Parse the entry of member ``name``. Raises Invalid if the entry is malformed or belongs to
    another member."""
    member = member_from_json(content)
    if member.id != name:
        raise Invalid(f"the entry of member {name} describes another member, {member.id}")
    return member
