"""Keeps the LoRA adapters that a worker has loaded as the settings and the registry want them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import structlog

from baton.clock import Clock
from baton.concurrency.threads import run_in_thread
from baton.core.adapter import (
    ADAPTER_DIGEST_BYTES,
    MAX_ADAPTER_ERROR,
    AdapterEntry,
    WorkerAdapter,
)
from baton.engine.engine import Engine
from baton.engine.lora.table import LoadedAdapter
from baton.errors import BatonError, Invalid
from baton.registry.adapters import AdapterRegistry
from baton.worker.adapter_stats import AdapterStats
from baton.worker.engine_thread import EngineHandle
from baton.worker.limits import MAX_ADAPTER_RETRY_SECONDS

REFRESH_SECONDS = 0.5
"""Interval at which the registry is read."""

RETRY_SECONDS = 10.0
"""An adapter that could not be loaded is tried again after this time: its folder may have been
incomplete, or another adapter may have been unloaded."""

UNLOAD_DELAY_SECONDS = 5.0
"""Time between the end of an adapter's announcement and the refusal of new requests for it, so that
routers and conductors have learnt of it and send none."""

UNKNOWN_DIGEST = bytes(ADAPTER_DIGEST_BYTES)

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Failure:
    entry: AdapterEntry
    error: str
    delay_seconds: float
    retry_at_seconds: float


@dataclass(slots=True)
class _Books:
    """The state of the adapters, by name and by digest. An adapter in ``unload_at`` is no longer
    announced, and is unloaded at this time."""

    loaded: dict[str, AdapterEntry] = field(default_factory=dict)
    failures: dict[str, _Failure] = field(default_factory=dict)
    unload_at: dict[bytes, float] = field(default_factory=dict)


class WorkerAdapters:
    """Loads and unloads adapters, one at a time, while the worker serves.

    ``load`` reads and prepares the adapter in a folder; it is called in a thread. ``settings`` are
    the adapters of the worker's settings, name → folder, which are never unloaded. ``model`` is the
    name of the worker's model: entries of the registry for other models are ignored. ``on_change``
    is called when :attr:`announced` has changed.
    """

    def __init__(
        self,
        load: Callable[[Path], LoadedAdapter],
        engine: EngineHandle,
        registry: AdapterRegistry,
        clock: Clock,
        *,
        settings: Mapping[str, str],
        model: str,
        on_change: Callable[[], None],
    ) -> None:
        self.stats = AdapterStats()
        self._load = load
        self._engine = engine
        self._registry = registry
        self._clock = clock
        self._settings = {
            name: AdapterEntry(name, path, UNKNOWN_DIGEST, model) for name, path in settings.items()
        }
        self._model = model
        self._on_change = on_change
        self._books = _Books()
        self._wanted: dict[str, AdapterEntry] = {}
        self._database_id = ""
        self._last_error = ""

    @property
    def announced(self) -> tuple[WorkerAdapter, ...]:
        """The adapters that requests may use, and those that could not be loaded, by name."""
        loaded = {
            name: WorkerAdapter(name, entry.digest, in_settings=name in self._settings)
            for name, entry in self._books.loaded.items()
        }
        failed = {
            name: WorkerAdapter(name, each.entry.digest, each.error)
            for name, each in self._books.failures.items()
            if name not in loaded
        }
        return tuple(both[1] for both in sorted((loaded | failed).items()))

    def load_settings(self, engine: Engine) -> None:
        """Load the adapters of the settings. Call this before the engine's thread has started.
        Raises Invalid if one can't be loaded, Overloaded if there are too many."""
        for name, entry in self._settings.items():
            try:
                adapter = self._load(Path(entry.path))
            except Invalid as error:
                raise Invalid(f"adapter {name}: {error}", param="adapters") from error
            engine.add_adapter(adapter)
            self._record_loaded(entry, adapter)

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Load and unload what has changed since the last call. Return when that is done; adapters
        in use are unloaded by a later call."""
        await self._read_registry()
        wanted = self._wanted | self._settings
        for name in [name for name in self._books.loaded if name not in wanted]:
            self._stop_announcing(name)
        for name in [name for name in self._books.failures if name not in wanted]:
            del self._books.failures[name]
            self._on_change()
        for entry in wanted.values():
            if self._needs_load(entry):
                await self._load_one(entry)
        await self._unload_due()

    async def _read_registry(self) -> None:
        """Update the wanted adapters. If the registry can't be reached, they stay as they are; if
        it has lost its data, write them again."""
        try:
            found = {entry.name: entry for entry in await self._registry.adapters()}
            lost_data = self._database_id not in ("", self._registry.database_id)
            if lost_data:
                for entry in self._wanted.values():
                    await self._registry.put_adapter(entry, keep_existing=True)
                found = self._wanted | found
        except BatonError as error:
            if str(error) != self._last_error:
                log.warning("adapters_stale", error=str(error))
            self._last_error = str(error)
            return
        self._last_error = ""
        self._database_id = self._registry.database_id
        self._wanted = {name: e for name, e in found.items() if e.model == self._model}

    def _needs_load(self, entry: AdapterEntry) -> bool:
        present = self._books.loaded.get(entry.name)
        if present is not None and entry.digest in (UNKNOWN_DIGEST, present.digest):
            return False
        failure = self._books.failures.get(entry.name)
        if failure is None or failure.entry != entry:
            return True
        return self._clock.monotonic() >= failure.retry_at_seconds

    async def _load_one(self, entry: AdapterEntry) -> None:
        delay_seconds = RETRY_SECONDS
        try:
            await self._engine.call(lambda engine: engine.adapters.check_room(entry.digest))
            delay_seconds = self._next_delay(entry)
            adapter = await run_in_thread(partial(self._load, Path(entry.path)))
            if entry.digest not in (UNKNOWN_DIGEST, adapter.digest):
                raise Invalid(
                    f"{entry.path} has other files than when the adapter was added; add it again"
                )
            await self._engine.call(lambda engine: engine.add_adapter(adapter))
        except (BatonError, OSError, MemoryError, RuntimeError) as error:
            self._record_failure(entry, error, delay_seconds)
            return
        self._books.failures.pop(entry.name, None)
        if entry.name in self._books.loaded:
            self._stop_announcing(entry.name)
        self._record_loaded(entry, adapter)
        self._on_change()

    def _record_loaded(self, entry: AdapterEntry, adapter: LoadedAdapter) -> None:
        self.stats.num_loads += 1
        self._books.loaded[entry.name] = replace(entry, digest=adapter.digest)
        self._books.unload_at.pop(adapter.digest, None)
        log.info("adapter_loaded", adapter=entry.name, rank=adapter.rank, bytes=adapter.size_bytes)

    def _next_delay(self, entry: AdapterEntry) -> float:
        """Return after how many seconds to try again if reading the adapter fails now."""
        failure = self._books.failures.get(entry.name)
        if failure is None or failure.entry != entry:
            return RETRY_SECONDS
        return min(2 * failure.delay_seconds, MAX_ADAPTER_RETRY_SECONDS)

    def _record_failure(self, entry: AdapterEntry, error: Exception, delay_seconds: float) -> None:
        """Announce that an adapter can't be loaded. Other weights that were loaded under its name
        stay in use."""
        self.stats.num_load_failures += 1
        message = str(error)[:MAX_ADAPTER_ERROR] or type(error).__name__
        before = self._books.failures.get(entry.name)
        retry_at = self._clock.monotonic() + delay_seconds
        self._books.failures[entry.name] = _Failure(entry, message, delay_seconds, retry_at)
        if before is None or before.error != message:
            log.warning("adapter_not_loaded", adapter=entry.name, error=str(error))
            self._on_change()

    def _stop_announcing(self, name: str) -> None:
        digest = self._books.loaded.pop(name).digest
        if all(entry.digest != digest for entry in self._books.loaded.values()):
            self._books.unload_at[digest] = self._clock.monotonic() + UNLOAD_DELAY_SECONDS
        log.info("adapter_removed", adapter=name)
        self._on_change()

    async def _unload_due(self) -> None:
        now = self._clock.monotonic()
        for digest in [digest for digest, at in self._books.unload_at.items() if at <= now]:
            del self._books.unload_at[digest]
            await self._engine.call(partial(Engine.remove_adapter, digest=digest))
        if self._books.loaded or self.stats.num_loaded:
            await self._engine.call(self._drop_unused)

    def _drop_unused(self, engine: Engine) -> None:
        engine.drop_unused_adapters()
        self.stats.num_loaded = engine.adapters.num_loaded
        self.stats.size_bytes = engine.adapters.size_bytes
