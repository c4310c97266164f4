"""Tests prefix fetches from the store: that no block stays pinned if a request is cancelled, and
for how long a fetch may take."""

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
from baton.worker.kv_layout import KvLayout
from prefill_worker.cluster_prefix_store import ClusterPrefixStore
from prefill_worker.reload_policy import ReloadMode, fetch_timeout_seconds
from testkit.fakes.transport import MemoryFabric, MemoryTransport
from tests.sim.virtual_time import LoopClock, simulate
from tests.sim.worker_cluster import BLOCK_TOKENS, DIGEST, SharedRunner, request

CLOCK = LoopClock()
READ_SECONDS = 12.0
NODE = Member(WorkerId("store"), Role.KVSTORE, "store:1", Incarnation(1), WorkerState.READY)


class BusyEngineHandle:
    """An engine handle whose commands wait for :meth:`run_commands`, as they would for the end of a
    step."""

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

    async def run_commands(self) -> None:
        """Let all callers enqueue their commands, then run them."""
        for _ in range(5):
            await asyncio.sleep(0)
        commands, self._commands = self._commands, []
        for command in commands:
            command()


class EndlessReads(MemoryTransport):
    def copy(self, endpoint: object, span: TransferRange) -> None:
        """Do nothing, so that the transfer never completes."""

    def poll(self, transfer: object) -> TransferState:
        return TransferState.PENDING

    def release(self, transfer: object) -> bool:
        return False


class OneNode:
    """A client of one node that has all blocks."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    has_usable_nodes = True

    async def find_node(self, keys: object, hint: object) -> Member:
        return NODE

    async def count_stored(self, node: Member, keys: list[Any]) -> int:
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
        """Do nothing."""

    async def report_damaged(self, lease: object, keys: object) -> None:
        """Do nothing."""

    def record_read_failure(self, lease: object) -> None:
        """Do nothing: the node is not avoided after a failed read."""


class LateReads(EndlessReads):
    """A transport whose transfers take :data:`READ_SECONDS`."""

    posted_at = 0.0

    def post(self, transfer: object) -> None:
        self.posted_at = CLOCK.monotonic()

    def poll(self, transfer: object) -> TransferState:
        done = CLOCK.monotonic() >= self.posted_at + READ_SECONDS
        return TransferState.DONE if done else TransferState.PENDING

    def release(self, transfer: object) -> bool:
        return True


def worker(
    reads: type[EndlessReads] = EndlessReads, call_seconds: float = 0.2
) -> tuple[Engine, BusyEngineHandle, ClusterPrefixStore]:
    runner = SharedRunner(32)
    config = EngineConfig(block_tokens=BLOCK_TOKENS, max_model_tokens=128, chunk_tokens=8)
    engine = Engine(
        runner,
        config,
        model_digest=DIGEST,
        kv_dtype="fake",
        eos_token_ids=frozenset(),
        clock=CLOCK,
    )
    transport = reads(MemoryFabric(), "worker", 1, CLOCK)
    transport.register(runner.shared.region)
    layout = KvLayout("fake", runner.block_size_bytes, CHECKSUM_XXH3, runner.checksums)  # type: ignore[arg-type]
    handle, client = BusyEngineHandle(engine), OneNode(transport)
    store = ClusterPrefixStore(
        handle, client, None, layout, config, CLOCK, call_seconds, ReloadMode.FETCH  # type: ignore[arg-type]
    )  # fmt: skip
    return engine, handle, store


async def cancel_after(num_runs: int) -> Engine:
    """Cancel a request's prefix fetch after the engine has run the fetch's commands ``num_runs``
    times; return the engine."""
    engine, handle, store = worker()
    spec = request("r", list(range(40)), 4)
    prefix_fetch = await store.find_prefix(spec, engine.key_hasher.make_chain(spec).keys)
    asking = asyncio.create_task(store.fetch_prefix(prefix_fetch, 0))
    for _ in range(num_runs):
        await handle.run_commands()
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await handle.run_commands()
    engine.check_integrity()
    return engine


def test_blocks_of_a_cancelled_import_are_released() -> None:
    counts = simulate(cancel_after(0)).stats().pool
    assert counts.free == counts.num_blocks


def test_blocks_of_an_unfinished_transfer_are_quarantined() -> None:
    counts = simulate(cancel_after(1)).stats().pool
    assert counts.quarantined == 9 and counts.free == counts.num_blocks - 9


def test_store_lookup_does_not_wait_for_a_step() -> None:
    async def ask() -> int:
        engine, _, store = worker()  # its engine handle never answers
        spec = request("r", list(range(40)), 4)
        return (
            await store.find_prefix(spec, engine.key_hasher.make_chain(spec).keys)
        ).num_stored_blocks

    # Fetching the block that ends with the last token would gain nothing.
    assert simulate(ask()) == 9


@pytest.mark.parametrize(
    ("estimate_seconds", "timeout_seconds"), [(0.0, 10.0), (5.0, 10.0), (8.0, 16.0), (90.0, 120.0)]
)
def test_fetch_may_take_twice_the_predicted_time(
    estimate_seconds: float, timeout_seconds: float
) -> None:
    assert fetch_timeout_seconds(estimate_seconds) == timeout_seconds


@pytest.mark.parametrize(("known", "error"), [(False, "timeout"), (True, "")])
def test_long_fetch_over_a_link_that_is_known_to_be_slow_is_not_given_up(
    known: bool, error: str
) -> None:
    """The fetch takes 12 s."""

    async def ask() -> str:
        engine, handle, store = worker(LateReads, 30.0)
        if known:
            size = 9 * BLOCK_TOKENS * 8
            store._link_meter.record("store/dram", size, READ_SECONDS)
        spec = request("r", list(range(40)), 4)
        fetch = await store.find_prefix(spec, engine.key_hasher.make_chain(spec).keys)
        asking = asyncio.create_task(store.fetch_prefix(fetch, 0))
        await handle.run_commands()
        await asking
        return fetch.stats.error

    assert simulate(ask()) == error
