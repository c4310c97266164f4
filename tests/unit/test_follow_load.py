"""Who makes the pools follow the load: the supervisor for its own, a conductor for Kubernetes'."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.config import Settings, load_settings
from baton.core.ids import Generation, WorkerId
from baton.core.member import Member
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role, WorkerState
from baton.registry.membership import Membership
from baton.registry.memory import MemoryRegistry
from baton.runtime import supervisor as supervisor_module
from conductor import program as conductor_program
from conductor.program import ConductorProgram
from tests.unit.test_supervisor import House

PLAN = PoolPlan(1, 2, "why", 1, 1, 1.0, 1000.0, 100.0, 0.0)


async def test_the_supervisor_follows_its_conductors_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def ask(address: str, secret: str | None) -> PoolPlan:
        asked.append((address, secret))
        return PLAN

    monkeypatch.setattr(supervisor_module, "ask_pool_plan", ask)
    house = House(
        tmp_path, monkeypatch, prefill=2, decode=1, autoscale="on", autoscale_seconds=0.05,
        autoscale_stable_seconds=0.0, autoscale_cooldown_seconds=0.0, cluster_secret="s",
    )  # fmt: skip

    def sizes() -> tuple[int, int]:
        states = [(process.role, process.state) for process in house.state.processes]
        return states.count(("prefill", "serving")), states.count(("decode", "serving"))

    async with house.running():
        await house.until(lambda: sizes() == (1, 2))
    assert set(asked) == {("127.0.0.1:1009", "s")}


async def test_of_several_conductors_the_first_resizes() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    for name in ("b", "a"):
        address, state = f"{name}:1", WorkerState.READY
        one = Member(WorkerId(name), Role.CONDUCTOR, address, Generation(1), state)
        await registry.announce(one, 60.0)
    membership = Membership(registry, clock)
    await membership.refresh()
    told = [await follows(name, membership) for name in ("a", "b", "c")]
    assert told == [PLAN, None, None]


async def follows(name: str, membership: Membership) -> PoolPlan | None:
    class Planned:
        def pool_plan(self) -> PoolPlan:
            return PLAN

    program = ConductorProgram(load_settings(id=name, redis_url="redis://127.0.0.1:1/0"))
    program._membership, program._conductor = membership, Planned()  # type: ignore[assignment]
    try:
        return await program._plan_to_follow()
    finally:
        await program.stop()


async def test_a_conductor_opens_the_pools_of_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    @asynccontextmanager
    async def pools(settings: Settings, clock: object, note: object) -> AsyncIterator[object]:
        opened.append((settings.cluster, settings.kubernetes_namespace))
        yield object()

    monkeypatch.setattr(conductor_program, "kubernetes_pools", pools)
    settings = load_settings(
        cluster="c", kubernetes_namespace="models", autoscale_pools="kubernetes",
        redis_url="redis://127.0.0.1:1/0",
    )  # fmt: skip
    program = ConductorProgram(settings, ManualClock())
    await program._resize()  # autoscale is off
    await program.stop()
    assert opened == [("c", "models")]
