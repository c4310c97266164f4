"""Runs one test suite over the pools that the orchestrator supervises itself, with local processes
and with Ray."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.clock import SystemClock
from baton.config import load_settings, set_ray_environment
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid, NotFound, Unavailable
from baton.rpc.worker_client import convert_worker
from orchestrator.cluster_state import ClusterFolder, ProcessState
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.local_pools import ConvertWorker, LocalPools
from orchestrator.supervised_pools import SupervisedPools, SupervisedProcess

CLOCK = SystemClock()


class PoolsHarness:
    """Pools of fake workers, which only report that they serve."""

    def __init__(
        self, folder: Path, ray_cluster: Any, convert: ConvertWorker = convert_worker
    ) -> None:
        self._folder = folder
        cluster = ClusterFolder(folder, "test")
        cluster.create()
        settings = load_settings(redis_url="redis://127.0.0.1:1/0", port=0, drain_timeout_seconds=5)
        specs = LaunchSpecs(settings, cluster, self._command)
        self.pools = _pools(specs, ray_cluster, convert)
        self._changed = asyncio.Event()

    def _command(self, role: Role) -> tuple[str, ...]:
        return (sys.executable, "-m", "testkit.fakes.program", str(self._folder), role.value)

    def misbehave(self, **rules: str) -> None:
        named = {name.replace("_", "-"): rule for name, rule in rules.items()}
        (self._folder / "misbehave").write_text(json.dumps(named))

    def stopped(self) -> list[str]:
        return (self._folder / "stopped").read_text().split()

    def process(self, name: str) -> SupervisedProcess:
        return next(process for process in self.pools.processes if process.state.id == name)

    def state(self, name: str) -> ProcessState:
        return self.process(name).state

    def states(self) -> dict[str, str]:
        return {process.state.id: process.state.state for process in self.pools.processes}

    def serve(self, *names: str) -> bool:
        """Return whether these processes, and no others, are serving."""
        return self.states() == dict.fromkeys(names, "serving")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run a prefill and a decode worker; check afterwards that all processes are gone."""
        pids: set[int] = set()

        def on_change(process: SupervisedProcess) -> None:
            pids.add(process.state.pid)
            self._changed.set()

        async with asyncio.TaskGroup() as tasks:
            self.pools.open(tasks, on_change)
            try:
                await self.pools.scale({Role.PREFILL: 1, Role.DECODE: 1})
                await self.until(lambda: self.serve("prefill-0", "decode-0"))
                yield
            finally:
                self.pools.close()
                await self.pools.stop()
        await asyncio.to_thread(assert_gone, pids - {0})


def assert_gone(pids: set[int]) -> None:
    """Wait until the processes are gone. They may still run for a moment, since Ray kills them
    asynchronously."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


def _pools(specs: LaunchSpecs, ray_cluster: Any, convert: ConvertWorker) -> SupervisedPools:
    if ray_cluster is None:
        return LocalPools(specs, CLOCK, 5, 20, convert)
    from orchestrator.ray.pools import RayPools

    return RayPools(specs, ray_cluster, CLOCK)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """One Ray cluster for all tests, with resources for four workers. None of its processes
    outlives the tests."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    before, others = dict(os.environ), set(psutil.Process().children(recursive=True))
    set_ray_environment(is_private=True)
    from orchestrator.ray.cluster import RayCluster

    settings = load_settings(on="ray", ray_worker_cpus=psutil.cpu_count() / 4, device="cpu")
    cluster = RayCluster(settings)
    asyncio.run(cluster.connect())
    children = set(psutil.Process().children(recursive=True)) - others
    try:
        yield cluster
    finally:
        asyncio.run(cluster.close())
        os.environ.clear()
        os.environ.update(before)
        _, alive = psutil.wait_procs(list(children), timeout=20)
        assert alive == []


