"""Prefixes from the store, and requests that end while theirs comes in: nothing stays pinned."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.ids import Incarnation, WorkerId
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.core.store import LeasedBlocks
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.transport.base import TransferRange, TransferState
from baton.transport.memory import MemoryFabric, MemoryTransport
from baton.worker.cluster_prefix_store import ClusterPrefixStore
from baton.worker.kv_layout import KvLayout
from baton.worker.reload_policy import ReloadMode
from tests.sim.virtual_time import LoopClock, simulate
from tests.sim.worker_cluster import BLOCK_TOKENS, DIGEST, SharedRunner, request

CLOCK = LoopClock()
NODE = Member(WorkerId("store"), Role.KVSTORE, "store:1", Incarnation(1), WorkerState.READY)


class BusyDoor:
    """Commands wait for :meth:`turn`, as they do for a step to end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: list[Callable[[], None]] = []

    async def call(self, command: Callable[[Engine], Any]) -> Any:
        answer = asyncio.get_running_loop().create_future()

        def run() -> None:
            value = command(self._engine)
            if not answer.done():
                answer.set_result(value)

        self._commands.append(run)
        return await answer

    def send(self, command: Callable[[Engine], object]) -> None:
        self._commands.append(lambda: (command(self._engine), None)[1])

    async def turn(self) -> None:
        """Lets everybody ask, then answers."""
        for _ in range(5):
            await asyncio.sleep(0)
        commands, self._commands = self._commands, []
        for command in commands:
            command()


class EndlessReads(MemoryTransport):
    def copy(self, endpoint: object, span: TransferRange) -> None:
        """Nothing comes."""

    def poll(self, transfer: object) -> TransferState:
        return TransferState.PENDING

    def release(self, transfer: object) -> bool:
        return False


class OneNode:
    """A client of one node that has everything."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    has_nodes = True

    async def find(self, keys: object, hint: object) -> Member:
        return NODE

    async def num_held(self, node: Member, keys: list[Any]) -> int:
        return len(keys)

    async def lease(self, node: Member, keys: list[Any], max_bytes: int) -> Any:
        size = BLOCK_TOKENS * 8
        blocks = tuple(BlockRef(n * size, size, 0, key) for n, key in enumerate(keys))
        leased = LeasedBlocks("1", CHECKSUM_XXH3, blocks, len(keys))
        peer = self._transport.connect(self._transport.export())
        return SimpleNamespace(
            node=node, transport=self._transport, peer=peer, leased=leased, blocks=blocks
        )

    async def release(self, lease: object) -> None:
        """It ends."""

    def blame(self, lease: object) -> None:
        """It could do better."""


def worker() -> tuple[Engine, BusyDoor, ClusterPrefixStore]:
    runner = SharedRunner(32)
    config = EngineConfig(block_tokens=BLOCK_TOKENS, max_model_tokens=128)
    engine = Engine(
        runner,
        config,
        model_digest=DIGEST,
        kv_dtype="fake",
        eos_token_ids=frozenset(),
        clock=CLOCK,
    )
    transport = EndlessReads(MemoryFabric(), "worker", 1, CLOCK)
    transport.register(runner.shared.region)
    layout = KvLayout("fake", runner.block_size_bytes, CHECKSUM_XXH3, runner.checksums)  # type: ignore[arg-type]
    door, client = BusyDoor(engine), OneNode(transport)
    store = ClusterPrefixStore(
        door, client, None, layout, BLOCK_TOKENS, 8, CLOCK, 0.2, ReloadMode.FETCH  # type: ignore[arg-type]
    )  # fmt: skip
    return engine, door, store


async def cancel_after(num_turns: int) -> Engine:
    """The engine after a request was cancelled so many steps after it asked for its prefix."""
    engine, door, store = worker()
    spec = request("r", list(range(40)), 4)
    extension = await store.find(spec, engine.keys.chain(spec).keys)
    asking = asyncio.create_task(store.extend(extension, 0))
    for _ in range(num_turns):
        await door.turn()
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await door.turn()
    engine.check_integrity()
    return engine


def test_blocks_of_an_import_that_nobody_waits_for_are_given_back() -> None:
    counts = simulate(cancel_after(0)).stats().pool
    assert counts.free == counts.num_blocks


def test_a_stray_read_does_not_hide_that_its_request_was_cancelled() -> None:
    counts = simulate(cancel_after(1)).stats().pool
    assert counts.quarantined == 9 and counts.free == counts.num_blocks - 9


def test_the_store_is_asked_without_waiting_for_a_step() -> None:
    async def ask() -> int:
        engine, _, store = worker()  # whose door answers nobody
        spec = request("r", list(range(40)), 4)
        return (await store.find(spec, engine.keys.chain(spec).keys)).num_stored

    assert simulate(ask()) == 9  # the block that ends with the last token is no gain
