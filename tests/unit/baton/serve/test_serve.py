"""Tests the lifecycle of every process: STARTING → SERVING → DRAINING → STOPPED, or FAILED."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.errors import BatonError, Invalid, Unavailable
from baton.serve import lifecycle
from baton.serve.lifecycle import PROGRAM_TRANSITIONS, Lifecycle, LoadStalled, ProgramState
from baton.serve.process import single_error
from baton.serve.process_health import MAX_ANSWER_SECONDS, ProcessHealth
from baton.serve.status_pipe import STATUS, report_progress

Act = Callable[[], Coroutine[Any, Any, None]]


async def at_once() -> None:
    return


async def never() -> None:
    await asyncio.Event().wait()


def fails(error: BaseException) -> Act:
    async def act() -> None:
        raise error

    return act


class FakeProgram:
    """A program whose phases run the functions in ``acts``; ``calls`` lists the phases that have
    started."""

    address = "127.0.0.1:1"
    metrics = CollectorRegistry()

    def __init__(self, **acts: Act) -> None:
        self._acts = {"start": at_once, "run": never, "drain": at_once, "stop": at_once, **acts}
        self.calls: list[str] = []
        self.serving = asyncio.Event()
        self.draining = asyncio.Event()

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        await self._acts[name]()

    async def start(self) -> None:
        await self._do("start")

    async def run(self) -> None:
        self.serving.set()
        await self._do("run")

    async def drain(self) -> None:
        self.draining.set()
        await self._do("drain")

    async def stop(self) -> None:
        await self._do("stop")


async def test_program_starts_serves_drains_and_stops() -> None:
    program = FakeProgram()
    life = Lifecycle(program, 5.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    assert life.state is ProgramState.SERVING
    life.request_stop()
    await running
    assert life.state is ProgramState.STOPPED
    assert program.calls == ["start", "run", "drain", "stop"]


async def test_failed_start_raises() -> None:
    program = FakeProgram(start=fails(Invalid("no such model")))
    life = Lifecycle(program, 5.0)
    with pytest.raises(Invalid, match="no such model"):
        await life.run()
    assert life.state is ProgramState.FAILED
    assert program.calls == ["start", "stop"]
    assert not life.has_served


async def test_stop_while_starting() -> None:
    program = FakeProgram(start=never)
    life = Lifecycle(program, 5.0)
    life.request_stop()
    await life.run()
    assert life.state is ProgramState.STOPPED
    assert "run" not in program.calls and program.calls[-1] == "stop"


async def test_crash_while_serving_drains_and_then_raises() -> None:
    program = FakeProgram(run=fails(Unavailable("the engine has died")))
    life = Lifecycle(program, 5.0)
    with pytest.raises(Unavailable, match="the engine has died"):
        await life.run()
    assert life.state is ProgramState.FAILED
    assert program.calls == ["start", "run", "drain", "stop"]


async def test_crash_while_draining_raises() -> None:
    crash = asyncio.Event()

    async def run() -> None:
        await crash.wait()
        raise Unavailable("the engine died during the drain")

    program = FakeProgram(run=run, drain=never)
    life = Lifecycle(program, 60.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    life.request_stop()
    await program.draining.wait()
    crash.set()
    with pytest.raises(Unavailable, match="the engine died during the drain"):
        await running
    assert program.calls[-1] == "stop"


async def test_only_a_second_interrupt_ends_the_drain() -> None:
    program = FakeProgram(drain=never)
    life = Lifecycle(program, 60.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    life.request_stop()
    await program.draining.wait()
    life.request_stop()  # a repeated SIGTERM
    await asyncio.sleep(0)
    assert not running.done()
    life.request_stop(is_interrupt=True)
    await running
    assert life.state is ProgramState.STOPPED


async def test_drain_ends_at_its_time_limit() -> None:
    program = FakeProgram(drain=never)
    life = Lifecycle(program, 0.01)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    life.request_stop()
    await running
    assert life.state is ProgramState.STOPPED


async def test_program_stops_even_if_its_drain_fails() -> None:
    program = FakeProgram(drain=fails(Unavailable("gone")))
    life = Lifecycle(program, 5.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    life.request_stop()
    await running
    assert life.state is ProgramState.STOPPED


async def test_stalled_load_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "HEARTBEAT_SECONDS", 0.001)
    clock = ManualClock()
    monkeypatch.setattr(STATUS, "health", ProcessHealth(clock))
    program = FakeProgram(start=never)
    life = Lifecycle(program, 5.0)
    running = asyncio.create_task(life.run())
    while not program.calls:
        await asyncio.sleep(0)
    report_progress("weights", 10**9, 2 * 10**9)
    clock.advance(500)
    with pytest.raises(LoadStalled, match=r"weights: 1\.00 of 2\.00 GB: no progress for 500 s"):
        await running
    assert life.state is ProgramState.FAILED


async def test_program_waiting_for_a_dead_component_sends_no_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The missing heartbeat makes the supervisor restart the program."""
    monkeypatch.setattr(lifecycle, "HEARTBEAT_SECONDS", 0.001)
    clock, beats = ManualClock(), list[float]()
    monkeypatch.setattr(STATUS, "health", ProcessHealth(clock))
    monkeypatch.setattr(STATUS, "send_heartbeat", lambda: beats.append(clock.monotonic()))
    program = FakeProgram()
    life = Lifecycle(program, 5.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    with STATUS.health.waiting_for("the engine"):
        clock.advance(1.0)
        while 1.0 not in beats:
            await asyncio.sleep(0)
        clock.advance(MAX_ANSWER_SECONDS)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert max(beats) == 1.0
    while max(beats) == 1.0:
        await asyncio.sleep(0)
    assert STATUS.health.describe_hang(20.0) == ""
    life.request_stop()
    await running


async def test_hanging_stop_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "STOP_SECONDS", 0.01)
    life = Lifecycle(FakeProgram(stop=never, start=fails(Invalid("x"))), 5.0)
    with pytest.raises(Invalid):
        await life.run()


def test_terminal_states_have_no_transitions() -> None:
    assert [state for state, after in PROGRAM_TRANSITIONS.items() if not after] == [
        ProgramState.STOPPED,
        ProgramState.FAILED,
    ]


def test_bug_is_never_hidden_by_an_expected_error() -> None:
    ours, bug = Unavailable("gone"), ValueError("bug")
    assert single_error(BaseExceptionGroup("g", [ExceptionGroup("h", [ours])])) is ours
    assert single_error(BaseExceptionGroup("g", [ours, bug])) is None
    assert isinstance(single_error(BaseExceptionGroup("g", [ours, Invalid("x")])), BatonError)