@pytest.fixture(params=["local", "ray"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> PoolsHarness:
    ray_cluster = request.getfixturevalue("ray_cluster") if request.param == "ray" else None
    return PoolsHarness(tmp_path, ray_cluster)


@pytest.fixture
def ray_harness(ray_cluster: Any, tmp_path: Path) -> PoolsHarness:
    return PoolsHarness(tmp_path, ray_cluster)


def test_ray_files_are_accessible_to_their_user_only(ray_cluster: Any) -> None:
    """Ray makes its folders and sockets accessible to everybody (0777), so their parent folder must
    be accessible only to its owner."""
    folder = Path(ray_cluster.private_folder)
    sockets = list(folder.rglob("sockets/raylet"))
    assert len(sockets) == 1
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_pools_grow_and_shrink(harness: PoolsHarness) -> None:
    async with harness.running():
        await harness.pools.scale({Role.DECODE: 3})
        assert await harness.pools.sizes() == {Role.PREFILL: 1, Role.DECODE: 3}
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "decode-1", "decode-2"))
        await harness.pools.scale({Role.DECODE: 1})
        await harness.until(lambda: harness.serve("prefill-0", "decode-0"))
        assert sorted(harness.stopped()) == ["decode-1", "decode-2"]
        workers = await harness.pools.workers()
        assert [(worker.id, worker.role, worker.node) for worker in workers] == [
            ("prefill-0", Role.PREFILL, ""),
            ("decode-0", Role.DECODE, ""),
        ]
        # A number is never used twice.
        await harness.pools.scale({Role.DECODE: 2})
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "decode-3"))


async def test_a_worker_can_be_removed_unless_it_is_the_last_of_its_pool(
    harness: PoolsHarness,
) -> None:
    async with harness.running():
        await harness.pools.scale({Role.PREFILL: 2})
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "prefill-1"))
        await harness.pools.remove(WorkerId("prefill-0"))
        await harness.pools.remove(WorkerId("prefill-0"))
        assert await harness.pools.sizes() == {Role.PREFILL: 1, Role.DECODE: 1}
        with pytest.raises(Invalid, match="prefill-1 is the last prefill worker"):
            await harness.pools.remove(WorkerId("prefill-1"))
        await harness.until(lambda: harness.serve("decode-0", "prefill-1"))
        assert harness.stopped() == ["prefill-0"]


async def test_invalid_requests_are_refused(harness: PoolsHarness) -> None:
    with pytest.raises(Unavailable, match="starting or stopping"):
        await harness.pools.scale({Role.PREFILL: 2})
    async with harness.running():
        for wrong in ({Role.ROUTER: 1}, {Role.DECODE: -1}, {Role.DECODE: 257}):
            with pytest.raises(Invalid, match="scale takes prefill=N, decode=N and mixed=N"):
                await harness.pools.scale(wrong)
        with pytest.raises(Invalid, match="decode=0 mixed=0 could not serve requests"):
            await harness.pools.scale({Role.DECODE: 0})
        with pytest.raises(NotFound, match="no worker 'x'; the workers are: prefill-0, decode-0"):
            await harness.pools.remove(WorkerId("x"))
    with pytest.raises(Unavailable, match="starting or stopping"):
        await harness.pools.remove(WorkerId("decode-0"))


async def test_a_killed_worker_is_restarted(harness: PoolsHarness) -> None:
    async with harness.running():
        before = harness.state("decode-0").pid
        os.kill(before, signal.SIGKILL)
        await harness.until(lambda: harness.state("decode-0").restarts == 1)
        await harness.until(lambda: harness.serve("prefill-0", "decode-0"))
        assert harness.state("decode-0").pid != before


async def test_a_worker_that_fails_to_start_reports_why_and_is_replaced(
    harness: PoolsHarness,
) -> None:
    harness.misbehave(decode_1="wrongly")
    async with harness.running():
        await harness.pools.scale({Role.DECODE: 2})
        await harness.until(lambda: harness.process("decode-1").has_failed_to_start)
        assert harness.state("decode-1").message == "decode-1 can't start"
        await harness.pools.scale({Role.DECODE: 2})
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "decode-2"))


async def test_a_worker_that_is_still_starting_is_removed_first(harness: PoolsHarness) -> None:
    harness.misbehave(decode_1="slow")
    async with harness.running():
        await harness.pools.scale({Role.DECODE: 3})
        await harness.until(lambda: harness.states()["decode-2"] == "serving")
        await harness.pools.scale({Role.DECODE: 2})
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "decode-2"))


