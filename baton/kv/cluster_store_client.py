"""A worker's client of the cluster's store nodes. It chooses the node, the transport and the
timeout."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.ids import BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef, Endpoint
from baton.core.member import Member
from baton.core.states import Role
from baton.core.store import (
    ALL_CODECS,
    RAW_ONLY,
    LeasedBlocks,
    LeaseRequest,
    PutRequest,
    PutResult,
    StoreHint,
)
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Invalid,
    Overloaded,
    Unavailable,
)
from baton.kv.circuit_breaker import StoreCircuitBreaker
from baton.kv.index import KvHolder, KvIndex
from baton.registry.membership import Membership
from baton.transport.base import Peer, Transport
from baton.transport.selection import choose_transport

LEASE_DURATION_SECONDS = 10.0
PUT_TIMEOUT_SECONDS = 10.0
"""Timeout of a put. Puts run in the background; no request waits for them."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoreLease:
    """Leased blocks of one node. They can be read from ``peer`` until the lease is released or
    expires."""

    node: Member
    transport: Transport
    peer: Peer
    leased: LeasedBlocks

    @property
    def blocks(self) -> tuple[BlockRef, ...]:
        return self.leased.blocks


class StoreNodeClient(Protocol):
    """A client of one node, such as :class:`baton.rpc.kvstore_client.KvStoreClient`."""

    async def open(self, transports: Sequence[str], host: str) -> Endpoint: ...

    async def put(self, request: PutRequest, timeout_seconds: float | None = None) -> PutResult: ...

    async def lease(self, query: LeaseRequest) -> LeasedBlocks: ...

    async def release(self, lease_id: str) -> None: ...

    async def report_damaged(self, keys: Sequence[BlockKey]) -> int: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _NodeEntry:
    member: Member
    client: StoreNodeClient
    breaker: StoreCircuitBreaker = field(default_factory=StoreCircuitBreaker)
    link: tuple[Transport, Peer] | None = None


