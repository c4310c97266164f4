"""Asks the stores to keep prefixes that clients have marked, once they are stored."""

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

MAX_PENDING_PINS = 256
"""Requests whose prefixes are to be pinned; a further one is told that they were not."""

MAX_STORES = 64
"""Connections; the one that was opened first is closed for a further one."""

STORE_ARRIVAL_TIMEOUT_SECONDS = 10.0
"""For the blocks to arrive at the store, after the end of the answer."""

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0

PIN_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PrefixPin:
    """A prefix to be kept: its full blocks. ``num_tokens`` of the prompt are before the
    breakpoint."""

    num_tokens: int
    keys: tuple[BlockKey, ...]
    seconds: float


class PinClient(Protocol):
    async def pin(self, store: Member, keys: Sequence[BlockKey], seconds: float) -> int:
        """How many leading blocks are kept. Raises BatonError."""
        ...

    async def close(self) -> None: ...


class GrpcPinClient:
    """Over gRPC, with a connection per life of a store."""

    def __init__(self, trust: ClusterCredentials | str | None) -> None:
        self._trust = trust
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
            client = KvStoreClient(store.address, self._trust, call_seconds=PIN_TIMEOUT_SECONDS)
            self._clients[key] = client
        while len(self._clients) > MAX_STORES:
            await self._clients.popitem(last=False)[1].close()
        return client


class PrefixPinner:
    """Nobody waits for it: a store that can't pin costs nothing, and `baton explain` says so."""

    def __init__(self, cluster: Cluster, stores: PinClient, clock: Clock) -> None:
        self._cluster = cluster
        self._stores = stores
        self._clock = clock
        self._num_waiting = 0
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await asyncio.get_running_loop().create_future()
        finally:
            self._tasks = None
            await self._stores.close()

    def expect(self, record: GenerationRecord, pins: Sequence[PrefixPin]) -> None:
        """These prefixes of the request's prompt are to be pinned as soon as they are stored."""
        for pin in pins:
            noted = PinRecord(pin.num_tokens, pin.seconds)
            record.pins.append(noted)
            if not pin.keys:
                noted.error = "no full block is before the breakpoint"
            elif self._tasks is None or self._num_waiting >= MAX_PENDING_PINS:
                noted.error = f"{self._num_waiting} others wait to be pinned"
            else:
                noted.error = "not stored yet"
                self._num_waiting += 1
                task = self._tasks.create_task(self._pin(record, pin, noted))
                task.add_done_callback(self._forget)

    def _forget(self, _: asyncio.Task[None]) -> None:
        self._num_waiting -= 1

    async def _pin(self, record: GenerationRecord, pin: PrefixPin, noted: PinRecord) -> None:
        pause, give_up_at = FIRST_PAUSE_SECONDS, float("inf")
        while self._clock.monotonic() < give_up_at:
            if record.cached_tokens is not None:
                await self._try(record, pin, noted)
                if noted.pinned_blocks == len(pin.keys):
                    return
            if record.finish_reason and give_up_at == float("inf"):
                if record.cached_tokens is None:
                    noted.error = "the prompt was not read"
                    return
                give_up_at = self._clock.monotonic() + STORE_ARRIVAL_TIMEOUT_SECONDS
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _try(self, record: GenerationRecord, pin: PrefixPin, noted: PinRecord) -> None:
        """At the store that the worker of the prompt publishes to, and if that has not got all of
        it, at others."""
        stores = self._stores_near(record)
        if not stores:
            noted.error = "there is no store"
        for store in stores:
            try:
                pinned = await self._stores.pin(store, pin.keys, pin.seconds)
            except BatonError as error:
                noted.error = f"{store.id}: {error}"
                continue
            noted.note(pinned, len(pin.keys), store.id)
            if pinned == len(pin.keys):
                return

    def _stores_near(self, record: GenerationRecord) -> list[Member]:
        worker = record.prefill or record.decode
        hosts = {member.id: member.host for member in self._cluster.members}
        host = hosts.get(worker.id) if worker is not None else None
        stores = self._cluster.ready(Role.KVSTORE)
        return sorted(stores, key=lambda store: (store.host != host, store.id))
