"""Every program's life: STARTING → SERVING → DRAINING → STOPPED, or FAILED."""

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
from baton.serve.process_health import ANSWER_SECONDS, ProcessHealth
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


class Fake:
    """Each phase does what it is told; ``calls`` says which were begun."""

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


async def test_a_whole_life() -> None:
    program = Fake()
    life = Lifecycle(program, 5.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    assert life.state is ProgramState.SERVING
    life.ask_to_stop()
    await running
    assert life.state is ProgramState.STOPPED
    assert program.calls == ["start", "run", "drain", "stop"]


async def test_a_start_that_fails() -> None:
    program = Fake(start=fails(Invalid("no such model")))
    life = Lifecycle(program, 5.0)
    with pytest.raises(Invalid, match="no such model"):
        await life.run()
    assert life.state is ProgramState.FAILED
    assert program.calls == ["start", "stop"]
    assert not life.has_served


async def test_asked_to_stop_while_starting() -> None:
    program = Fake(start=never)
    life = Lifecycle(program, 5.0)
    life.ask_to_stop()
    await life.run()
    assert life.state is ProgramState.STOPPED
    assert "run" not in program.calls and program.calls[-1] == "stop"


async def test_a_crash_while_serving_drains_and_then_raises() -> None:
    program = Fake(run=fails(Unavailable("the engine has died")))
    life = Lifecycle(program, 5.0)
    with pytest.raises(Unavailable, match="the engine has died"):
        await life.run()
    assert life.state is ProgramState.FAILED
    assert program.calls == ["start", "run", "drain", "stop"]


async def test_a_crash_while_draining_raises() -> None:
    crash = asyncio.Event()

    async def run() -> None:
        await crash.wait()
        raise Unavailable("died late")

    program = Fake(run=run, drain=never)
    life = Lifecycle(program, 60.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    life.ask_to_stop()
    await program.draining.wait()
    crash.set()
    with pytest.raises(Unavailable, match="died late"):
        await running
    assert program.calls[-1] == "stop"


async def test_asked_twice_ends_the_drain() -> None:
    program = Fake(drain=never)
    life = Lifecycle(program, 60.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    life.ask_to_stop()
    await program.draining.wait()
    life.ask_to_stop()
    await running
    assert life.state is ProgramState.STOPPED


async def test_a_drain_has_its_time_and_no_more() -> None:
    program = Fake(drain=never)
    life = Lifecycle(program, 0.01)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    life.ask_to_stop()
    await running
    assert life.state is ProgramState.STOPPED


async def test_a_drain_that_fails_still_stops() -> None:
    program = Fake(drain=fails(Unavailable("gone")))
    life = Lifecycle(program, 5.0)
    running = asyncio.create_task(life.run())
    await program.serving.wait()
    life.ask_to_stop()
    await running
    assert life.state is ProgramState.STOPPED


async def living(program: Fake, drain_seconds: float = 5.0) -> tuple[Lifecycle, asyncio.Task[None]]:
    life = Lifecycle(program, drain_seconds)
    task = asyncio.create_task(life.run())
    await program.serving.wait()
    return life, task


async def test_who_was_told_to_drain_stays_until_it_is_stopped() -> None:
    program = Fake()
    life, running = await living(program)
    life.ask_to_drain()
    life.ask_to_drain()
    while not STATUS.vitals.drained:
        await asyncio.sleep(0)
    assert life.state is ProgramState.DRAINING and not STATUS.vitals.ready
    assert "stop" not in program.calls
    life.ask_to_stop()
    await running
    assert life.state is ProgramState.STOPPED
    assert program.calls == ["start", "run", "drain", "stop"]


async def test_told_to_stop_a_drain_goes_on() -> None:
    done = asyncio.Event()

    async def drain() -> None:
        await done.wait()

    program = Fake(drain=drain)
    life, running = await living(program, 60.0)
    life.ask_to_drain()
    await program.draining.wait()
    life.ask_to_stop()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done() and not STATUS.vitals.drained
    done.set()
    await running
    assert program.calls == ["start", "run", "drain", "stop"]


async def test_told_to_stop_a_drain_has_the_rest_of_its_time() -> None:
    """Of which nothing is left; without the order to stop it would have gone on."""
    program = Fake(drain=never)
    life, running = await living(program, 0.0)
    life.ask_to_drain()
    await program.draining.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done()
    life.ask_to_stop()
    await running
    assert life.state is ProgramState.STOPPED


async def test_a_crash_of_who_has_drained() -> None:
    crash = asyncio.Event()

    async def run() -> None:
        await crash.wait()
        raise Unavailable("died late")

    program = Fake(run=run)
    life, running = await living(program)
    life.ask_to_drain()
    while not STATUS.vitals.drained:
        await asyncio.sleep(0)
    crash.set()
    with pytest.raises(Unavailable, match="died late"):
        await running


async def test_told_to_drain_while_starting() -> None:
    """Nothing was taken, so nothing is left; it begins nothing more."""
    program = Fake(start=never)
    life = Lifecycle(program, 5.0)
    running = asyncio.create_task(life.run())
    await asyncio.sleep(0)
    life.ask_to_drain()
    while not STATUS.vitals.drained:
        await asyncio.sleep(0)
    assert life.state is ProgramState.STARTING
    life.ask_to_stop()
    await running
    assert "run" not in program.calls and not life.has_served


async def test_a_load_that_stands_still_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "HEARTBEAT_SECONDS", 0.001)
    clock = ManualClock()
    monkeypatch.setattr(STATUS, "vitals", ProcessHealth(clock))
    program = Fake(start=never)
    life = Lifecycle(program, 5.0)
    running = asyncio.create_task(life.run())
    while not program.calls:
        await asyncio.sleep(0)
    report_progress("weights", 10**9, 2 * 10**9)
    clock.advance(500)
    with pytest.raises(LoadStalled, match=r"weights: 1\.00 of 2\.00 GB: no progress for 500 s"):
        await running
    assert life.state is ProgramState.FAILED


async def test_who_waits_for_what_never_answers_gives_no_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that whoever keeps it starts it again."""
    monkeypatch.setattr(lifecycle, "HEARTBEAT_SECONDS", 0.001)
    clock, beats = ManualClock(), list[float]()
    monkeypatch.setattr(STATUS, "vitals", ProcessHealth(clock))
    monkeypatch.setattr(STATUS, "beat", lambda: beats.append(clock.monotonic()))
    life, running = await living(Fake())
    with STATUS.vitals.waiting("the engine"):
        clock.advance(1.0)
        while 1.0 not in beats:
            await asyncio.sleep(0)
        clock.advance(ANSWER_SECONDS)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert max(beats) == 1.0
    while max(beats) == 1.0:
        await asyncio.sleep(0)
    assert STATUS.vitals.hang(20.0) == ""
    life.ask_to_stop()
    await running


async def test_a_stop_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "STOP_SECONDS", 0.01)
    life = Lifecycle(Fake(stop=never, start=fails(Invalid("x"))), 5.0)
    with pytest.raises(Invalid):
        await life.run()


def test_terminal_states_have_no_way_out() -> None:
    assert [state for state, after in PROGRAM_TRANSITIONS.items() if not after] == [
        ProgramState.STOPPED,
        ProgramState.FAILED,
    ]


def test_a_bug_is_never_hidden_behind_an_error_of_ours() -> None:
    ours, bug = Unavailable("gone"), ValueError("bug")
    assert single_error(BaseExceptionGroup("g", [ExceptionGroup("h", [ours])])) is ours
    assert single_error(BaseExceptionGroup("g", [ours, bug])) is None
    assert isinstance(single_error(BaseExceptionGroup("g", [ours, Invalid("x")])), BatonError)
