"""The local supervisor over real, tiny processes: order, restarts, pools, and the end."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from baton.clock import SystemClock
from baton.config import Settings, load_settings
from baton.core.states import Role
from baton.errors import Invalid, NotFound, Unavailable
from orchestrator import child_process as child_module
from orchestrator import supervisor as supervisor_module
from orchestrator.child_process import ChildProcess, ChildProcessSpec
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.supervisor import Supervisor

CLOCK = SystemClock()


class House:
    """A cluster of fakes. The Redis is one too: its address is said to answer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        monkeypatch.setattr(supervisor_module, "check_redis", lambda url: None)
        monkeypatch.setattr(supervisor_module, "is_router_ready", lambda *_: True)
        self.folder = folder
        self.cluster = ClusterFolder(folder, "test")
        self.cluster.take()
        flags = {"prefill": 2, "decode": 1, "port": 0, "redis_url": "redis://127.0.0.1:1/0"}
        self.settings: Settings = load_settings(**(flags | settings))
        recipe = LaunchSpecs(self.settings, self.cluster, self._command)
        self.changed = asyncio.Event()
        self.supervisor = Supervisor(
            self.settings, self.cluster, CLOCK, lambda state: self.changed.set(), recipe
        )
        self.stop, self.stop_now = asyncio.Event(), asyncio.Event()

    def _command(self, role: Role) -> tuple[str, ...]:
        return (sys.executable, "-m", "tests.unit.fake_program", str(self.folder), role.value)

    def misbehave(self, **rules: str) -> None:
        named = {name.replace("_", "-"): rule for name, rule in rules.items()}
        (self.folder / "misbehave").write_text(json.dumps(named))

    @property
    def state(self) -> ClusterState:
        state = self.cluster.read()
        assert state is not None
        return state

    def process(self, name: str) -> ProcessState:
        return next(process for process in self.state.processes if process.id == name)

    def ids(self) -> list[str]:
        return [process.id for process in self.state.processes]

    def stopped(self) -> list[str]:
        return (self.folder / "stopped").read_text().split()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        run = asyncio.create_task(self.supervisor.run(self.stop, self.stop_now))
        try:
            await self.until(lambda: self.supervisor.ready)
            yield
        finally:
            self.stop.set()
            await run
            self.cluster.release()
            assert_gone(self.state)


def assert_gone(state: ClusterState) -> None:
    alive = [process.id for process in state.processes if psutil.pid_exists(process.pid)]
    assert alive == []


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    return House(tmp_path, monkeypatch)


async def test_all_start_and_stop_in_order(house: House) -> None:
    async with house.running():
        assert house.ids() == [
            "kvstore", "conductor", "prefill-0", "prefill-1", "decode-0", "router",
        ]  # fmt: skip
        assert {process.state for process in house.state.processes} == {"serving"}
        assert house.process("router").address == "127.0.0.1:1006"
        assert house.state.ready
    order = house.stopped()
    assert order[0] == "router"
    assert sorted(order[1:4]) == ["decode-0", "prefill-0", "prefill-1"]
    assert order[4:] == ["conductor", "kvstore"]
    assert not house.state.ready


@pytest.mark.parametrize(("given", "told"), [(9000, "0"), (0, "0"), (None, None)])
def test_no_two_processes_of_a_machine_have_one_ops_port(
    tmp_path: Path, given: int | None, told: str | None
) -> None:
    settings = load_settings(redis_url="redis://127.0.0.1:1/0", port=0, ops_port=given)
    recipe = LaunchSpecs(settings, ClusterFolder(tmp_path, "test"))
    for spec in (recipe.conductor(), recipe.store(), *recipe.routers(), recipe.worker(Role.DECODE)):
        assert spec.environment.get("BATON_OPS_PORT") == told


async def test_several_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(tmp_path, monkeypatch, routers=3, port=0)
    specs = house.supervisor._recipe.routers()
    ports = {spec.environment["BATON_PORT"] for spec in specs}
    assert {spec.environment["BATON_REUSE_PORT"] for spec in specs} == {"True"}
    assert len(ports) == 1 and "0" not in ports
    async with house.running():
        assert house.ids()[-3:] == ["router-0", "router-1", "router-2"]
        before = house.process("router-1").pid
        os.kill(before, signal.SIGKILL)
        await house.until(lambda: house.process("router-1").restarts == 1 and house.state.ready)
    assert sorted(house.stopped()[:3]) == ["router-0", "router-1", "router-2"]


@pytest.mark.parametrize("name", ["prefill-1", "router", "kvstore"])
async def test_what_is_killed_comes_back(house: House, name: str) -> None:
    async with house.running():
        before = house.process(name).pid
        os.kill(before, signal.SIGKILL)
        await house.until(lambda: house.process(name).restarts == 1 and house.state.ready)
        assert house.process(name).pid != before


