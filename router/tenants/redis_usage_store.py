"""The usage store in Redis. It keeps a hash of counters per day, to which every router adds."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

import structlog

from baton.core.ids import TenantId
from baton.registry.redis_client import call_redis, connect_redis
from baton.registry.redis_scripts import KEEP
from router.limits import MAX_DIGITS, MAX_USAGE_DAYS
from router.tenants.usage_store import UsageCounts, UsageField

DAY_TTL_SECONDS = MAX_USAGE_DAYS * 86_400
WRITER_TTL_SECONDS = 7 * 86_400
"""How long the number of a writer's last message is kept after that message. If the writer can't
reach Redis for longer and then sends the message again, it is counted twice."""

# KEYS: the index of ends, the writer's last number, then one hash per day. ARGV: the number of this
# message, the seconds for which the writer's number is kept, the seconds for which a day is kept,
# then for each counter its day (the index in KEYS), its field and the amount.
_ADD = f"""{KEEP}
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if last >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
keep(KEYS[1], KEYS[2], ARGV[2])
for i = 4, #ARGV, 3 do
  redis.call('HINCRBY', KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2])
end
for i = 3, #KEYS do keep(KEYS[1], KEYS[i], ARGV[3]) end
return 1
"""

log = structlog.get_logger(__name__)


class RedisUsageStore:
    """Implements :class:`router.tenants.usage_store.UsageStore`. All keys begin with
    ``baton:CLUSTER:usage:``."""

    def __init__(self, url: str, cluster: str) -> None:
        self._url = url
        self._redis = connect_redis(url)
        self._prefix = f"baton:{cluster}:usage:"

    async def add(self, writer: str, number: int, counts: Mapping[Any, int]) -> None:
        days = sorted({day for day, _, _ in counts})
        own = f"{self._prefix}writer:{writer}"
        keys = [f"{self._prefix}ends", own, *map(self._day_key, days)]
        arguments: list[Any] = [number, WRITER_TTL_SECONDS, DAY_TTL_SECONDS]
        for (day, tenant, field), amount in counts.items():
            arguments += [days.index(day) + 3, f"{tenant}/{field.value}", amount]
        await self._call(self._redis.eval(_ADD, len(keys), *keys, *arguments))

    async def read(self, days: Iterable[str]) -> UsageCounts:
        counts: UsageCounts = Counter()
        requested_days = list(days)
        pipe = self._redis.pipeline(transaction=False)
        for day in requested_days:
            pipe.hgetall(self._day_key(day))
        for day, fields in zip(requested_days, await self._call(pipe.execute()), strict=True):
            for name, amount in fields.items():
                key = _parse(day, name)
                if key is not None and amount.isdigit() and len(amount) <= MAX_DIGITS:
                    counts[key] += int(amount)
        return counts

    async def close(self) -> None:
        await self._redis.aclose()

    def _day_key(self, day: str) -> str:
        return f"{self._prefix}day:{day}"

    async def _call(self, call: Any) -> Any:
        return await call_redis(self._url, cast(Any, call))


def _parse(day: str, name: bytes) -> tuple[str, TenantId, UsageField] | None:
    """Parse a counter's name ("TENANT/FIELD"). Return None if it is malformed."""
    tenant, _, field = name.decode("utf-8", "replace").rpartition("/")
    try:
        return day, TenantId(tenant), UsageField(field)
    except ValueError:
        log.warning("malformed_usage", field=name[:80])
        return None
