"""Tests that the client validates a store node's answers, and closes the connections to nodes that
have restarted or left."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef, Endpoint
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.store import LeasedBlocks, LeaseRequest, PutRequest, PutResult
from baton.errors import Unavailable
from baton.kv.cluster_store_client import ClusterStoreClient
from baton.transport.host_memory import HostMemory
from testkit.fakes.kv_index import MemoryKvIndex
from testkit.fakes.transport import MemoryFabric, MemoryTransport

NODE = Member(WorkerId("store"), Role.KVSTORE, "store:1", Incarnation(1), WorkerState.READY)
KEYS = [BlockKey(bytes([number]) * 16) for number in range(4)]


def refs(keys: Sequence[BlockKey]) -> tuple[BlockRef, ...]:
    return tuple(BlockRef(0, 8, 0, key) for key in keys)


SOUND = LeasedBlocks("1", CHECKSUM_XXH3, refs(KEYS[:2]), num_stored=3, num_promoted=1)


class FakeConnection:
    """A connection to a node that returns the given answers."""

    def __init__(self, leased: LeasedBlocks, endpoint: Endpoint) -> None:
        self._leased = leased
        self._endpoint = endpoint
        self.num_closed = 0

    async def lease(self, query: LeaseRequest) -> LeasedBlocks:
        return self._leased

    async def open(self, transports: Sequence[str], host: str) -> Endpoint:
        return self._endpoint

    async def put(self, request: PutRequest, timeout_seconds: float | None = None) -> PutResult:
        return PutResult(len(request.blocks), 0)

    async def close(self) -> None:
        self.num_closed += 1


class Links:
    """The connections of a client to nodes, and its membership."""

    def __init__(self) -> None:
        clock, fabric = ManualClock(), MemoryFabric()
        source = MemoryTransport(fabric, "store", 1, clock)
        source.register(HostMemory("store", 64).region)
        self.members: list[Member] = []
        self.opened: list[tuple[Member, FakeConnection]] = []
        self._endpoint = source.export()
        transports: Any = {"memory": source}
        membership: Any = self
        connect: Any = self.connect
        self.client = ClusterStoreClient(
            membership, MemoryKvIndex(), transports, connect, "here", clock, 1.0
        )

    def ready(self, role: Role) -> list[Member]:
        return self.members

    def connect(self, member: Member) -> FakeConnection:
        connection = FakeConnection(SOUND, self._endpoint)
        self.opened.append((member, connection))
        return connection

    @property
    def closed(self) -> list[Member]:
        return [member for member, connection in self.opened for _ in range(connection.num_closed)]


def client_of(leased: LeasedBlocks, **endpoint: Any) -> ClusterStoreClient:
    clock, fabric = ManualClock(), MemoryFabric()
    source = MemoryTransport(fabric, "store", 1, clock)
    source.register(HostMemory("store", 64).region)
    link = FakeConnection(leased, replace(source.export(), **endpoint))
    transports: Any = {"memory": MemoryTransport(fabric, "worker", 1, clock)}
    membership: Any = SimpleNamespace(members=[NODE])
    connect: Any = lambda member: link  # noqa: E731
    return ClusterStoreClient(membership, MemoryKvIndex(), transports, connect, "here", clock, 1.0)


async def test_valid_lease_is_accepted() -> None:
    lease = await client_of(SOUND).lease(NODE, KEYS, 1000)
    assert lease is not None and lease.leased == SOUND


@pytest.mark.parametrize(
    ("changes", "endpoint"),
    [
        ({"blocks": refs(KEYS[1:3])}, {}),
        ({"blocks": refs([*KEYS, KEYS[0]]), "num_stored": 5}, {}),
        ({"num_stored": 1}, {}),
        ({"num_stored": 5}, {}),
        ({"num_promoted": 3}, {}),
        ({}, {"owner": "another"}),
        ({}, {"transport": "nixl"}),
    ],
)
async def test_node_with_invalid_answers_is_avoided(
    changes: dict[str, Any], endpoint: dict[str, Any]
) -> None:
    client = client_of(replace(SOUND, **changes), **endpoint)
    with pytest.raises(Unavailable, match=r"leased|endpoint belongs to|was not offered"):
        await client.lease(NODE, KEYS, 1000)
    with pytest.raises(Unavailable, match="failed recently"):
        await client.lease(NODE, KEYS, 1000)


async def put(client: ClusterStoreClient) -> None:
    await client.put(refs(KEYS), CHECKSUM_XXH3, preceding_keys=(), tenant=b"", model=b"")


@pytest.mark.parametrize(
    "use",
    [
        put,
        lambda client: client.count_stored_at_put_target(KEYS),
        lambda client: client.count_stored(client._usable()[0], KEYS),
    ],
)
async def test_connections_to_restarted_and_departed_nodes_are_closed(
    use: Callable[[ClusterStoreClient], Awaitable[object]],
) -> None:
    links = Links()
    node = replace(NODE, host="here", transports=("memory",))
    other = replace(node, id=WorkerId("store-2"))
    links.members = [node, other]
    await use(links.client)
    restarted = replace(node, generation=Incarnation(2))
    links.members = [restarted]
    for _ in range(2):
        await use(links.client)
    assert [member for member, _ in links.opened] == [node, other, restarted]
    assert links.closed == [node, other]