async def test_one_that_fails_to_start_fails_the_cluster(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", (0.0,))
    house.misbehave(decode_0="fail")
    with pytest.raises(Unavailable, match="decode-0 failed to start: decode-0 can't start"):
        await house.supervisor.run(house.stop, house.stop_now)
    assert house.process("decode-0").restarts == child_module.START_ATTEMPTS - 1
    assert_gone(house.state)


async def test_one_that_was_asked_wrongly_is_not_tried_again(house: House) -> None:
    house.misbehave(prefill_0="wrongly")
    with pytest.raises(Unavailable, match="prefill-0 failed to start"):
        await house.supervisor.run(house.stop, house.stop_now)
    assert house.process("prefill-0").restarts == 0


async def test_stopped_while_starting(house: House) -> None:
    house.stop.set()
    await house.supervisor.run(house.stop, house.stop_now)
    assert_gone(house.state)


async def test_scaled_up_and_down(house: House) -> None:
    async with house.running():
        await house.supervisor.pools.scale({"prefill": 1, "decode": 3})
        wanted = {"kvstore", "conductor", "prefill-0", "decode-0", "decode-1", "decode-2", "router"}
        await house.until(lambda: set(house.ids()) == wanted and house.state.ready)
        assert house.stopped() == ["prefill-1"]
        await house.supervisor.pools.scale({"prefill": 2})
        # A number is never used twice.
        await house.until(lambda: "prefill-2" in house.ids() and house.state.ready)


async def test_drained(house: House) -> None:
    async with house.running():
        await house.supervisor.pools.remove("prefill-0")
        await house.supervisor.pools.remove("prefill-0")
        await house.until(lambda: "prefill-0" not in house.ids())
        assert house.stopped() == ["prefill-0"]


async def test_who_does_not_serve_yet_goes_first_then_the_newest(house: House) -> None:
    async with house.running():
        house.misbehave(prefill_2="slow")
        await house.supervisor.pools.scale({Role.PREFILL: 4})
        await house.until(
            lambda: "prefill-3" in house.ids() and house.process("prefill-3").state == "serving"
        )
        await house.supervisor.pools.scale({Role.PREFILL: 3})
        await house.until(lambda: "prefill-2" not in house.ids())
        await house.supervisor.pools.scale({Role.PREFILL: 2})
        await house.until(lambda: "prefill-3" not in house.ids())
        assert {"prefill-0", "prefill-1"} <= set(house.ids())
        assert house.stopped() == ["prefill-3"]


async def test_the_frozen_are_killed_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "HEARTBEAT_SECONDS", 0.3)
    house = House(tmp_path, monkeypatch, hung_seconds=1)
    async with house.running():
        before = house.process("decode-0").pid
        os.kill(before, signal.SIGSTOP)
        await house.until(lambda: house.process("decode-0").pid != before and house.state.ready)
        assert not psutil.pid_exists(before)


async def test_a_worker_that_fails_to_start_later_says_why(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", (0.0,))
    house.misbehave(decode_1="fail")
    async with house.running():
        await house.supervisor.pools.scale({Role.DECODE: 2})
        await house.until(lambda: house.process("decode-1").state == "failed")
        assert house.process("decode-1").message == "decode-1 can't start"
        assert house.supervisor.ready
        # Its successor has a number of its own.
        await house.supervisor.pools.scale({Role.DECODE: 2})
        await house.until(lambda: "decode-2" in house.ids() and house.state.ready)
        assert "decode-1" not in house.ids()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"router": 2}, "scale takes prefill=N and decode=N with N from 1 to 256, not router=2"),
        ({"prefill": 0}, "not prefill=0"),
        ({"decode": 257}, "not decode=257"),
    ],
)
async def test_wrong_sizes(house: House, wrong: dict[str, int], message: str) -> None:
    async with house.running():
        with pytest.raises(Invalid, match=message):
            await house.supervisor.pools.scale(wrong)


async def test_wrong_drains(house: House) -> None:
    async with house.running():
        for name in ("nobody", "router"):
            with pytest.raises(NotFound, match=f"no worker '{name}'"):
                await house.supervisor.pools.remove(name)
        with pytest.raises(Invalid, match="decode-0 is the last decode worker"):
            await house.supervisor.pools.remove("decode-0")


async def test_before_and_after_nothing_can_be_scaled(house: House) -> None:
    with pytest.raises(Unavailable, match="starting or stopping"):
        await house.supervisor.pools.scale({"prefill": 1})
    async with house.running():
        pass
    with pytest.raises(Unavailable, match="starting or stopping"):
        await house.supervisor.pools.remove("prefill-0")


async def test_the_impatient_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(tmp_path, monkeypatch, drain_seconds=600)
    house.misbehave(prefill_0="deaf")
    async with house.running():
        house.stop_now.set()


async def test_the_deaf_are_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "STOP_SECONDS", 0.0)
    house = House(tmp_path, monkeypatch, drain_seconds=0.05)
    house.misbehave(prefill_0="deaf", router="deaf")
    async with house.running():
        pass
    assert "decode-0" in house.stopped()


async def test_a_cancelled_child_leaves_no_process(tmp_path: Path) -> None:
    serving = asyncio.Event()
    command = (sys.executable, "-m", "tests.unit.fake_program", str(tmp_path), "x")
    spec = ChildProcessSpec("x", "x", command, {**os.environ, "BATON_ID": "x"}, tmp_path / "log")

    def notice(child: ChildProcess) -> None:
        if child.serving:
            serving.set()

    child = ChildProcess(spec, CLOCK, notice, 1.0)
    running = asyncio.create_task(child.run())
    await serving.wait()
    running.cancel()
    done: Awaitable[object] = asyncio.gather(running, return_exceptions=True)
    await done
    assert not psutil.pid_exists(child.state.pid)
