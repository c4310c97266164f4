"""Tests the local supervisor with real, tiny processes: start order, restarts, pools, and
shutdown."""

import asyncio
import errno
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
from baton.obs.lost_writes import LostWrites
from orchestrator import child_process as child_module
from orchestrator import process_log as process_log_module
from orchestrator import supervisor as supervisor_module
from orchestrator.child_process import ChildProcess, ChildProcessSpec
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState
from orchestrator.launch_specs import LaunchSpecs
from orchestrator.supervisor import Supervisor

CLOCK = SystemClock()


class ClusterHarness:
    """A cluster of fake programs. The Redis check is faked, too, and the conductor knows
    every process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        monkeypatch.setattr(supervisor_module, "check_redis", lambda *_: None)
        monkeypatch.setattr(supervisor_module, "router_obstacle", lambda *_: self.router_obstacle)
        monkeypatch.setattr(supervisor_module, "ROUTER_POLL_SECONDS", 0.01)
        monkeypatch.setattr(supervisor_module, "fetch_ready_workers", self._ready_workers)
        self.folder = folder
        self.router_obstacle = ""
        self.cluster = ClusterFolder(folder, "test")
        self.cluster.acquire()
        flags = {"prefill": 2, "decode": 1, "port": 0, "redis_url": "redis://127.0.0.1:1/0"}
        self.settings: Settings = load_settings(**(flags | settings))
        recipe = LaunchSpecs(self.settings, self.cluster, self._command)
        self.changed = asyncio.Event()
        self.supervisor = Supervisor(
            self.settings, self.cluster, CLOCK, lambda state: self.changed.set(), recipe
        )
        self.stop, self.stop_now = asyncio.Event(), asyncio.Event()

    async def _ready_workers(self, *_: object) -> list[str]:
        return self.ids()

    def _command(self, role: Role) -> tuple[str, ...]:
        return (sys.executable, "-m", "testkit.fakes.program", str(self.folder), role.value)

    def misbehave(self, **rules: str) -> None:
        named = {name.replace("_", "-"): rule for name, rule in rules.items()}
        (self.folder / "misbehave").write_text(json.dumps(named))

    @property
    def state(self) -> ClusterState:
        state = self.cluster.read_state()
        assert state is not None
        return state

    def process(self, name: str) -> ProcessState:
        return next(process for process in self.state.processes if process.id == name)

    def ids(self) -> list[str]:
        return [process.id for process in self.state.processes]

    def stopped(self) -> list[str]:
        return (self.folder / "stopped").read_text().split()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        run = asyncio.create_task(self.supervisor.run(self.stop, self.stop_now))
        try:
            await self.wait_until(lambda: self.supervisor.is_ready)
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
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterHarness:
    return ClusterHarness(tmp_path, monkeypatch)


async def test_programs_start_and_stop_in_order(cluster: ClusterHarness) -> None:
    async with cluster.running():
        assert cluster.ids() == [
            "kvstore", "conductor", "prefill-0", "prefill-1", "decode-0", "router",
        ]  # fmt: skip
        assert {process.state for process in cluster.state.processes} == {"serving"}
        assert cluster.process("router").address == "127.0.0.1:1006"
        assert cluster.state.ready
    order = cluster.stopped()
    assert order[0] == "router"
    assert sorted(order[1:4]) == ["decode-0", "prefill-0", "prefill-1"]
    assert order[4:] == ["conductor", "kvstore"]
    assert not cluster.state.ready


async def test_workers_with_servers_have_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterHarness(tmp_path, monkeypatch, engine="vllm", prefill=0, decode=0, mixed=1)
    async with cluster.running():
        assert cluster.ids() == ["conductor", "mixed-0", "router"]


async def test_cluster_is_not_ready_while_a_router_is_not(cluster: ClusterHarness) -> None:
    """A router may lose all workers, or know none after a restart while Redis is down."""
    async with cluster.running():
        for obstacle in ("it knows no worker", ""):
            cluster.router_obstacle = obstacle
            await cluster.wait_until(lambda text=obstacle: cluster.state.obstacle == text)  # type: ignore[misc]
            assert cluster.state.ready is (not obstacle)
        assert {process.state for process in cluster.state.processes} == {"serving"}


@pytest.mark.parametrize(("given", "expected"), [(9000, "0"), (0, "0"), (None, None)])
def test_child_processes_get_free_ops_ports(
    tmp_path: Path, given: int | None, expected: str | None
) -> None:
    settings = load_settings(redis_url="redis://127.0.0.1:1/0", port=0, ops_port=given)
    recipe = LaunchSpecs(settings, ClusterFolder(tmp_path, "test"))
    for spec in (recipe.conductor(), recipe.store(), *recipe.routers(), recipe.worker(Role.DECODE)):
        assert spec.environment.get("BATON_OPS_PORT") == expected


def test_children_read_live_settings_from_the_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other settings are fixed by the children's environment, as are live settings that the
    supervisor got from its own flags, environment or secret files."""
    config = tmp_path / "baton.yaml"
    config.write_text("log_level: debug\ntrace_sample: 0.5\nmax_sequences: 8\nstore_bytes: 1MiB\n")
    monkeypatch.setenv("BATON_CONFIG", "")  # load_settings() sets it
    monkeypatch.setenv("BATON_TRACE_SAMPLE", "0.25")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "slo_ttft_seconds").write_text("4")
    monkeypatch.setenv("BATON_SECRETS_DIRECTORY", str(tmp_path / "secrets"))
    flags = {"redis_url": "redis://127.0.0.1:1/0", "port": 0, "slo_itl_seconds": 0.5}
    specs = LaunchSpecs(load_settings(config, **flags), ClusterFolder(tmp_path, "test"))
    (router,) = specs.routers()
    names = ("CONFIG", "LOG_LEVEL", "TRACE_SAMPLE", "SLO_ITL_SECONDS", "MAX_SEQUENCES",
             "MAX_BODY_BYTES", "STORE_BYTES", "SLO_TTFT_SECONDS", "SECRETS_DIRECTORY")  # fmt: skip
    found = {
        spec.id: [spec.environment.get(f"BATON_{name}") for name in names]
        for spec in (router, specs.conductor(), specs.worker(Role.DECODE), specs.store())
    }
    file, body, store = str(config), str(8 * 2**20), str(2**20)
    assert found == {
        "router": [file, None, "0.25", "0.5", "8", None, store, "4.0", None],
        "conductor": [file, None, "0.25", "0.5", None, body, store, "4.0", None],
        "decode-0": [file, None, "0.25", "0.5", "8", body, store, "4.0", None],
        "kvstore": [file, None, "0.25", "0.5", "8", body, store, "4.0", None],
    }
    assert "config" not in specs.remote_worker(Role.DECODE).settings
    assert specs.remote_worker(Role.DECODE).settings["log_level"] == "debug"


