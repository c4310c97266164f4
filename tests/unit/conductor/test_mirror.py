"""Tests the conductor's mirror of the KV stores: it applies their events, returns the best node for
a prefix, and detects lost events and dead nodes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.clock import ManualClock
from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.store import BlockFilter, StoreHint, Tier, WatchEvent
from baton.errors import Unavailable
from baton.registry.membership import REJOIN_SECONDS, Membership
from conductor.store_mirror import POLL_SECONDS, StoreMirror, StoreWatcher, reporting_workers
from testkit.fakes.registry import MemoryRegistry
from tests.store_harness import KEYS, StoreHarness

A, B = WorkerId("a"), WorkerId("b")


def page(
    number: int, *keys: BlockKey, tier: Tier = Tier.DRAM, life: int = 1, **marks: bool
) -> WatchEvent:
    return WatchEvent(Incarnation(life), number, tier, keys, **marks)


def test_node_with_the_longest_prefix_wins_and_ties_go_to_the_first() -> None:
    mirror = StoreMirror()
    assert mirror.best_node(KEYS) is None
    assert mirror.apply(B, page(5, *KEYS[:4], is_reset=True))
    assert mirror.apply(A, page(3, *KEYS[:4], is_reset=True))
    assert mirror.best_node(KEYS) == StoreHint(A, 4)
    assert mirror.apply(B, page(6, KEYS[4], tier=Tier.DISK))
    assert mirror.best_node(KEYS) == StoreHint(B, 5)
    assert mirror.best_node(KEYS[:2]) == StoreHint(A, 2)
    assert mirror.apply(B, page(7, *KEYS[2:5], tier=Tier.NONE))
    assert mirror.best_node(KEYS) == StoreHint(A, 4)
    assert [mirror.num_leading_blocks(node, KEYS) for node in (A, B, WorkerId("c"))] == [4, 2, 0]
    mirror.drop_node(A)
    assert mirror.best_node(KEYS) == StoreHint(B, 2)
    assert (mirror.num_blocks, mirror.position(A)) == (2, (0, 0))
    assert mirror.describe() == "b: generation 1, change 7, 2 blocks"


def test_events_after_a_gap_or_of_another_incarnation_are_rejected() -> None:
    mirror = StoreMirror()
    assert not mirror.apply(A, page(1, KEYS[0]))
    assert mirror.apply(A, page(1, KEYS[0], is_reset=True, has_more=True))
    assert mirror.apply(A, page(1, KEYS[1], tier=Tier.DISK))  # the snapshot's second page
    assert not mirror.apply(A, page(3, KEYS[2]))
    assert not mirror.apply(A, page(2, KEYS[2], life=2))
    assert mirror.best_node(KEYS) == StoreHint(A, 2)
    assert mirror.apply(A, page(9, KEYS[0], life=2, is_reset=True))
    assert mirror.best_node(KEYS) == StoreHint(A, 1)


def test_number_of_mirrored_blocks_per_node_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("conductor.store_mirror.MAX_NODE_BLOCKS", 3)
    mirror = StoreMirror()
    assert mirror.apply(A, page(1, *KEYS[:3], is_reset=True))
    for number in range(2, 9):
        assert mirror.apply(A, page(number, *KEYS[3:5]))
    assert (mirror.num_blocks, mirror.position(A)) == (3, (1, 8))
    assert mirror.apply(A, page(9, KEYS[0], tier=Tier.NONE))
    assert mirror.apply(A, page(10, KEYS[3]))
    assert mirror.num_blocks == 3


class Cluster:
    """A store node and a watcher of its events. Setting ``dead`` simulates the node's death; if
    ``lose`` is true, the next event is dropped."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = StoreHarness(clock=self.clock)
        self.registry = MemoryRegistry(self.clock)
        self.membership = Membership(self.registry, self.clock)
        self.mirror = StoreMirror()
        self.watchers = StoreWatcher(self.mirror, self.membership, self.watch, self.clock)
        self.dead = asyncio.Event()
        self.lose = False

    async def watch(
        self, node: Member, generation: Incarnation, number: int
    ) -> AsyncIterator[WatchEvent]:
        pages = self.store.node.watch(generation, number)
        while True:
            coming = asyncio.ensure_future(anext(pages))
            dying = asyncio.ensure_future(self.dead.wait())
            try:
                await asyncio.wait([coming, dying], return_when=asyncio.FIRST_COMPLETED)
            finally:
                dying.cancel()
            if self.dead.is_set():
                coming.cancel()
                raise Unavailable("the node died")
            if self.lose:
                self.lose = False
                continue
            yield coming.result()

    async def join(self) -> None:
        node = Member(A, Role.KVSTORE, "a:1", Incarnation(1), WorkerState.READY)
        await self.registry.announce(node, 3600.0)
        await self.membership.refresh()

    async def until(self, hint: StoreHint | None) -> None:
        while self.mirror.best_node(KEYS) != hint:
            self.clock.advance(POLL_SECONDS)
            await asyncio.sleep(0)


