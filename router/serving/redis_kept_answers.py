"""The kept answers in Redis, which all routers share."""

import hashlib
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any
from urllib.parse import quote

from baton.core.request import FinishReason
from baton.errors import Unavailable
from baton.registry.redis_client import connect_redis
from baton.registry.redis_scripts import RedisScripts
from router.serving.kept_answers import (
    KEPT_SECONDS,
    TOKEN_BYTES,
    AnswerKey,
    AnswerOrigin,
    BodyDiffers,
    Connection,
    KeptAnswer,
    KeptTokens,
)
from router.tenants.request_usage import RequestUsage

# An answer is a hash with a TTL, so that a full Redis with maxmemory-policy volatile-lru may evict
# it: then it can't be continued. A choice with the index 0 has the fields tokens:0, finish:0 and
# variant:0.

# ARGV: the body's digest, the milliseconds until the answer expires, and the id, time and seed with
# which it is kept if it is new; without them, it must exist.
_CLAIM = """
local key, digest = KEYS[1], redis.call('HGET', KEYS[1], 'digest')
if digest and digest ~= ARGV[1] then return 'differs' end
if not digest then
  if not ARGV[3] then return 'missing' end
  redis.call('HSET', key, 'digest', ARGV[1], 'id', ARGV[3], 'created', ARGV[4], 'seed', ARGV[5])
end
redis.call('HINCRBY', key, 'connection', 1)
redis.call('PEXPIRE', key, ARGV[2])
return redis.call('HGETALL', key)
"""

# ARGV: the answer's id, the connection's number, the milliseconds until the answer expires, then
# for each choice: its index, the bytes before these tokens, the tokens, the finish reason and the
# variant.
_KEEP = """
local key, newest = KEYS[1], redis.call('HMGET', KEYS[1], 'id', 'connection')
if not newest[1] then return 1 end
if newest[1] ~= ARGV[1] or newest[2] ~= ARGV[2] then return 0 end
for i = 4, #ARGV, 5 do
  local name = 'tokens:' .. ARGV[i]
  local known = string.sub(redis.call('HGET', key, name) or '', 1, tonumber(ARGV[i + 1]))
  redis.call('HSET', key, name, known .. ARGV[i + 2], 'finish:' .. ARGV[i], ARGV[i + 3],
             'variant:' .. ARGV[i], ARGV[i + 4])
end
redis.call('PEXPIRE', key, ARGV[3])
return 1
"""

# ARGV: the answer's id, the connection's number, and its usage. What was charged before the last
# connection is kept as well, so that a repeated call gets the same reply.
_CHARGE = """
local key = KEYS[1]
local known = redis.call('HMGET', key, 'id', 'charged', 'charged_by', 'charged_before')
if known[1] ~= ARGV[1] then return 'missing' end
local before = known[3] == ARGV[2] and known[4] or known[2] or ''
local charged, i = {unpack(ARGV, 3)}, 0
for count in string.gmatch(before, '%d+') do
  i = i + 1
  if tonumber(count) > tonumber(charged[i]) then charged[i] = count end
end
redis.call('HSET', key, 'charged', table.concat(charged, ' '), 'charged_by', ARGV[2],
           'charged_before', before)
return before
"""


class RedisKeptAnswers:
    """Implements :class:`router.serving.kept_answers.KeptAnswers`. All keys begin with
    ``baton:CLUSTER:answers:TENANT:``."""

    def __init__(self, url: str, cluster: str, kept_seconds: float = KEPT_SECONDS) -> None:
        self._prefix = f"baton:{cluster}:answers:"
        self._kept_milliseconds = int(kept_seconds * 1000)
        self._redis = connect_redis(url)
        self._scripts = RedisScripts(url, self._redis)

    async def claim(
        self, key: AnswerKey, digest: bytes, origin: AnswerOrigin | None
    ) -> KeptAnswer | None:
        new = () if origin is None else (origin.id, origin.created, origin.seed)
        arguments = (digest, self._kept_milliseconds, *new)
        reply = await self._scripts.run(_CLAIM, [self._name(key)], arguments)
        if reply == b"missing":
            return None
        if reply == b"differs":
            raise BodyDiffers
        return _parse(reply)

    async def keep(
        self, key: AnswerKey, connection: Connection, choices: Mapping[int, KeptTokens]
    ) -> bool:
        arguments: list[Any] = [*connection, self._kept_milliseconds]
        for index, tokens in choices.items():
            finish_reason = tokens.finish_reason or ""
            size = tokens.start * TOKEN_BYTES
            arguments += [index, size, tokens.data, str(finish_reason), tokens.variant]
        return bool(await self._scripts.run(_KEEP, [self._name(key)], arguments))

    async def charge(
        self, key: AnswerKey, connection: Connection, usage: RequestUsage
    ) -> RequestUsage | None:
        arguments = (*connection, *astuple(usage))
        reply = await self._scripts.run(_CHARGE, [self._name(key)], arguments)
        return None if reply == b"missing" else RequestUsage(*map(int, reply.split()))

    async def close(self) -> None:
        await self._redis.aclose()

    def _name(self, key: AnswerKey) -> str:
        """Return the name of an answer in Redis. The tenant is percent-encoded, so that no name of
        a tenant gives access to another tenant's answers."""
        digest = hashlib.blake2b(key.key.encode(), digest_size=16).hexdigest()
        return f"{self._prefix}{quote(key.tenant, safe='')}:{digest}"


def _parse(reply: Any) -> KeptAnswer:
    try:
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        origin = AnswerOrigin(fields[b"id"].decode(), int(fields[b"created"]), int(fields[b"seed"]))
        choices = {
            int(name[len(_TOKENS) :]): _parse_tokens(fields, name[len(_TOKENS) :])
            for name in fields
            if name.startswith(_TOKENS)
        }
        usage = RequestUsage(*map(int, fields.get(b"charged", b"").split()))
        connection = Connection(origin.id, int(fields[b"connection"]))
        return KeptAnswer(origin, connection, choices, usage)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unavailable(f"Redis holds an invalid answer: {error}") from error


_TOKENS = b"tokens:"


def _parse_tokens(fields: Mapping[bytes, bytes], index: bytes) -> KeptTokens:
    data, finish_reason = fields[_TOKENS + index], fields[b"finish:" + index].decode()
    if len(data) % TOKEN_BYTES:
        raise ValueError(f"{len(data)} bytes are no tokens")
    return KeptTokens(
        data,
        finish_reason=FinishReason(finish_reason) if finish_reason else None,
        variant=fields[b"variant:" + index].decode(),
    )
