"""Tests that a worker loads and unloads adapters as the settings and the registry want them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from baton.clock import ManualClock
from baton.core.adapter import AdapterEntry, AdapterRef, WorkerAdapter
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.lora.table import AdapterTable, LoadedAdapter
from baton.errors import Invalid, Overloaded, Unavailable
from baton.worker.adapters import RETRY_SECONDS, UNLOAD_DELAY_SECONDS, WorkerAdapters
from testkit.fakes.adapter_registry import MemoryAdapterRegistry
from testkit.fakes.runner import FakeRunner

T = TypeVar("T")
MODEL = "base"


def digest(text: str) -> bytes:
    return text.encode().ljust(16, b".")


def entry(name: str, folder: str = "", model: str = MODEL) -> AdapterEntry:
    """Return the entry of an adapter whose folder and digest have the same text."""
    folder = folder or name
    return AdapterEntry(name, folder, digest(folder), model)


class UnreliableRegistry(MemoryAdapterRegistry):
    is_reachable = True

    async def adapters(self) -> list[AdapterEntry]:
        if not self.is_reachable:
            raise Unavailable("the registry can't be reached")
        return await super().adapters()


class Bench:
    """A worker's adapters over a fake runner. ``broken`` are folders that can't be loaded."""

    def __init__(self, max_adapters: int = 3, settings: dict[str, str] | None = None) -> None:
        self.clock = ManualClock()
        self.registry = UnreliableRegistry()
        self.engine = Engine(
            FakeRunner(16, 4),
            EngineConfig(block_tokens=4, max_model_tokens=32),
            model_digest=b"fake",
            kv_dtype="float64",
            eos_token_ids=frozenset(),
            clock=self.clock,
            adapters=AdapterTable(max_adapters),
        )
        self.broken: set[str] = set()
        self.loads: list[str] = []
        self.changes: list[tuple[WorkerAdapter, ...]] = []
        self.adapters = WorkerAdapters(
            self.load,
            self,
            self.registry,
            self.clock,
            settings=settings or {},
            model=MODEL,
            on_change=lambda: self.changes.append(self.adapters.announced),
        )

    def load(self, folder: Path) -> LoadedAdapter:
        self.loads.append(folder.name)
        if folder.name in self.broken:
            raise Invalid(f"{folder.name} is broken")
        return LoadedAdapter(digest(folder.name), None, rank=8, size_bytes=100)

    async def call(self, command: Callable[[Engine], T]) -> T:
        return command(self.engine)

    def send(self, command: Callable[[Engine], object]) -> None:
        command(self.engine)

    async def refresh(self, *entries: AdapterEntry) -> tuple[WorkerAdapter, ...]:
        """Set the registry's entries, refresh, and return what is announced then."""
        for each in await MemoryAdapterRegistry.adapters(self.registry):
            await self.registry.remove_adapter(each.name)
        for each in entries:
            await self.registry.put_adapter(each)
        await self.adapters.refresh()
        return self.adapters.announced

    def add_request(self, name: str, adapter: AdapterEntry) -> None:
        spec = RequestSpec(
            RequestId(name), Epoch(1), (TokenId(1),), 1, SamplingParams(max_tokens=3),
            adapter=adapter.ref,
        )  # fmt: skip
        self.engine.add(spec, Task.PREFILL_AND_DECODE)


async def test_wanted_adapters_are_loaded_and_announced() -> None:
    bench = Bench()
    assert await bench.refresh(entry("a"), entry("b"), entry("other", model="m")) == (
        WorkerAdapter("a", digest("a")),
        WorkerAdapter("b", digest("b")),
    )
    assert bench.loads == ["a", "b"]
    assert bench.changes[-1] == bench.adapters.announced
    await bench.refresh(entry("a"), entry("b"))
    assert bench.loads == ["a", "b"]
    bench.add_request("x", entry("a"))


async def test_removed_adapter_is_unloaded_after_its_last_request() -> None:
    bench = Bench()
    await bench.refresh(entry("a"))
    bench.add_request("x", entry("a"))
    assert await bench.refresh() == ()
    bench.add_request("late", entry("a"))
    bench.clock.advance(UNLOAD_DELAY_SECONDS)
    await bench.refresh()
    with pytest.raises(Unavailable, match="is not loaded on this worker"):
        bench.add_request("too-late", entry("a"))
    assert bench.adapters.stats.num_loaded == 1
    while bench.engine.has_work():
        bench.engine.step()
    await bench.refresh()
    assert (bench.adapters.stats.num_loaded, bench.adapters.stats.size_bytes) == (0, 0)


async def test_adapter_that_returns_in_time_stays_loaded() -> None:
    bench = Bench()
    await bench.refresh(entry("a"))
    await bench.refresh()
    assert await bench.refresh(entry("a")) == (WorkerAdapter("a", digest("a")),)
    bench.clock.advance(UNLOAD_DELAY_SECONDS)
    await bench.refresh(entry("a"))
    bench.add_request("x", entry("a"))


async def test_new_weights_replace_the_old_ones_once_they_are_loaded() -> None:
    bench = Bench()
    await bench.refresh(entry("a", "v1"))
    bench.broken = {"v2"}
    assert await bench.refresh(entry("a", "v2")) == (WorkerAdapter("a", digest("v1")),)
    bench.broken = set()
    bench.clock.advance(RETRY_SECONDS)
    assert await bench.refresh(entry("a", "v2")) == (WorkerAdapter("a", digest("v2")),)
    bench.add_request("old", entry("a", "v1"))
    bench.clock.advance(UNLOAD_DELAY_SECONDS)
    await bench.refresh(entry("a", "v2"))
    bench.add_request("new", entry("a", "v2"))
    with pytest.raises(Unavailable):
        bench.add_request("late", entry("a", "v1"))