async def test_node_is_followed_lost_and_found_again() -> None:
    cluster = Cluster()
    await cluster.join()
    running = asyncio.create_task(cluster.watchers.run())
    await cluster.store.put(0, 1)
    await cluster.until(StoreHint(A, 2))
    await cluster.store.put(2)
    await cluster.until(StoreHint(A, 3))
    cluster.dead.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert cluster.mirror.best_node(KEYS) is None  # immediately: the clock has not advanced
    cluster.dead.clear()
    await cluster.until(StoreHint(A, 3))
    running.cancel()


async def test_missed_event_leads_to_a_new_snapshot() -> None:
    cluster = Cluster()
    await cluster.join()
    running = asyncio.create_task(cluster.watchers.run())
    await cluster.store.put(0)
    await cluster.until(StoreHint(A, 1))
    cluster.lose = True
    await cluster.store.put(1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert await cluster.store.node.purge(BlockFilter()) == 2
    await cluster.until(None)
    await cluster.store.put(0, 1, 2)
    await cluster.until(StoreHint(A, 3))
    running.cancel()


async def test_node_that_left_the_registry_is_not_returned() -> None:
    cluster = Cluster()
    await cluster.join()
    running = asyncio.create_task(cluster.watchers.run())
    await cluster.store.put(0)
    await cluster.until(StoreHint(A, 1))
    await cluster.registry.withdraw(A, Incarnation(1))
    await cluster.membership.refresh()
    # It was the only node, so that the registry might have lost its data: the node is kept for a
    # while.
    cluster.clock.advance(REJOIN_SECONDS)
    await cluster.membership.refresh()
    await cluster.until(None)
    running.cancel()


async def test_watcher_that_is_too_far_behind_gets_a_snapshot(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("baton.kv.event_log.MAX_CHANGES", 2)
    store = StoreHarness(dram_blocks=8)
    for number in range(5):
        await store.put(number)
    pages = store.node.watch(Incarnation(1), 1)
    first = await anext(pages)
    assert (first.is_reset, first.number, len(first.keys)) == (True, 5, 5)
    await store.put(5)
    assert (await anext(pages)).number == 6
    for number in (6, 7, 8, 9):
        await store.put(number)
    assert (await anext(pages)).is_reset
    await pages.aclose()


async def test_only_workers_that_report_their_blocks_are_watched() -> None:
    cluster = Cluster()
    watched: list[WorkerId] = []

    async def watch(
        node: Member, generation: Incarnation, number: int
    ) -> AsyncIterator[WatchEvent]:
        watched.append(node.id)
        yield page(3, *KEYS[:2], is_reset=True)
        await asyncio.Event().wait()

    watcher = StoreWatcher(
        cluster.mirror, cluster.membership, watch, cluster.clock, reporting_workers
    )
    for name, reports in ((A, True), (B, False)):
        state = WorkerState.READY
        member = Member(
            name, Role.MIXED, f"{name}:1", Incarnation(1), state, reports_blocks=reports
        )
        await cluster.registry.announce(member, 3600.0)
    await cluster.membership.refresh()
    running = asyncio.create_task(watcher.run())
    await cluster.until(StoreHint(A, 2))
    assert watched == [A]
    assert (cluster.mirror.knows(A), cluster.mirror.knows(B)) == (True, False)
    running.cancel()
