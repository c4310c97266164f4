"""Measure how long a killed and a frozen store node delay requests in a real cluster.

    python -m tools.store_faults

Requests that share a stored prefix are sent one after the other; meanwhile the store node is killed
(SIGKILL), later frozen (SIGSTOP). Prints how long each request waited for the store, from `baton
explain`, and for how long the conductor still listed the dead node. Exits with 1 if a request
waited longer than ``BOUND_SECONDS``, or if the conductor listed the dead node for longer than a
second.
"""

import asyncio
import os
import signal
import sys

import grpc.aio

from baton.clock import SystemClock
from baton.core.block_key import KeyRoot, block_keys
from baton.core.ids import Epoch, RequestId, TenantId, TokenId
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery
from baton.core.states import Role
from baton.core.tenant import tenant_salt
from baton.registry.redis import RedisRegistry
from baton.rpc.channel import open_channel
from baton.rpc.conductor_client import request_placement
from orchestrator.cluster_state import ClusterFolder, ClusterState
from tools.local_cluster import LocalCluster, local_cluster

BOUND_SECONDS = 0.2
NAMED_SECONDS = 1.0
PREFIX = list(range(20, 20 + 320))
CLOCK = SystemClock()


def ask(cluster: LocalCluster, number: int) -> dict[str, object]:
    """Send one request; return the router's record of it, as ``baton explain`` shows it."""
    own = [300 + (number * 7 + index) % 200 for index in range(40)]
    body = {"prompt": [*PREFIX, *own], "max_tokens": 2, "temperature": 0}
    _, headers = cluster.post_with_headers("/v1/completions", body)
    return cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")


def waits(cluster: LocalCluster, first: int, count: int, what: str) -> float:
    """Send ``count`` requests, print how long each waited for the store, and return the longest
    wait in seconds."""
    longest = 0.0
    for number in range(first, first + count):
        result = ask(cluster, number)
        details = result["details"]
        assert isinstance(details, dict)
        seconds = float(details.get("store_wait_seconds", 0.0))
        longest = max(longest, seconds)
        print(
            f"{what:10} request {number:3}: waited {seconds * 1e3:7.2f} ms for the store, "
            f"{details.get('store_error', '')} {result['cached_tokens_by_tier']}",
            flush=True,
        )
    return longest


async def members(state: ClusterState) -> list[Member]:
    registry = RedisRegistry(state.redis_url, state.cluster, state.cluster_secret)
    try:
        return await registry.members()
    finally:
        await registry.close()


async def place(channel: grpc.aio.Channel, state: ClusterState, worker: Member) -> Placement:
    salt = tenant_salt(state.tenant_secret, TenantId("default"))
    digest = bytes.fromhex(worker.model_digest)
    root = KeyRoot(
        digest,
        worker.kv_dtype,
        worker.block_tokens,
        tenant_salt=salt,
        lossy_codec=worker.kv_codecs.lossy,
    )
    keys = block_keys(root.key(), [TokenId(token) for token in PREFIX], worker.block_tokens)
    query = PlacementQuery(
        RequestId("probe"), Epoch(1), TenantId("default"), len(PREFIX), 1, tuple(keys),
        frozenset(), model="",
    )  # fmt: skip
    return await request_placement(channel, query, timeout_seconds=2.0)


async def seconds_named(cluster: LocalCluster, pid: int) -> float:
    """Kill the store node. Return for how many seconds the conductor still lists it."""
    state = ClusterFolder(cluster.home, "default").read_running()
    known = await members(state)
    conductor = next(member for member in known if member.role is Role.CONDUCTOR)
    worker = next(member for member in known if member.role is Role.PREFILL)
    async with open_channel(conductor.address, state.credentials) as channel:
        hint = (await place(channel, state, worker)).store_hint
        assert hint is not None, "the conductor does not list the store"
        os.kill(pid, signal.SIGKILL)
        began = CLOCK.monotonic()
        while (await place(channel, state, worker)).store_hint is not None:
            await CLOCK.sleep(0.002)
        return CLOCK.monotonic() - began


def main() -> int:
    with local_cluster(prefill=2, decode=1) as cluster:
        for number in range(6):  # until both prefill workers and the store have the prefix
            ask(cluster, number)
        longest = waits(cluster, 10, 5, "sound")
        named = asyncio.run(seconds_named(cluster, cluster.processes("kvstore")[0]["pid"]))
        print(f"killed: the conductor listed the dead node for {named * 1e3:.1f} ms")
        longest = max(longest, waits(cluster, 20, 10, "killed"))
        while not cluster.status()["ready"]:
            pass
        for number in range(30, 36):
            ask(cluster, number)
        pid = cluster.processes("kvstore")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            longest = max(longest, waits(cluster, 40, 10, "frozen"))
        finally:
            os.kill(pid, signal.SIGCONT)
    print(f"longest wait {longest * 1e3:.1f} ms (bound {BOUND_SECONDS * 1e3:.0f})")
    slack = 0.02  # for a machine whose cores are busy
    return int(longest > BOUND_SECONDS + slack or named > NAMED_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
