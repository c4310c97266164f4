"""A worker's client of the cluster's store nodes: which one to ask, and over what."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.handoff import BlockRef, Endpoint
from baton.core.ids import BlockKey
from baton.core.member import Member
from baton.core.states import Role
from baton.core.store import PutRequest
from baton.errors import BatonError, Unavailable
from baton.kv.index import KvIndex
from baton.registry.membership import Membership
from baton.rpc.kvstore_client import KvStoreClient
from baton.transport.base import Transport
from baton.transport.select import choose


@dataclass(frozen=True, slots=True)
class StoreLease:
    """Blocks of one node, safe to read over ``endpoint`` until released."""

    node: Member
    endpoint: Endpoint
    lease_id: str
    checksum_algorithm: str
    blocks: tuple[BlockRef, ...]


@dataclass(slots=True)
class _Node:
    member: Member
    client: KvStoreClient
    endpoint: Endpoint | None = None


class StoreClient:
    """The index says who holds a prefix; while it can't be reached, the store of this host is
    asked instead. New blocks go to the store of this host, or to the first there is."""

    def __init__(
        self,
        membership: Membership,
        index: KvIndex,
        transports: Sequence[str],
        secret: str | None,
        host: str,
    ) -> None:
        self._membership = membership
        self._index = index
        self._transports = tuple(transports)
        self._secret = secret
        self._host = host
        self._nodes: dict[str, _Node] = {}

    async def lease(self, keys: Sequence[BlockKey], seconds: float) -> StoreLease | None:
        """The longest prefix that a node holds, leased; None when none holds any. Raises what
        the node does."""
        node = await self._holder(keys)
        if node is None:
            return None
        leased = await node.client.lease(keys, seconds)
        if not leased.lease_id:
            return None
        endpoint = await self._endpoint(node)
        return StoreLease(
            node.member, endpoint, leased.lease_id, leased.checksum_algorithm, leased.blocks
        )

    async def release(self, lease: StoreLease) -> None:
        """A lease that can't be given back ends by itself."""
        try:
            await self._node(lease.node).client.release(lease.lease_id)
        except BatonError:
            return

    async def put(
        self,
        transports: dict[str, Transport],
        blocks: Sequence[BlockRef],
        checksum_algorithm: str,
    ) -> None:
        """Raises Unavailable when there is no store, and what it says."""
        node = self._nearest()
        if node is None:
            raise Unavailable("there is no store node")
        same_host = node.member.host == self._host
        name = choose(tuple(transports), node.member.transports, same_host)
        source = transports[name].export()
        await node.client.put(PutRequest(source, checksum_algorithm, tuple(blocks)))

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.client.close()
        self._nodes.clear()

    async def _holder(self, keys: Sequence[BlockKey]) -> _Node | None:
        try:
            hit = await self._index.longest_prefix(keys)
        except Unavailable:
            return self._nearest()
        lives = {(m.id, m.generation): m for m in self._membership.ready(Role.KVSTORE)}
        held = [lives.get((holder.node, holder.generation)) for holder in hit.holders]
        alive = [member for member in held if member is not None]
        nearest = sorted(alive, key=lambda member: (member.host != self._host, member.id))
        return self._node(nearest[0]) if nearest else None

    def _nearest(self) -> _Node | None:
        stores = self._membership.ready(Role.KVSTORE)
        ordered = sorted(stores, key=lambda member: (member.host != self._host, member.id))
        return self._node(ordered[0]) if ordered else None

    def _node(self, member: Member) -> _Node:
        """One client per life of a node."""
        present = self._nodes.get(member.id)
        if present is None or present.member.generation != member.generation:
            present = _Node(member, KvStoreClient(member.address, self._secret))
            self._nodes[member.id] = present
        return present

    async def _endpoint(self, node: _Node) -> Endpoint:
        if node.endpoint is None:
            node.endpoint = await node.client.open(self._transports, self._host)
        return node.endpoint
