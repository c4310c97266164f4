"""The LoRA adapters that requests may name as their model."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from baton.clock import Clock
from baton.core.adapter import AdapterEntry, AdapterRef
from baton.core.member import Member
from baton.errors import BatonError
from baton.registry.adapters import AdapterRegistry
from baton.registry.membership import REJOIN_SECONDS
from router.generation.cluster import Cluster

REFRESH_SECONDS = 0.5

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter as clients and admins see it. ``loaded_on`` are the ids of the ready workers that
    have loaded the weights of ``ref``, and ``errors`` the reasons of those that can't, by worker.
    ``entry`` is the adapter's entry in the registry; None if it comes from the workers'
    settings. ``model`` is the name of the base model."""

    ref: AdapterRef
    model: str
    loaded_on: tuple[str, ...]
    errors: Mapping[str, str]
    entry: AdapterEntry | None = None


class AdapterDirectory:
    """Resolves adapters' names. An adapter exists if it is in the registry, or if a worker has it
    in its settings. If the registry has lost its data, its adapters stay for ``REJOIN_SECONDS``, so
    that workers can write them again."""

    def __init__(
        self,
        cluster: Cluster,
        registry: AdapterRegistry,
        clock: Clock,
        read_digest: Callable[[str, Path], bytes],
    ) -> None:
        """``read_digest`` reads and validates the adapter in a folder for the model with a name,
        and returns its digest."""
        self.registry = registry
        self.read_digest = read_digest
        self._cluster = cluster
        self._clock = clock
        self._entries: Mapping[str, AdapterEntry] = {}
        self._served: dict[str, ServedAdapter] = {}
        self._served_of: tuple[object, object] | None = None
        self._last_error = ""
        self._database_id = ""
        self._keep_until = -math.inf

    async def run(self) -> None:
        """Keep reading the registry until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Read the registry. If it can't be reached, the last known entries stay."""
        try:
            found = {entry.name: entry for entry in await self.registry.adapters()}
            await self._restore()
        except BatonError as error:
            if str(error) != self._last_error:
                log.warning("adapters_stale", error=str(error))
            self._last_error = str(error)
            return
        self._last_error = ""
        now = self._clock.monotonic()
        found = {**self._entries, **found} if now < self._keep_until else found
        if found != self._entries:
            self._entries = found

    async def _restore(self) -> None:
        """If the registry has lost its data, write the known entries again. Workers do so, too, but
        a new entry may not have reached them."""
        database_id = self.registry.database_id
        if self._database_id not in ("", database_id):
            for entry in self._entries.values():
                await self.registry.put_adapter(entry, keep_existing=True)
            self._keep_until = self._clock.monotonic() + REJOIN_SECONDS
        self._database_id = database_id

    def is_outdated(self, name: str) -> bool:
        """Whether workers still announce an adapter that was removed."""
        announced = [each for member in self._cluster.members for each in member.adapters]
        return name not in self._entries and any(
            each.name == name and not each.in_settings for each in announced
        )

    def find(self, name: str) -> ServedAdapter | None:
        return self._all().get(name)

    def list(self) -> Sequence[ServedAdapter]:
        """Return all adapters, ordered by name."""
        served = self._all()
        return [served[name] for name in sorted(served)]

    def _all(self) -> Mapping[str, ServedAdapter]:
        """Return the adapters by name. They are cached until the members or entries change, because
        each request asks for them."""
        now_of = (self._cluster.members, self._entries)
        if self._served_of is None or any(
            one is not other for one, other in zip(self._served_of, now_of, strict=True)
        ):
            self._served_of = now_of
            workers = self._cluster.ready_workers()
            announced = [each for worker in workers for each in worker.adapters]
            names = {each.name for each in announced if each.in_settings}
            self._served = {
                name: _served(name, self._entries.get(name), workers)
                for name in sorted(names | self._entries.keys())
            }
        return self._served


def _served(name: str, entry: AdapterEntry | None, workers: Sequence[Member]) -> ServedAdapter:
    """Return the adapter with this name. While workers replace its weights, requests use the new
    weights as soon as a worker has loaded them."""
    model = entry.model if entry is not None else _model_in_settings(name, workers)
    announced = [
        (worker.id, each)
        for worker in workers
        for each in worker.adapters
        if worker.model == model and each.name == name
    ]
    counts = Counter(each.digest for _, each in announced if not each.error)
    if entry is not None and (entry.digest in counts or not counts):
        digest = entry.digest
    else:
        most = max(counts.values(), default=0)
        digest = min((d for d, count in counts.items() if count == most), default=bytes(16))
    return ServedAdapter(
        AdapterRef(name, digest),
        model,
        tuple(
            sorted(worker for worker, each in announced if each.digest == digest and not each.error)
        ),
        {worker: each.error for worker, each in announced if each.error},
        entry,
    )


def _model_in_settings(name: str, workers: Sequence[Member]) -> str:
    """Return the model of the first worker that has this adapter in its settings."""
    return next(
        worker.model
        for worker in workers
        if any(each.name == name and each.in_settings for each in worker.adapters)
    )
