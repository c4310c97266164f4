"""Tests that if one request causes an exception in a worker's event loop, in its engine thread or
in its grammar, only that request fails."""

import asyncio
from typing import Any

import pytest

from baton.core.request import RequestOutput
from baton.core.task import Task
from baton.engine.engine import Engine
from testkit.fakes.runner import reference_answer
from tests.byte_grammars import EOS, byte_grammars, choice, grammar_request
from tests.sim.worker_cluster import Cluster, cluster, collect, request, tokens_of

GOOD = request("good", list(range(30)), 20)


async def run_beside_good(running: Cluster, failing: Any) -> tuple[RequestOutput, tuple[int, ...]]:
    """Run the request ``failing`` together with GOOD. Return the last output of ``failing`` and the
    tokens of GOOD."""
    stream = running.decode.worker.open_stream()
    for spec in (failing, GOOD):
        stream.submit(spec, Task.PREFILL_AND_DECODE, None)
    outputs = await collect(stream, lambda all_: sum(bool(o.finish_reason) for o in all_) == 2)
    await running.decode.wait_until_free()
    stream.close()
    [end] = [each for each in outputs if each.request_id == "r" and each.finish_reason]
    return end, tokens_of([each for each in outputs if each.request_id == "good"])


async def test_an_exception_in_output_delivery_fails_one_request() -> None:
    async with cluster() as running:
        worker, deliver = running.decode.worker, running.decode.worker._deliver

        def crash(job: Any, output: RequestOutput) -> None:
            if job.request_id == "r" and output.first_index == 3:
                raise ZeroDivisionError
            deliver(job, output)

        worker._deliver = crash  # type: ignore[method-assign]
        end, tokens = await run_beside_good(running, request("r", [1, 2, 3], 20))
    assert (end.details["error_status"], end.error) == ("INTERNAL", "internal error")
    assert tokens == reference_answer(GOOD)[0]


async def test_an_exception_in_the_store_lookup_fails_one_request() -> None:
    async with cluster() as running:
        store = running.decode.store
        find = store.find_prefix

        async def crash(spec: Any, keys: Any) -> Any:
            if spec.request_id == "r/1":
                raise ZeroDivisionError
            return await find(spec, keys)

        store.find_prefix = crash  # type: ignore[method-assign]
        end, tokens = await run_beside_good(running, request("r", [1, 2, 3], 20))
    assert end.details["error_status"] == "INTERNAL"
    assert tokens == reference_answer(GOOD)[0]


async def test_an_exception_in_the_step_callback_fails_no_request() -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError

    async with cluster() as running:
        running.decode.store.record_step = crash  # type: ignore[method-assign]
        spec = request("r", [1, 2, 3], 20)
        _, tokens = await run_beside_good(running, spec)
    assert tokens == reference_answer(GOOD)[0]


@pytest.mark.parametrize("part", ["mask", "accept"])
async def test_a_grammar_that_panics_fails_one_request(part: str) -> None:
    """A panic in a native library raises a BaseException that is not an Exception."""

    class Panic(BaseException):
        pass

    def panic(*_: object) -> bytes:
        raise Panic

    grammars = byte_grammars()
    opened = grammars.create

    def open_failing(*arguments: Any) -> Any:
        constraint = opened(*arguments)
        setattr(constraint, part, panic)
        return constraint

    grammars.create = open_failing  # type: ignore[method-assign]
    async with cluster(constraints=grammars, eos=frozenset({EOS})) as running:
        end, tokens = await run_beside_good(
            running, grammar_request("r", choice("yes", "yesterday"), 1)
        )
    assert "the grammar can't be enforced any more: Panic" in end.error
    assert tokens == reference_answer(GOOD)[0]


async def test_a_failing_command_crashes_the_engine_only_if_integrity_is_lost() -> None:
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