async def test_several_routers_share_a_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterHarness(tmp_path, monkeypatch, routers=3, port=0)
    specs = cluster.supervisor._launch_specs.routers()
    ports = {spec.environment["BATON_PORT"] for spec in specs}
    assert {spec.environment["BATON_REUSE_PORT"] for spec in specs} == {"True"}
    assert len(ports) == 1 and "0" not in ports
    async with cluster.running():
        assert cluster.ids()[-3:] == ["router-0", "router-1", "router-2"]
        before = cluster.process("router-1").pid
        os.kill(before, signal.SIGKILL)
        await cluster.wait_until(
            lambda: cluster.process("router-1").restarts == 1 and cluster.state.ready
        )
    assert sorted(cluster.stopped()[:3]) == ["router-0", "router-1", "router-2"]


@pytest.mark.parametrize("name", ["prefill-1", "router", "kvstore"])
async def test_killed_program_is_restarted(cluster: ClusterHarness, name: str) -> None:
    async with cluster.running():
        before = cluster.process(name).pid
        os.kill(before, signal.SIGKILL)
        await cluster.wait_until(
            lambda: cluster.process(name).restarts == 1 and cluster.state.ready
        )
        assert cluster.process(name).pid != before


async def test_a_signal_to_one_program_makes_it_drain_and_start_again(
    cluster: ClusterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "LONE_SIGNAL_SECONDS", 0.0)
    async with cluster.running():
        os.kill(cluster.process("prefill-1").pid, signal.SIGTERM)
        await cluster.wait_until(
            lambda: cluster.process("prefill-1").restarts == 1 and cluster.state.ready
        )
        assert cluster.stopped() == ["prefill-1"]


