"""A client that may write to Redis floods the registry with entries that it can't sign, whose names
come before all others, and deletes the lists of names."""

import json

import redis.asyncio

from tests.attacks.target import AttackTarget

FINDING = "43.16: 4,200 unsigned names in Redis give 503 for everybody, 64 fields unload adapters"

NAMES = 10_000
NAMES_PER_CALL = 2000


async def attack(target: AttackTarget) -> None:
    """Write unsigned members and adapters, and a value of 32 MiB; then delete the lists now and
    then. Take the names back at the end."""
    registry = redis.asyncio.Redis.from_url(target.redis_url)
    try:
        [ids] = await registry.keys("baton:*:members")
        assert isinstance(ids, bytes)
        prefix = ids.decode().removesuffix("members")
        for start in range(0, NAMES, NAMES_PER_CALL):
            if target.is_over:
                break
            await _forge(registry, prefix, range(start, start + NAMES_PER_CALL))
            target.outcomes["forged names"] += NAMES_PER_CALL
        await registry.set(f"{prefix}member:!huge", bytes(32 << 20), ex=60)
        await registry.sadd(f"{prefix}members", "!huge")
        while not target.is_over:
            await registry.delete(f"{prefix}adapters")
            await registry.srem(f"{prefix}members", *[member.id for member in target.members])
            await target.sleep(5.0)
    finally:
        await _remove(registry)
        await registry.aclose()


async def _forge(registry: "redis.asyncio.Redis", prefix: str, numbers: range) -> None:
    entry = json.dumps({"role": "decode", "state": "ready"})
    async with registry.pipeline(transaction=False) as pipe:
        for number in numbers:
            pipe.sadd(f"{prefix}members", f"!{number}")
            pipe.set(f"{prefix}member:!{number}", entry, ex=60)
            pipe.hset(f"{prefix}adapters", f"!{number}", entry)
        await pipe.execute()


async def _remove(registry: "redis.asyncio.Redis") -> None:
    for key in await registry.keys("baton:*:adapters"):
        await registry.delete(key)
    for key in await registry.keys("baton:*:members"):
        await registry.delete(key)  # members write their names again within a second
    async for key in registry.scan_iter("baton:*:member:!*", count=10_000):
        await registry.unlink(key)
