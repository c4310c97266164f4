"""Tests that the engine's thread refuses new calls while it is busy, but never those that release
blocks."""

import asyncio
import threading

import pytest

from baton.clock import ManualClock
from baton.core.ids import BlockId
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.errors import Overloaded, Unavailable
from baton.worker import engine_thread
from baton.worker.engine_thread import EngineThread
from testkit.fakes.runner import FakeRunner


def new_engine() -> Engine:
    return Engine(
        FakeRunner(8, 4),
        EngineConfig(block_tokens=4, max_model_tokens=32),
        model_digest=b"model",
        kv_dtype="float32",
        eos_token_ids=frozenset(),
        clock=ManualClock(),
    )


async def test_command_that_gives_blocks_back_is_never_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_thread, "MAX_COMMANDS", 3)
    engine, may_continue = new_engine(), threading.Event()
    thread = EngineThread(engine, lambda result: None, lambda error: None)
    thread.start()
    keys = [engine.key_hasher.root_key(b"tenant")]
    block_ids = await thread.call(lambda engine: engine.begin_import(keys))
    assert block_ids is not None and engine.stats().pool.free == 7
    entered = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def block_thread(engine: Engine) -> None:
        loop.call_soon_threadsafe(entered.set_result, None)
        may_continue.wait()

    thread.send(block_thread)
    await entered
    asking = [asyncio.create_task(thread.call(lambda engine: None)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await thread.call(lambda engine: None)
    thread.send(lambda engine: engine.finish_import(keys, block_ids, 0))
    may_continue.set()
    await asyncio.gather(*asking)
    assert await thread.call(lambda engine: engine.stats().pool.free) == 8
    await thread.stop()


async def test_stopped_thread_ignores_sends_and_rejects_calls() -> None:
    thread = EngineThread(new_engine(), lambda result: None, lambda error: None)
    thread.start()
    await thread.stop()
    thread.send(lambda engine: engine.release_quarantine([BlockId(0)]))
    with pytest.raises(Unavailable, match="has stopped"):
        await thread.call(lambda engine: None)