async def test_a_signal_to_all_programs_does_not_change_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router is still draining when the other programs have reported the signal."""
    monkeypatch.setattr(child_module, "LONE_SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(child_module, "STOP_SECONDS", 0.0)
    cluster = ClusterHarness(tmp_path, monkeypatch, drain_timeout_seconds=1)
    cluster.misbehave(router="deaf")
    async with cluster.running():
        cluster.stop.set()
        await cluster.wait_until(lambda: cluster.process("router").state == "draining")
        for process in cluster.state.processes:
            os.kill(process.pid, signal.SIGTERM)
    assert cluster.stopped()[3:] == ["conductor", "kvstore"]
    assert not any(process.restarts for process in cluster.state.processes)


async def test_a_full_disk_ends_nothing(
    cluster: ClusterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While neither the cluster's state nor a program's log can be written, a killed program is
    restarted. The state is written as soon as that is possible."""
    monkeypatch.setattr(supervisor_module, "STATE_RETRY_SECONDS", 0.01)
    lost = LostWrites()
    monkeypatch.setattr(supervisor_module, "LOST_WRITES", lost)
    monkeypatch.setattr(process_log_module, "LOST_WRITES", lost)
    async with cluster.running():
        before = cluster.process("decode-0").pid
        full = cluster.cluster.path / "state.new"
        full.symlink_to("/dev/full")
        log = cluster.cluster.logs / "decode-0.log"
        log.unlink()
        log.mkdir()
        os.kill(before, signal.SIGKILL)
        await cluster.wait_until(
            lambda: (
                cluster.supervisor._current_state().processes[4].restarts == 1
                and cluster.supervisor.is_ready
            )
        )
        assert cluster.process("decode-0").pid == before  # an old state
        full.unlink()
        await cluster.wait_until(lambda: cluster.process("decode-0").pid != before)
        assert cluster.state.ready
        assert cluster.state.lost_writes == lost.counts
        assert lost.counts["decode-0.log"] == 1 and lost.counts["state.json"] > 1


async def test_a_cluster_whose_state_can_not_be_written_does_not_start(
    cluster: ClusterHarness,
) -> None:
    (cluster.cluster.path / "state.new").symlink_to("/dev/full")
    with pytest.raises(Unavailable, match=r"clusters/test can't be written: No space left on dev"):
        await cluster.supervisor.run(cluster.stop, cluster.stop_now)
    assert cluster.supervisor._current_state().processes == []


async def test_a_program_that_can_not_be_started_again_yet_is_tried_later(
    cluster: ClusterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", (0.0,))
    start, refused = asyncio.create_subprocess_exec, []

    async def refuse_twice(*arguments: object, **options: object) -> object:
        if len(refused) < 2:
            refused.append(arguments)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return await start(*arguments, **options)  # type: ignore[arg-type]

    async with cluster.running():
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse_twice)
        os.kill(cluster.process("decode-0").pid, signal.SIGKILL)
        await cluster.wait_until(
            lambda: cluster.process("decode-0").restarts == 3 and cluster.state.ready
        )


async def test_program_that_fails_to_start_fails_the_cluster(
    cluster: ClusterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", (0.0,))
    cluster.misbehave(decode_0="fail")
    with pytest.raises(Unavailable, match="decode-0 failed to start: decode-0 can't start"):
        await cluster.supervisor.run(cluster.stop, cluster.stop_now)
    assert cluster.process("decode-0").restarts == child_module.START_ATTEMPTS - 1
    assert_gone(cluster.state)


async def test_program_with_invalid_arguments_is_not_retried(cluster: ClusterHarness) -> None:
    cluster.misbehave(prefill_0="wrongly")
    with pytest.raises(Unavailable, match="prefill-0 failed to start"):
        await cluster.supervisor.run(cluster.stop, cluster.stop_now)
    assert cluster.process("prefill-0").restarts == 0


async def test_start_that_waits_says_for_what(
    cluster: ClusterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "OBSTACLE_SECONDS", 0.0)
    cluster.router_obstacle = "a router knows no ready worker of demo"
    run = asyncio.create_task(cluster.supervisor.run(cluster.stop, cluster.stop_now))
    await cluster.changed.wait()  # from now on, there is a state
    await cluster.wait_until(lambda: cluster.state.obstacle == cluster.router_obstacle)
    assert not cluster.state.ready
    cluster.router_obstacle = ""
    await cluster.wait_until(lambda: cluster.state.ready)
    assert cluster.state.obstacle == ""
    cluster.stop.set()
    await run


async def test_stop_while_starting(cluster: ClusterHarness) -> None:
    cluster.stop.set()
    await cluster.supervisor.run(cluster.stop, cluster.stop_now)
    assert_gone(cluster.state)


async def test_pools_can_be_scaled_up_and_down(cluster: ClusterHarness) -> None:
    async with cluster.running():
        await cluster.supervisor.pools.scale({"prefill": 1, "decode": 3})
        wanted = {"kvstore", "conductor", "prefill-0", "decode-0", "decode-1", "decode-2", "router"}
        await cluster.wait_until(lambda: set(cluster.ids()) == wanted and cluster.state.ready)
        assert cluster.stopped() == ["prefill-1"]
        await cluster.supervisor.pools.scale({"prefill": 2})
        # A worker number is never reused.
        await cluster.wait_until(lambda: "prefill-2" in cluster.ids() and cluster.state.ready)


async def test_drained_worker_is_removed(cluster: ClusterHarness) -> None:
    async with cluster.running():
        await cluster.supervisor.pools.remove("prefill-0")
        await cluster.supervisor.pools.remove("prefill-0")
        await cluster.wait_until(lambda: "prefill-0" not in cluster.ids())
        assert cluster.stopped() == ["prefill-0"]


async def test_workers_that_do_not_serve_are_removed_first_then_the_newest(
    cluster: ClusterHarness,
) -> None:
    async with cluster.running():
        cluster.misbehave(prefill_2="slow")
        await cluster.supervisor.pools.scale({Role.PREFILL: 4})
        await cluster.wait_until(
            lambda: "prefill-3" in cluster.ids() and cluster.process("prefill-3").state == "serving"
        )
        await cluster.supervisor.pools.scale({Role.PREFILL: 3})
        await cluster.wait_until(lambda: "prefill-2" not in cluster.ids())
        await cluster.supervisor.pools.scale({Role.PREFILL: 2})
        await cluster.wait_until(lambda: "prefill-3" not in cluster.ids())
        assert {"prefill-0", "prefill-1"} <= set(cluster.ids())
        assert cluster.stopped() == ["prefill-3"]


async def test_frozen_program_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "HEARTBEAT_SECONDS", 0.3)
    cluster = ClusterHarness(tmp_path, monkeypatch, hang_timeout_seconds=1)
    async with cluster.running():
        before = cluster.process("decode-0").pid
        os.kill(before, signal.SIGSTOP)
        await cluster.wait_until(
            lambda: cluster.process("decode-0").pid != before and cluster.state.ready
        )
        assert not psutil.pid_exists(before)


