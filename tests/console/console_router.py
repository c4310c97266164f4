"""A router with in-memory workers in a thread, for tests that look at its console in a browser."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.placement import Placement, PlacementQuery, ScoredWorker
from baton.core.states import Role, WorkerState
from baton.core.worker_load import WorkerLoad
from baton.text.tokenizer import Tokenizer
from testkit.fakes.workers import MemoryPlacer
from tests.router_harness import RouterHarness, serve_over_tcp

CALL_SECONDS = 20.0

CONDUCTOR = Member(
    WorkerId("conductor"), Role.CONDUCTOR, "127.0.0.1:1", Incarnation(1), WorkerState.READY
)


class ExplainingPlacer(MemoryPlacer):
    """Places like :class:`MemoryPlacer`, but not while ``is_held``, and gives the scores that a
    conductor gives."""

    is_held = False

    async def place(self, query: PlacementQuery) -> Placement:
        while self.is_held:
            await asyncio.sleep(0.01)
        placed = await super().place(query)
        scores = [ScoredWorker(WorkerId("d0"), 0.12, 0.02, 0.1), ScoredWorker(WorkerId("d1"), 0.5)]
        return replace(
            placed, reason="d0 has the least load", policy="baton", decode_alternatives=scores
        )


class ConsoleRouter:
    """A router that serves at ``url``, with ``members`` or, if they are None, with a conductor and
    one worker of each role. Its event loop runs in a thread of its own; tests change what it knows
    through :meth:`call`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        port: int = 0,
        members: Sequence[Member] | None = None,
        **settings: Any,
    ) -> None:
        self.harness = RouterHarness(tokenizer, "A short answer.", False, **settings)
        self.placer = ExplainingPlacer([self.harness.prefill], [self.harness.decode])
        model = self.harness.model
        model.generation_context = replace(model.generation_context, placer=self.placer)
        known = self.harness.members
        known.list = [*known.list, CONDUCTOR] if members is None else list(members)
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def call(self, action: Callable[[], object]) -> None:
        """Run ``action`` in the router's thread, and let the router notice what it changed."""

        async def run() -> None:
            action()
            await self.harness.service.cluster.refresh()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_SECONDS)

    def set_members(self, members: Sequence[Member]) -> None:
        def change() -> None:
            self.harness.members.list = list(members)

        self.call(change)

    def start(self) -> None:
        self._thread.start()
        if not self._started.wait(CALL_SECONDS):
            raise RuntimeError("the router did not start")

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CALL_SECONDS)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        async with serve_over_tcp(self.harness, port=self._port) as url:
            self.url = url
            self._started.set()
            await self._stop.wait()
            self.harness.service.draining = True


@contextmanager
def open_console_router(
    tokenizer: Tokenizer,
    port: int = 0,
    members: Sequence[Member] | None = None,
    **settings: Any,
) -> Iterator[ConsoleRouter]:
    router = ConsoleRouter(tokenizer, port, members, **settings)
    router.start()
    try:
        yield router
    finally:
        router.stop()


def mock_worker(number: int, role: Role, load: WorkerLoad | None = None) -> Member:
    """Return a worker as it registers on a cluster of GPUs."""
    name = f"{role.value}-{number}"
    return Member(
        WorkerId(name),
        role,
        f"10.0.{number // 250}.{number % 250}:50051",
        Incarnation(1),
        WorkerState.READY,
        host=f"host-{number // 8}",
        model="/models/Qwen3-8B",
        model_digest="ab",
        block_tokens=16,
        kv_dtype="bfloat16",
        kv_bytes_per_token=147_456,
        device="NVIDIA H100",
        max_model_tokens=4096,
        transports=("nixl", "grpc"),
        load=load or WorkerLoad(running=number % 40, num_blocks=30_000, free_blocks=12_000),
    )


def mock_workers(num_workers: int) -> list[Member]:
    """Return ``num_workers`` workers, half of them in each role, sorted by id."""
    roles = (Role.PREFILL, Role.DECODE)
    workers = [mock_worker(number, roles[number % 2]) for number in range(num_workers)]
    return sorted(workers, key=lambda worker: worker.id)
