"""A worker's client of the cluster's store nodes: which one to ask, over what, and how long."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockKey
from baton.core.kv_transfer import BlockRef, Endpoint
from baton.core.member import Member
from baton.core.states import Role
from baton.core.store import LeasedBlocks, LeaseRequest, PutRequest, PutResult, StoreHint
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Invalid,
    Overloaded,
    Unavailable,
)
from baton.kv.circuit_breaker import CircuitBreaker
from baton.kv.index import KvHolder, KvIndex
from baton.registry.membership import Membership
from baton.transport.base import Peer, Transport
from baton.transport.selection import choose_transport

LEASE_DURATION_SECONDS = 10.0
PUT_TIMEOUT_SECONDS = 10.0
"""In the background: nobody waits for a put."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoreLease:
    """Blocks of one node, safe to read from ``peer`` until released. The node holds
    ``num_held`` of the asked keys in all."""

    node: Member
    transport: Transport
    peer: Peer
    leased: LeasedBlocks

    @property
    def blocks(self) -> tuple[BlockRef, ...]:
        return self.leased.blocks


class StoreNodeClient(Protocol):
    """A connection to one node, as :class:`baton.rpc.kvstore_client.KvStoreClient` is one."""

    async def open(self, transports: Sequence[str], host: str) -> Endpoint: ...

    async def put(self, request: PutRequest, timeout_seconds: float | None = None) -> PutResult: ...

    async def lease(self, query: LeaseRequest) -> LeasedBlocks: ...

    async def release(self, lease_id: str) -> None: ...

    async def report(self, keys: Sequence[BlockKey]) -> int: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _NodeEntry:
    member: Member
    client: StoreNodeClient
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    link: tuple[Transport, Peer] | None = None