async def test_a_worker_that_ignores_its_drain_can_be_killed(harness: PoolsHarness) -> None:
    harness.misbehave(decode_0="deaf")
    async with harness.running():
        harness.process("decode-0").kill()


async def test_one_pool_shrinks_while_the_other_grows(harness: PoolsHarness) -> None:
    """The fake workers can't change their role, so they are replaced."""
    async with harness.running():
        await harness.pools.scale({Role.PREFILL: 2})
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "prefill-1"))
        await harness.pools.scale({Role.PREFILL: 1, Role.DECODE: 2})
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "decode-1"))
        assert harness.stopped() == ["prefill-1"]


@pytest.mark.parametrize("dies", [False, True])
async def test_a_worker_changes_its_role_and_keeps_it_after_a_crash(
    tmp_path: Path, dies: bool
) -> None:
    async def convert(address: str, role: Role) -> None:
        assert (address, role) == ("127.0.0.1:1007", Role.DECODE)
        number = signal.SIGKILL if dies else signal.SIGUSR1
        os.kill(harness.state("prefill-1").pid, number)

    harness = PoolsHarness(tmp_path, None, convert)
    async with harness.running():
        await harness.pools.scale({Role.PREFILL: 2})
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "prefill-1"))
        before = harness.state("prefill-1").pid
        await harness.pools.scale({Role.PREFILL: 1, Role.DECODE: 2})
        assert harness.states()["prefill-1"] == "converting"
        assert await harness.pools.sizes() == {Role.PREFILL: 1, Role.DECODE: 2}
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "prefill-1"))
        assert (harness.state("prefill-1").pid == before) is not dies
        os.kill(harness.state("prefill-1").pid, signal.SIGKILL)
        await harness.until(lambda: harness.state("prefill-1").restarts == 1 + dies)
        await harness.until(lambda: harness.serve("prefill-0", "decode-0", "prefill-1"))
        state = harness.state("prefill-1")
        assert (state.role, state.address) == ("decode", "127.0.0.1:1006")


async def test_without_resources_a_ray_worker_is_pending_with_a_reason(
    ray_harness: PoolsHarness,
) -> None:
    async with ray_harness.running():
        await ray_harness.pools.scale({Role.DECODE: 4})
        names = [f"decode-{number}" for number in range(1, 4)]
        await ray_harness.until(
            lambda: (
                sorted(ray_harness.states()[name] for name in names)
                == ["pending", "serving", "serving"]
                and any("waits for" in ray_harness.state(name).message for name in names)
            )
        )
        await ray_harness.pools.scale({Role.DECODE: 3})
        await ray_harness.until(lambda: "pending" not in ray_harness.states().values())
        # A worker that leaves frees the resources for another one.
        await ray_harness.pools.scale({Role.DECODE: 1, Role.PREFILL: 3})
        await ray_harness.until(lambda: list(ray_harness.states().values()) == ["serving"] * 4)


@pytest.mark.parametrize("by_ray", [True, False])
async def test_a_ray_actor_that_dies_is_restarted_with_its_worker(
    ray_harness: PoolsHarness, monkeypatch: pytest.MonkeyPatch, by_ray: bool
) -> None:
    from orchestrator.ray import cluster

    if not by_ray:  # Ray does not restart the actor, so the pools create another one
        monkeypatch.setattr(cluster, "MAX_RESTARTS", 0)
    async with ray_harness.running():
        before = ray_harness.state("decode-0").pid
        actor = psutil.Process(before).parent()
        assert actor is not None
        actor.kill()
        await ray_harness.until(lambda: ray_harness.state("decode-0").pid not in (0, before))
        await ray_harness.until(lambda: ray_harness.serve("prefill-0", "decode-0"))
        await asyncio.to_thread(assert_gone, {before})
        assert ray_harness.state("decode-0").restarts == 1


async def test_more_workers_than_ray_has_resources_for_are_refused(ray_cluster: Any) -> None:
    with pytest.raises(Unavailable, match=r"5 workers need .* CPU, but Ray has"):
        await ray_cluster.check_capacity(5)
    await ray_cluster.check_capacity(4)