async def test_weights_with_two_names_stay_until_both_are_removed() -> None:
    bench = Bench()
    await bench.refresh(entry("a", "x"), entry("b", "x"))
    await bench.refresh(entry("b", "x"))
    bench.clock.advance(UNLOAD_DELAY_SECONDS)
    await bench.refresh(entry("b", "x"))
    bench.add_request("x", entry("b", "x"))


async def test_failed_load_is_announced_and_tried_again() -> None:
    bench = Bench()
    bench.broken = {"a"}
    announced = await bench.refresh(entry("a"), entry("b"))
    assert announced == (
        WorkerAdapter("a", digest("a"), "a is broken"),
        WorkerAdapter("b", digest("b")),
    )
    await bench.refresh(entry("a"), entry("b"))
    assert bench.loads == ["a", "b"]
    bench.clock.advance(RETRY_SECONDS)
    bench.broken = set()
    assert [each.error for each in await bench.refresh(entry("a"), entry("b"))] == ["", ""]
    assert bench.adapters.stats.num_load_failures == 1


async def test_broken_adapter_is_read_less_and_less_often_until_its_entry_changes() -> None:
    bench = Bench()
    bench.broken = {"v1", "v2"}
    for folder in ("v1", "v2"):
        start, read_at = bench.clock.monotonic(), []
        for _ in range(200):
            bench.loads.clear()
            await bench.refresh(entry("a", folder))
            if bench.loads:
                read_at.append(bench.clock.monotonic() - start)
            bench.clock.advance(RETRY_SECONDS)
        assert read_at == [0, 10, 30, 70, 150, 310, 630, 1230, 1830]
    bench.broken = set()
    await bench.refresh()
    assert await bench.refresh(entry("a", "v2")) == (WorkerAdapter("a", digest("v2")),)


async def test_folder_with_other_weights_than_announced_is_refused() -> None:
    bench = Bench()
    (announced,) = await bench.refresh(AdapterEntry("a", "a", digest("changed"), MODEL))
    assert "other files than when the adapter was added" in announced.error


async def test_too_many_adapters_are_refused() -> None:
    bench = Bench(max_adapters=2)
    errors = [each.error for each in await bench.refresh(entry("a"), entry("b"), entry("c"))]
    assert errors == ["", "", "2 adapters are loaded, the maximum (max_adapters)"]


async def test_adapter_without_room_is_not_read() -> None:
    bench = Bench(max_adapters=2)
    for _ in range(10):
        await bench.refresh(entry("a"), entry("b"), entry("c"))
        bench.clock.advance(RETRY_SECONDS)
    assert bench.loads == ["a", "b"]
    await bench.refresh(entry("b"), entry("c"), entry("same", "b"))
    assert bench.loads == ["a", "b", "b"]  # needs no room
    bench.clock.advance(RETRY_SECONDS)  # the latest attempt to load c was before a was unloaded
    await bench.refresh(entry("b"), entry("c"))
    bench.clock.advance(RETRY_SECONDS)
    assert await bench.refresh(entry("b"), entry("c")) == (
        WorkerAdapter("b", digest("b")),
        WorkerAdapter("c", digest("c")),
    )
    assert bench.loads == ["a", "b", "b", "c"]


async def test_outage_of_the_registry_changes_nothing() -> None:
    bench = Bench()
    await bench.refresh(entry("a"))
    bench.registry.is_reachable = False
    bench.clock.advance(UNLOAD_DELAY_SECONDS)
    assert await bench.refresh() == (WorkerAdapter("a", digest("a")),)


async def test_registry_that_lost_its_data_gets_it_again() -> None:
    bench = Bench()
    await bench.refresh(entry("a"), entry("b"))
    bench.registry.database_id = "another"
    changed = entry("b", "v2")
    assert await bench.refresh(changed) == (
        WorkerAdapter("a", digest("a")),
        WorkerAdapter("b", digest("v2")),
    )
    assert await bench.registry.adapters() == [entry("a"), changed]


async def test_adapters_of_the_settings_are_always_loaded() -> None:
    bench = Bench(settings={"s": "folder"})
    bench.adapters.load_settings(bench.engine)
    assert bench.adapters.announced == (WorkerAdapter("s", digest("folder"), in_settings=True),)
    bench.clock.advance(UNLOAD_DELAY_SECONDS)
    announced = await bench.refresh(entry("a"), entry("s", "elsewhere"))
    assert announced == (
        WorkerAdapter("a", digest("a")),
        WorkerAdapter("s", digest("folder"), in_settings=True),
    )
    assert bench.loads == ["folder", "a"]


def test_worker_with_a_broken_adapter_in_its_settings_does_not_start() -> None:
    bench = Bench(settings={"s": "folder"})
    bench.broken = {"folder"}
    with pytest.raises(Invalid, match="adapter s: folder is broken"):
        bench.adapters.load_settings(bench.engine)
    many = Bench(max_adapters=1, settings={"s": "folder", "t": "other"})
    with pytest.raises(Overloaded, match="max_adapters"):
        many.adapters.load_settings(many.engine)


def test_entry_gives_the_reference_of_requests() -> None:
    assert entry("a").ref == AdapterRef("a", digest("a"))