class ClusterStoreClient:
    """Client of all store nodes. Every call that a request waits for takes ``call_seconds`` at
    most, and a node that failed is avoided for a while (a circuit breaker). So a failing store
    costs a recomputation, but no stall.

    A prefix is looked up at the node that the placement's hint names. Without a hint, it is looked
    up at the only node or, if there are several, at the node that the index names; while the index
    can't be reached, at the node of this host. New blocks go to the node of this host if it is
    usable, otherwise to the first usable node by id.
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
        codecs: frozenset[KvCodecName] = RAW_ONLY,
    ) -> None:
        """``codecs`` are the codecs of blocks that the worker can read."""
        self._codecs = codecs
        self._membership = membership
        self._index = index
        self._transports = transports
        self._connect = connect
        self._host = host
        self._clock = clock
        self._call_seconds = call_seconds
        self._nodes: dict[str, _NodeEntry] = {}
        self._retired: list[StoreNodeClient] = []

    @property
    def has_nodes(self) -> bool:
        """Whether the cluster has ready store nodes, usable now or not."""
        return bool(self._membership.ready(Role.KVSTORE))

    async def find_node(self, keys: Sequence[BlockKey], hint: StoreHint | None) -> Member | None:
        """Return the node from which to lease ``keys``, or None if there is no such node."""
        stores = self._usable()
        if hint is not None:
            named = [member for member in stores if member.id == hint.node]
            if named:
                return named[0]
        if len(stores) < 2:
            return stores[0] if stores else None
        return await self._find_in_index(keys, stores)

    @property
    def has_usable_nodes(self) -> bool:
        """Whether at least one node is usable now."""
        return bool(self._usable())

    async def count_stored(self, node: Member, keys: Sequence[BlockKey]) -> int:
        """Return how many leading ``keys`` the node has, without leasing them. Raises the same
        errors as :meth:`lease`."""
        await self._close_retired()
        return await self._count(self._node(node), keys, self._codecs)

    async def lease(
        self, node: Member, keys: Sequence[BlockKey], max_bytes: int
    ) -> StoreLease | None:
        """Lease the longest prefix of ``keys`` that the node has, up to ``max_bytes``. Return None
        if nothing was leased. Raises the node's errors, and Unavailable while its circuit breaker
        is open."""
        await self._close_retired()
        entry = self._node(node)
        async with self._guarded(entry):
            query = LeaseRequest(tuple(keys), LEASE_DURATION_SECONDS, max_bytes, self._codecs)
            leased = await entry.client.lease(query)
            if not leased.lease_id:
                return None
            _check_leased(node, query, leased)
            transport, peer = await self._link(entry)
        return StoreLease(node, transport, peer, leased)

    async def release(self, lease: StoreLease) -> None:
        """Release a lease. Errors are ignored, since the lease expires by itself."""
        try:
            await self._node(lease.node).client.release(lease.leased.lease_id)
        except BatonError:
            return

    async def report_damaged(self, lease: StoreLease, keys: Sequence[BlockKey]) -> None:
        """Report blocks that arrived corrupted, so that the node verifies its copies."""
        try:
            await self._node(lease.node).client.report_damaged(keys)
        except BatonError as error:
            log.info("damage_report_failed", node=lease.node.id, error=str(error))

    def record_read_failure(self, lease: StoreLease) -> None:
        """Record that a read from the lease's node failed, so that the node is avoided for a
        while."""
        node = self._node(lease.node)
        node.link = None  # the next lease reconnects
        node.breaker.record_failure(self._clock.monotonic())

    async def remove_stale_hint(self, node: Member, keys: Sequence[BlockKey]) -> None:
        """Remove the index entries that name ``node`` as a holder of ``keys``, which it does not
        have."""
        if len(self._usable()) < 2:
            return  # with a single node, the index was not asked
        try:
            await self._index.remove(KvHolder(node.id, node.generation), keys)
        except BatonError as error:
            log.info("stale_hint_not_removed", error=str(error))

    async def count_stored_at_put_target(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading ``keys`` are stored on the node to which :meth:`put` would send
        blocks, in whatever codecs. Raises the same errors as :meth:`put`."""
        await self._close_retired()
        return await self._count(self._target(), keys, ALL_CODECS)

    async def put(
        self,
        blocks: Sequence[BlockRef],
        checksum_algorithm: str,
        *,
        preceding_keys: Sequence[BlockKey],
        tenant: bytes,
        model: bytes,
        layout: str = "",
        exact: bool = True,
    ) -> None:
        """Put blocks on a node. They follow the blocks ``preceding_keys`` of the same chain, which
        the node already has. ``layout`` and ``exact``: see :class:`PutRequest`. Raises Unavailable
        if no node is usable, and the node's errors."""
        await self._close_retired()
        entry = self._target()
        same_host = entry.member.host == self._host
        name = choose_transport(tuple(self._transports), entry.member.transports, same_host)
        source = self._transports[name].export()
        request = PutRequest(
            source,
            checksum_algorithm,
            tuple(blocks),
            preceding_keys=tuple(preceding_keys),
            first_block=len(preceding_keys),
            tenant=tenant,
            model=model,
            layout=layout,
            exact=exact,
        )
        async with self._guarded(entry):
            await entry.client.put(request, PUT_TIMEOUT_SECONDS)

    async def close(self) -> None:
        self._retired += [node.client for node in self._nodes.values()]
        self._nodes.clear()
        await self._close_retired()

    # -- parts -----------------------------------------------------------------------------

    async def _count(
        self, entry: _NodeEntry, keys: Sequence[BlockKey], codecs: frozenset[KvCodecName]
    ) -> int:
        query = LeaseRequest(tuple(keys), LEASE_DURATION_SECONDS, 0, codecs)
        async with self._guarded(entry):
            leased = await entry.client.lease(query)
        return leased.num_stored

    def _target(self) -> _NodeEntry:
        stores = self._usable()
        if not stores:
            raise Unavailable("no store node is usable")
        return self._node(stores[0])

    def _usable(self) -> list[Member]:
        """Return the nodes that are ready and whose circuit breaker allows a request now. Nodes of
        this host come first; otherwise, the order is by id."""
        now = self._clock.monotonic()
        stores = self._membership.ready(Role.KVSTORE)
        usable = [member for member in stores if self._node(member).breaker.allows_request(now)]
        return sorted(usable, key=lambda member: (member.host != self._host, member.id))

    async def _find_in_index(self, keys: Sequence[BlockKey], stores: list[Member]) -> Member | None:
        try:
            async with asyncio.timeout(self._call_seconds):
                hit = await self._index.longest_prefix(keys)
        except (Unavailable, TimeoutError):
            return stores[0]
        holders = {(holder.node, holder.generation) for holder in hit.holders}
        return next((m for m in stores if (m.id, m.generation) in holders), None)

    @asynccontextmanager
    async def _guarded(self, node: _NodeEntry) -> AsyncIterator[None]:
        """Context manager around one call, which records the call's result in the circuit breaker.
        A refusal by the node (Invalid, Overloaded) counts as success."""
        breaker = node.breaker
        if not breaker.allows_request(self._clock.monotonic()):
            raise Unavailable(
                f"store node {node.member.id} is not used for a while, because it failed recently"
            )
        breaker.begin_request()
        try:
            yield
        except (Unavailable, DeadlineExceeded):
            breaker.record_failure(self._clock.monotonic())
            raise
        except (Invalid, Overloaded):
            breaker.record_success()
            raise
        except BaseException:
            breaker.record_cancellation()
            raise
        else:
            breaker.record_success()

    def _node(self, member: Member) -> _NodeEntry:
        """Return the entry of a node. Each generation of the node has an entry and a client of its
        own."""
        present = self._nodes.get(member.id)
        if present is None or present.member.generation != member.generation:
            if present is not None:
                self._retired.append(present.client)
            present = self._nodes[member.id] = _NodeEntry(member, self._connect(member))
        return present

    async def _close_retired(self) -> None:
        """Close the clients of earlier generations, and of nodes that left the cluster."""
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
                raise Unavailable(
                    f"store node {node.member.id} chose transport {endpoint.transport!r}, which "
                    "was not offered"
                )
            if endpoint.owner != node.member.id:
                raise Unavailable(
                    f"store node {node.member.id} sent a wrong endpoint: the endpoint belongs to "
                    f"{endpoint.owner!r}"
                )
            node.link = (transport, await self._connect_transport(transport, endpoint))
        return node.link

    async def _connect_transport(self, transport: Transport, endpoint: Endpoint) -> Peer:
        """Connect in a thread. If that takes longer than ``call_seconds``, raise DeadlineExceeded.
        The thread can't be interrupted, so it then finishes in the background, and its result is
        ignored."""
        connecting = asyncio.ensure_future(run_in_thread(lambda: transport.connect(endpoint)))
        done, _ = await asyncio.wait([connecting], timeout=self._call_seconds)
        if not done:
            connecting.add_done_callback(_consume_exception)
            raise DeadlineExceeded(
                f"can't connect to {endpoint.owner} over transport {endpoint.transport} within "
                f"{self._call_seconds:g} s"
            )
        return connecting.result()


def _check_leased(node: Member, query: LeaseRequest, leased: LeasedBlocks) -> None:
    """Raise Unavailable, as if the node had failed, if ``leased`` has blocks other than those
    requested, codecs other than those accepted, or inconsistent counts."""
    blocks, keys = leased.blocks, query.keys
    if not {block.codec for block in blocks} <= query.codecs:
        raise Unavailable(f"store node {node.id} leased blocks in a codec that was not asked for")
    if [block.key for block in blocks] != list(keys[: len(blocks)]):
        raise Unavailable(f"store node {node.id} leased blocks other than those requested")
    if not len(blocks) <= leased.num_stored <= len(keys) or leased.num_promoted > len(blocks):
        raise Unavailable(
            f"store node {node.id} sent inconsistent counts of blocks: {len(keys)} requested, "
            f"{leased.num_stored} stored, {len(blocks)} leased, {leased.num_promoted} leased from "
            "disk"
        )


def _consume_exception(connecting: "asyncio.Future[Peer]") -> None:
    if not connecting.cancelled():
        connecting.exception()