async def test_added_worker_that_fails_to_start_reports_why(
    cluster: ClusterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", (0.0,))
    cluster.misbehave(decode_1="fail")
    async with cluster.running():
        await cluster.supervisor.pools.scale({Role.DECODE: 2})
        await cluster.wait_until(lambda: cluster.process("decode-1").state == "failed")
        assert cluster.process("decode-1").message == "decode-1 can't start"
        assert cluster.supervisor.is_ready
        # The worker that replaces it has a new number.
        await cluster.supervisor.pools.scale({Role.DECODE: 2})
        await cluster.wait_until(lambda: "decode-2" in cluster.ids() and cluster.state.ready)
        assert "decode-1" not in cluster.ids()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"router": 2}, "there is no pool 'router'; the pools are prefill, decode, mixed"),
        ({"prefill": 0}, "prefill=0 decode=1 mixed=0 could not serve requests"),
        ({"decode": 257}, "not decode=257"),
    ],
)
async def test_invalid_sizes_are_rejected(
    cluster: ClusterHarness, wrong: dict[str, int], message: str
) -> None:
    async with cluster.running():
        with pytest.raises(Invalid, match=message):
            await cluster.supervisor.pools.scale(wrong)


async def test_invalid_drains_are_rejected(cluster: ClusterHarness) -> None:
    async with cluster.running():
        for name in ("nobody", "router"):
            with pytest.raises(NotFound, match=f"no worker '{name}'"):
                await cluster.supervisor.pools.remove(name)
        with pytest.raises(Invalid, match="decode-0 is the last decode worker"):
            await cluster.supervisor.pools.remove("decode-0")


async def test_pools_can_not_be_changed_before_start_or_after_stop(cluster: ClusterHarness) -> None:
    with pytest.raises(Unavailable, match="starting or stopping"):
        await cluster.supervisor.pools.scale({"prefill": 1})
    async with cluster.running():
        pass
    with pytest.raises(Unavailable, match="starting or stopping"):
        await cluster.supervisor.pools.remove("prefill-0")


async def test_second_stop_does_not_wait_for_the_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterHarness(tmp_path, monkeypatch, drain_timeout_seconds=600)
    cluster.misbehave(prefill_0="deaf")
    async with cluster.running():
        cluster.stop_now.set()


async def test_programs_that_ignore_sigterm_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "STOP_SECONDS", 0.0)
    cluster = ClusterHarness(tmp_path, monkeypatch, drain_timeout_seconds=0.05)
    cluster.misbehave(prefill_0="deaf", router="deaf")
    async with cluster.running():
        pass
    assert "decode-0" in cluster.stopped()


async def test_cancelled_child_leaves_no_process(tmp_path: Path) -> None:
    serving = asyncio.Event()
    command = (sys.executable, "-m", "testkit.fakes.program", str(tmp_path), "x")
    spec = ChildProcessSpec("x", "x", command, {**os.environ, "BATON_ID": "x"}, tmp_path / "log")

    def notice(child: ChildProcess) -> None:
        if child.is_serving:
            serving.set()

    child = ChildProcess(spec, CLOCK, notice, 1.0)
    running = asyncio.create_task(child.run())
    await serving.wait()
    running.cancel()
    done: Awaitable[object] = asyncio.gather(running, return_exceptions=True)
    await done
    assert not psutil.pid_exists(child.state.pid)
