"""Tests a member's heartbeat, and the view of the registry that other members keep."""

import asyncio
from dataclasses import replace

import pytest

from baton.clock import ManualClock
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.errors import Unavailable
from baton.registry.heartbeat import TTL_HEARTBEATS, Heartbeat
from baton.registry.membership import REJOIN_SECONDS, Membership
from testkit.fakes.registry import MemoryRegistry

LONG = 60.0


def member(name: str, generation: int = 1) -> Member:
    return Member(
        WorkerId(name), Role.PREFILL, "127.0.0.1:1", Incarnation(generation), WorkerState.READY
    )


async def test_heartbeat_survives_an_outage_and_yields_to_a_newer_incarnation() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    heart = Heartbeat(registry, lambda: member("a", 1), clock, interval_seconds=1.0)
    await heart.announce()
    registry.is_reachable = False
    await heart.announce()
    registry.is_reachable = True
    clock.advance(TTL_HEARTBEATS - 0.5)
    assert await registry.members() == [member("a", 1)]
    clock.advance(0.5)
    assert await registry.members() == []
    await heart.announce()
    assert await registry.members() == [member("a", 1)]
    await registry.announce(member("a", 2), LONG)
    with pytest.raises(Unavailable, match="a newer process of a has taken over"):
        await heart.announce()


async def test_membership_keeps_members_during_an_outage() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mirror = Membership(registry, clock)
    drains = replace(member("b"), state=WorkerState.DRAINING)
    await registry.announce(member("a"), LONG)
    await registry.announce(drains, LONG)
    await mirror.refresh()
    assert mirror.members == [member("a"), drains]
    assert mirror.ready(Role.PREFILL) == [member("a")]
    assert mirror.ready(Role.DECODE) == []
    registry.is_reachable = False
    clock.advance(86_400.0)
    await mirror.refresh()
    assert mirror.members == [member("a"), drains]


async def test_members_are_kept_for_a_while_if_all_disappear_at_once() -> None:
    """The registry may have been restarted. Then members that are alive announce themselves again
    within one or two heartbeats."""
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mirror = Membership(registry, clock)
    for name in "abc":
        await registry.announce(member(name), LONG)
    await mirror.refresh()
    for name in "abc":
        await registry.withdraw(WorkerId(name), Incarnation(1))
    await mirror.refresh()
    assert mirror.members == [member("a"), member("b"), member("c")]
    await registry.announce(member("b", 2), LONG)
    clock.advance(REJOIN_SECONDS - 0.1)
    await mirror.refresh()
    assert mirror.members == [member("a"), member("b", 2), member("c")]
    clock.advance(0.1)
    await mirror.refresh()
    assert mirror.members == [member("b", 2)]


@pytest.mark.parametrize("why", ["outage", "restart"])
async def test_missing_members_are_kept_for_a_while_after_an_outage_or_restart(why: str) -> None:
    """The registry is back, but has no entry of the member c, which may not have announced itself
    again yet. So c is kept for REJOIN_SECONDS."""
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mirror = Membership(registry, clock)
    for name in "abc":
        await registry.announce(member(name), LONG)
    await mirror.refresh()
    if why == "outage":
        registry.is_reachable = False
        await mirror.refresh()
        registry.is_reachable = True
    else:
        registry.database_id += "'"
    await registry.withdraw(WorkerId("c"), Incarnation(1))
    await mirror.refresh()
    assert mirror.members == [member("a"), member("b"), member("c")]
    clock.advance(REJOIN_SECONDS)
    await mirror.refresh()
    assert mirror.members == [member("a"), member("b")]


async def test_drained_members_are_removed_at_once() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mirror = Membership(registry, clock)
    for name in "abc":
        await registry.announce(replace(member(name), state=WorkerState.DRAINING), LONG)
    await mirror.refresh()
    for name in "abc":
        await registry.withdraw(WorkerId(name), Incarnation(1))
    await mirror.refresh()
    assert mirror.members == []


async def test_membership_polls_at_its_interval() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mirror = Membership(registry, clock, interval_seconds=0.5)
    async with asyncio.TaskGroup() as tasks:
        polling = tasks.create_task(mirror.run())
        await settled()
        await registry.announce(member("a"), LONG)
        await registry.announce(member("b"), LONG)
        clock.advance(0.49)
        await settled()
        assert mirror.members == []
        clock.advance(0.01)
        await settled()
        assert mirror.members == [member("a"), member("b")]
        await registry.withdraw(WorkerId("a"), Incarnation(1))
        clock.advance(0.5)
        await settled()
        assert mirror.members == [member("b")]
        polling.cancel()


async def settled() -> None:
    """Let all tasks run until every call of the in-memory registry has returned or waits."""
    for _ in range(5):
        await asyncio.sleep(0)


class SlowRegistry(MemoryRegistry):
    """A registry whose announcements wait for ``gate``."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.announced: list[WorkerState] = []
        self.gate = asyncio.Event()

    async def announce(self, member: Member, ttl_seconds: float) -> bool:
        self.announced.append(member.state)
        await self.gate.wait()
        return await super().announce(member, ttl_seconds)


async def test_change_during_a_heartbeat_triggers_another() -> None:
    registry = SlowRegistry()
    now = member("a")
    heart = Heartbeat(registry, lambda: now, ManualClock(), interval_seconds=LONG)
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(heart.run())
        await settled()
        now = replace(now, state=WorkerState.DRAINING)
        heart.announce_now()
        registry.gate.set()
        await settled()
        assert registry.announced == [WorkerState.READY, WorkerState.DRAINING]
        assert await registry.members() == [now]
        beating.cancel()
    assert await registry.members() == []  # withdrawn
    assert len(registry.announced) == 2


async def test_newer_incarnation_ends_the_heartbeat_and_stays() -> None:
    registry = MemoryRegistry(ManualClock())
    await registry.announce(member("a", 2), LONG)
    heart = Heartbeat(registry, lambda: member("a", 1), ManualClock(), interval_seconds=LONG)
    with pytest.raises(Unavailable, match="a newer process of a has taken over"):
        await heart.run()
    assert await registry.members() == [member("a", 2)]
