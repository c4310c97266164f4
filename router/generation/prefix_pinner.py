"""Pins prefixes that clients marked with ``cache_control``, as soon as they are in a KV store."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.clock import Clock
from baton.core.credentials import ClusterCredentials
from baton.core.ids import BlockKey
from baton.core.member import Member
from baton.core.states import Role
from baton.errors import BatonError
from baton.rpc.kvstore_client import KvStoreClient
from router.generation.cluster import Cluster
from router.generation.record import GenerationRecord, PinRecord
from router.limits import MAX_PENDING_PINS, MAX_PIN_RETRY_SECONDS, MAX_STORES

STORE_ARRIVAL_TIMEOUT_SECONDS = 10.0
"""How long to wait, after the end of the answer, for the prefix's blocks to arrive at the store."""

INITIAL_RETRY_SECONDS = 0.05

PIN_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PrefixPin:
    """A prefix to be pinned for ``ttl_seconds``. ``num_tokens`` is the number of prompt tokens
    before the ``cache_control`` breakpoint, and ``block_keys`` are the keys of the full blocks of
    these tokens."""

    num_tokens: int
    block_keys: tuple[BlockKey, ...]
    ttl_seconds: float


class PinClient(Protocol):
    async def pin(self, store: Member, keys: Sequence[BlockKey], seconds: float) -> int:
        """Pin blocks at a store. Return how many leading blocks of ``keys`` the store has pinned.
        Raises BatonError."""
        ...

    async def close(self) -> None: ...


class GrpcPinClient:
    """Pins blocks over gRPC, with one connection per incarnation of a store."""

    def __init__(self, credentials: ClusterCredentials | str | None) -> None:
        self._credentials = credentials
        self._clients: OrderedDict[tuple[str, int], KvStoreClient] = OrderedDict()

    async def pin(self, store: Member, keys: Sequence[BlockKey], seconds: float) -> int:
        return await (await self._client(store)).pin(keys, seconds)

    async def close(self) -> None:
        while self._clients:
            await self._clients.popitem()[1].close()

    async def _client(self, store: Member) -> KvStoreClient:
        key = (store.address, int(store.generation))
        client = self._clients.get(key)
        if client is None:
            client = KvStoreClient(
                store.address, self._credentials, call_seconds=PIN_TIMEOUT_SECONDS
            )
            self._clients[key] = client
        while len(self._clients) > MAX_STORES:
            await self._clients.popitem(last=False)[1].close()
        return client


class PrefixPinner:
    """Pins prefixes in the background. No request waits for pins or fails because of them; `baton
    explain` shows what was pinned."""

    def __init__(self, cluster: Cluster, pin_client: PinClient, clock: Clock) -> None:
        self._cluster = cluster
        self._pin_client = pin_client
        self._clock = clock
        self._num_waiting = 0
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Pin prefixes until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await asyncio.get_running_loop().create_future()
        finally:
            self._tasks = None
            await self._pin_client.close()

    def pin_when_stored(self, record: GenerationRecord, pins: Sequence[PrefixPin]) -> None:
        """Pin the prefixes ``pins`` of the request's prompt as soon as a store has them.
        ``record.pins`` shows which blocks were pinned."""
        for pin in pins:
            pin_record = PinRecord(pin.num_tokens, pin.ttl_seconds)
            record.pins.append(pin_record)
            if not pin.block_keys:
                pin_record.error = "no full block is before the breakpoint"
            elif self._tasks is None or self._num_waiting >= MAX_PENDING_PINS:
                pin_record.error = f"{self._num_waiting} other prefixes wait to be pinned"
            else:
                pin_record.error = "not stored yet"
                self._num_waiting += 1
                task = self._tasks.create_task(self._pin_until_done(record, pin, pin_record))
                task.add_done_callback(self._on_task_done)

    def _on_task_done(self, _: asyncio.Task[None]) -> None:
        self._num_waiting -= 1

    async def _pin_until_done(
        self, record: GenerationRecord, pin: PrefixPin, pin_record: PinRecord
    ) -> None:
        pause, give_up_at = INITIAL_RETRY_SECONDS, float("inf")
        while self._clock.monotonic() < give_up_at:
            if record.cached_tokens is not None:
                await self._try_pin(record, pin, pin_record)
                if pin_record.pinned_blocks == len(pin.block_keys):
                    return
            if record.finish_reason and give_up_at == float("inf"):
                if record.cached_tokens is None:
                    pin_record.error = "the prompt was not computed"
                    return
                give_up_at = self._clock.monotonic() + STORE_ARRIVAL_TIMEOUT_SECONDS
            await self._clock.sleep(pause)
            pause = min(2 * pause, MAX_PIN_RETRY_SECONDS)

    async def _try_pin(
        self, record: GenerationRecord, pin: PrefixPin, pin_record: PinRecord
    ) -> None:
        """Pin the prefix at the store on the host of the worker that computed the prompt. If that
        store does not have all blocks, try the other stores too, until one has pinned all
        blocks."""
        stores = self._stores_by_distance(record)
        if not stores:
            pin_record.error = "there is no KV store"
        for store in stores:
            try:
                pinned = await self._pin_client.pin(store, pin.block_keys, pin.ttl_seconds)
            except BatonError as error:
                pin_record.error = f"{store.id}: {error}"
                continue
            pin_record.record_pinned(pinned, len(pin.block_keys), store.id)
            if pinned == len(pin.block_keys):
                return

    def _stores_by_distance(self, record: GenerationRecord) -> list[Member]:
        worker = record.prefill or record.decode
        hosts = {member.id: member.host for member in self._cluster.members}
        host = hosts.get(worker.id) if worker is not None else None
        stores = self._cluster.ready_members(Role.KVSTORE)
        return sorted(stores, key=lambda store: (store.host != host, store.id))