class ClusterStoreClient:
    """Every call that a request waits for takes ``call_seconds`` at most, and a node that failed
    is left alone for a while. So a store that is sick costs a recompute, never a stall.

    A prefix is looked for where the placement's hint says; without one, at the only node there
    is, or where the index says; while the index can't be reached, at the node of this host. New
    blocks go to the node of this host, or to the first there is.
    """

    def __init__(
        self,
        membership: Membership,
        index: KvIndex,
        transports: dict[str, Transport],
        connect: Callable[[Member], StoreNodeClient],
        host: str,
        clock: Clock,
        call_seconds: float,
    ) -> None:
        self._membership = membership
        self._index = index
        self._transports = transports
        self._connect = connect
        self._host = host
        self._clock = clock
        self._call_seconds = call_seconds
        self._nodes: dict[str, _NodeEntry] = {}
        self._retired: list[StoreNodeClient] = []

    async def find(self, keys: Sequence[BlockKey], hint: StoreHint | None) -> Member | None:
        """The node to lease ``keys`` from; None when there is none to ask."""
        stores = self._usable()
        if hint is not None:
            named = [member for member in stores if member.id == hint.node]
            if named:
                return named[0]
        if len(stores) < 2:
            return stores[0] if stores else None
        return await self._ask_index(keys, stores)

    @property
    def has_nodes(self) -> bool:
        """Whether there is any node that may be asked now."""
        return bool(self._usable())

    async def num_held(self, node: Member, keys: Sequence[BlockKey]) -> int:
        """How many leading ones of ``keys`` the node holds; pins nothing. Raises as
        :meth:`lease`."""
        entry = self._node(node)
        async with self._guarded(entry):
            leased = await entry.client.lease(LeaseRequest(tuple(keys), LEASE_DURATION_SECONDS, 0))
        return leased.num_held

    async def lease(
        self, node: Member, keys: Sequence[BlockKey], max_bytes: int
    ) -> StoreLease | None:
        """As much of the longest prefix as ``max_bytes`` take; None when the node has nothing.
        Raises what the node does, Unavailable while it is left alone."""
        await self._close_retired()
        entry = self._node(node)
        async with self._guarded(entry):
            query = LeaseRequest(tuple(keys), LEASE_DURATION_SECONDS, max_bytes)
            leased = await entry.client.lease(query)
            if not leased.lease_id:
                return None
            _check_leased(node, keys, leased)
            transport, peer = await self._link(entry)
        return StoreLease(node, transport, peer, leased)

    async def release(self, lease: StoreLease) -> None:
        """A lease that can't be given back ends by itself."""
        try:
            await self._node(lease.node).client.release(lease.leased.lease_id)
        except BatonError:
            return

    async def report(self, lease: StoreLease, keys: Sequence[BlockKey]) -> None:
        """These did not arrive as they should."""
        try:
            await self._node(lease.node).client.report(keys)
        except BatonError as error:
            log.info("report_failed", node=lease.node.id, error=str(error))

    def blame(self, lease: StoreLease) -> None:
        """A read from the node failed: it is left alone for a while."""
        node = self._node(lease.node)
        node.link = None  # the next lease connects anew
        node.breaker.fail(self._clock.monotonic())

    async def forget_hint(self, node: Member, keys: Sequence[BlockKey]) -> None:
        """``node`` was named for blocks that it does not have: the index shall not again."""
        if len(self._usable()) < 2:
            return  # nobody named it; it was the only one to ask
        try:
            await self._index.remove(KvHolder(node.id, node.generation), keys)
        except BatonError as error:
            log.info("index_not_repaired", error=str(error))

    async def count(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks are where a put would go. Raises as :meth:`put`."""
        return await self.num_held(self._target().member, keys)

    async def put(
        self,
        blocks: Sequence[BlockRef],
        checksum_algorithm: str,
        *,
        head: Sequence[BlockKey],
        tenant: bytes,
        model: bytes,
    ) -> None:
        """Blocks that follow on ``head``, which is there already. Raises Unavailable when there
        is no store that is well, and what it says."""
        entry = self._target()
        same_host = entry.member.host == self._host
        name = choose_transport(tuple(self._transports), entry.member.transports, same_host)
        source = self._transports[name].export()
        request = PutRequest(
            source,
            checksum_algorithm,
            tuple(blocks),
            head=tuple(head),
            first_block=len(head),
            tenant=tenant,
            model=model,
        )
        async with self._guarded(entry):
            await entry.client.put(request, PUT_TIMEOUT_SECONDS)

    async def close(self) -> None:
        self._retired += [node.client for node in self._nodes.values()]
        self._nodes.clear()
        await self._close_retired()

    # -- parts -----------------------------------------------------------------------------

    def _target(self) -> _NodeEntry:
        stores = self._usable()
        if not stores:
            raise Unavailable("there is no store node to put to")
        return self._node(stores[0])

    def _usable(self) -> list[Member]:
        """Nodes that may be asked now, those of this host first."""
        now = self._clock.monotonic()
        stores = self._membership.ready(Role.KVSTORE)
        well = [member for member in stores if self._node(member).breaker.allows(now)]
        return sorted(well, key=lambda member: (member.host != self._host, member.id))

    async def _ask_index(self, keys: Sequence[BlockKey], stores: list[Member]) -> Member | None:
        try:
            async with asyncio.timeout(self._call_seconds):
                hit = await self._index.longest_prefix(keys)
        except (Unavailable, TimeoutError):
            return stores[0]
        held = {(holder.node, holder.generation) for holder in hit.holders}
        return next((m for m in stores if (m.id, m.generation) in held), None)

    @asynccontextmanager
    async def _guarded(self, node: _NodeEntry) -> AsyncIterator[None]:
        """One call, whose fate the breaker learns. A node that answers no is well."""
        breaker = node.breaker
        if not breaker.allows(self._clock.monotonic()):
            raise Unavailable(f"store node {node.member.id} failed lately")
        breaker.enter()
        try:
            yield
        except (Unavailable, DeadlineExceeded):
            breaker.fail(self._clock.monotonic())
            raise
        except (Invalid, Overloaded):
            breaker.succeed()
            raise
        except BaseException:
            breaker.leave()
            raise
        else:
            breaker.succeed()

    def _node(self, member: Member) -> _NodeEntry:
        """One client per life of a node."""
        present = self._nodes.get(member.id)
        if present is None or present.member.generation != member.generation:
            if present is not None:
                self._retired.append(present.client)
            present = self._nodes[member.id] = _NodeEntry(member, self._connect(member))
        return present

    async def _close_retired(self) -> None:
        """Closes the clients of lives that have ended, and of nodes that left the cluster."""
        present = {member.id for member in self._membership.members}
        for node_id in self._nodes.keys() - present:
            self._retired.append(self._nodes.pop(node_id).client)
        while self._retired:
            await self._retired.pop().close()

    async def _link(self, node: _NodeEntry) -> tuple[Transport, Peer]:
        if node.link is None:
            endpoint: Endpoint = await node.client.open(tuple(self._transports), self._host)
            transport = self._transports.get(endpoint.transport)
            if transport is None:
                raise Unavailable(f"node chose {endpoint.transport!r}, which was not offered")
            if endpoint.owner != node.member.id:
                raise Unavailable(f"{node.member.id} offers the memory of {endpoint.owner!r}")
            node.link = (transport, await self._connected(transport, endpoint))
        return node.link

    async def _connected(self, transport: Transport, endpoint: Endpoint) -> Peer:
        """To connect may take long, and can't be interrupted: whoever waits longer than a call
        goes on without it."""
        connecting = asyncio.ensure_future(run_in_thread(lambda: transport.connect(endpoint)))
        done, _ = await asyncio.wait([connecting], timeout=self._call_seconds)
        if not done:
            connecting.add_done_callback(_ignore)
            raise DeadlineExceeded(f"can't connect to {endpoint.owner} in time")
        return connecting.result()


def _check_leased(node: Member, keys: Sequence[BlockKey], leased: LeasedBlocks) -> None:
    """Raises Unavailable, as of a node that is not well, for other blocks than were asked for."""
    blocks = leased.blocks
    if [block.key for block in blocks] != list(keys[: len(blocks)]):
        raise Unavailable(f"store node {node.id} lends other blocks than it was asked for")
    if not len(blocks) <= leased.num_held <= len(keys) or leased.num_promoted > len(blocks):
        raise Unavailable(
            f"store node {node.id} lends {len(blocks)} blocks, {leased.num_promoted} from disk, "
            f"and holds {leased.num_held} of {len(keys)}"
        )


def _ignore(connecting: "asyncio.Future[Peer]") -> None:
    if not connecting.cancelled():
        connecting.exception()
