"""An exception that belongs to one request ends that one: in a worker's event loop, in its engine's
thread, and in its grammar."""

import asyncio
from typing import Any

import pytest

from baton.core.request import RequestOutput
from baton.core.task import Task
from baton.engine.engine import Engine
from baton.engine.fake_runner import reference_answer
from tests.grammar_house import EOS, asking, byte_grammars, choice
from tests.sim.worker_cluster import Cluster, cluster, collect, request, tokens_of

SOUND = request("sound", list(range(30)), 20)


async def beside(running: Cluster, spoiled: Any) -> tuple[RequestOutput, tuple[int, ...]]:
    """The end of ``spoiled``, and the answer of a sound request beside it."""
    stream = running.decode.worker.open_stream()
    for spec in (spoiled, SOUND):
        stream.submit(spec, Task.WHOLE, None)
    outputs = await collect(stream, lambda got: sum(bool(each.finish_reason) for each in got) == 2)
    await running.decode.wait_until_free()
    stream.close()
    [end] = [each for each in outputs if each.request_id == "r" and each.finish_reason]
    return end, tokens_of([each for each in outputs if each.request_id == "sound"])


async def test_a_crash_in_one_delivery_is_one_request_s() -> None:
    async with cluster() as running:
        worker, deliver = running.decode.worker, running.decode.worker._deliver

        def crash(job: Any, output: RequestOutput) -> None:
            if job.request_id == "r" and output.first_index == 3:
                raise ZeroDivisionError
            deliver(job, output)

        worker._deliver = crash  # type: ignore[method-assign]
        end, sound = await beside(running, request("r", [1, 2, 3], 20))
    assert (end.details["error_status"], end.error) == ("INTERNAL", "internal error")
    assert sound == reference_answer(SOUND)[0]


async def test_a_crash_on_the_way_in_is_one_request_s() -> None:
    async with cluster() as running:
        store = running.decode.worker._store
        find = store.find

        async def crash(spec: Any, keys: Any) -> Any:
            if spec.request_id == "r/1":
                raise ZeroDivisionError
            return await find(spec, keys)

        store.find = crash  # type: ignore[method-assign]
        end, sound = await beside(running, request("r", [1, 2, 3], 20))
    assert end.details["error_status"] == "INTERNAL"
    assert sound == reference_answer(SOUND)[0]


async def test_what_is_noted_of_steps_may_crash() -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError

    async with cluster() as running:
        running.decode.worker._store.note_step = crash  # type: ignore[method-assign]
        spec = request("r", [1, 2, 3], 20)
        _, sound = await beside(running, spec)
    assert sound == reference_answer(SOUND)[0]


@pytest.mark.parametrize("part", ["mask", "accept"])
async def test_a_grammar_that_panics_is_one_request_s(part: str) -> None:
    """A native library's panic is no Exception."""

    class Panic(BaseException):
        pass

    def panic(*_: object) -> bytes:
        raise Panic

    grammars = byte_grammars()
    opened = grammars.open

    def open_spoiled(*arguments: Any) -> Any:
        constraint = opened(*arguments)
        setattr(constraint, part, panic)
        return constraint

    grammars.open = open_spoiled  # type: ignore[method-assign]
    async with cluster(constraints=grammars, eos=frozenset({EOS})) as running:
        end, sound = await beside(running, asking("r", choice("yes", "yesterday"), 1))
    assert "the grammar can't be followed any more: Panic" in end.error
    assert sound == reference_answer(SOUND)[0]


async def test_a_command_that_crashes_is_its_caller_s_while_the_books_balance() -> None:
    def crash(engine: Engine) -> None:
        raise ZeroDivisionError

    def damage(engine: Engine) -> None:
        engine._pool.check_integrity = crash  # type: ignore[method-assign, assignment]
        raise ZeroDivisionError

    async with cluster() as running:
        thread = running.decode.thread
        with pytest.raises(ZeroDivisionError):
            await thread.call(crash)
        assert await thread.call(lambda engine: engine.has_work()) is False
        with pytest.raises(ZeroDivisionError):
            await thread.call(damage)
        while not running.decode.crashes:
            await asyncio.sleep(0)
        running.decode.crashes.clear()
