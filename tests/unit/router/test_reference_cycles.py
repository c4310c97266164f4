"""Tests that requests leave no reference cycles. What a cycle holds is freed only by the garbage
collector, which blocks the event loop meanwhile."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.core.placement import Placement, PlacementQuery
from baton.errors import Overloaded
from baton.rpc.conductor_client import request_placement
from baton.text.tokenizer import Tokenizer
from tests import router_harness
from tests.router_harness import CHAT, chat, eventually, open_harness
from tests.unit.router.generation.test_framed_placement import FakeCore, asking, placing, question

tokenizer = router_harness.tokenizer


@contextmanager
def found_cycles() -> Iterator[Counter[str]]:
    """Yield a counter that contains, after the block, the classes of Baton's objects and of
    exceptions that only the garbage collector could free."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(each).__name__ for each in gc.garbage if _counts(each))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _counts(garbage: object) -> bool:
    """A cancelled task of asyncio, which may end during the test, leaves a cycle of its own."""
    package = type(garbage).__module__.partition(".")[0]
    return package in {"baton", "router"} or isinstance(garbage, Exception)


async def test_cycle_is_found() -> None:
    with found_cycles() as found:
        error = Overloaded("full")
        error.__context__ = RuntimeError()
        error.__context__.__context__ = error
        del error
    assert found == {"Overloaded": 1, "RuntimeError": 1}


async def test_refused_placement_leaves_no_cycle() -> None:
    core = FakeCore(Overloaded("full"))
    async with asking(placing(core)) as client:
        core.failure, failure = None, core.failure
        await request_placement(client, question(), 10.0)  # opens the connection
        core.failure = failure
        with found_cycles() as found:
            for _ in range(3):
                with pytest.raises(Overloaded):
                    await request_placement(client, question(), 10.0)
    assert found == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_answered_request_leaves_no_cycle(tokenizer: Tokenizer, stream: bool) -> None:
    async with open_harness(tokenizer) as (_, client):
        with found_cycles() as found:
            assert (await client.post(CHAT, json=chat(stream=stream))).status_code == 200
    assert found == {}


async def test_request_that_the_conductor_refuses_leaves_no_cycle(tokenizer: Tokenizer) -> None:
    async def refuse(query: PlacementQuery) -> Placement:
        raise Overloaded("full")

    async with open_harness(tokenizer) as (router, client):
        router.placer.place = refuse  # type: ignore[method-assign]
        with found_cycles() as found:
            assert (await client.post(CHAT, json=chat(stream=True))).status_code == 429
    assert found == {}


async def test_request_that_a_worker_refuses_leaves_no_cycle(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, automatic=False) as (router, client):
        with found_cycles() as found:
            for _ in range(3):
                task = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
                await eventually(lambda: bool(router.prefill.jobs))
                router.prefill.fail_jobs("RESOURCE_EXHAUSTED", "full")
                assert (await task).status_code == 429
            del task
    assert found == {}
