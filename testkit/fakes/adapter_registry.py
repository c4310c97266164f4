"""An in-memory list of adapters."""

from baton.core.adapter import MAX_ADAPTERS, AdapterEntry
from baton.errors import Overloaded


class MemoryAdapterRegistry:
    """Implements :class:`baton.registry.adapters.AdapterRegistry`."""

    def __init__(self) -> None:
        self.database_id = "memory"
        self._entries: dict[str, AdapterEntry] = {}

    async def adapters(self) -> list[AdapterEntry]:
        return [self._entries[name] for name in sorted(self._entries)]

    async def put_adapter(self, entry: AdapterEntry, *, keep_existing: bool = False) -> None:
        if keep_existing and entry.name in self._entries:
            return
        if entry.name not in self._entries and len(self._entries) >= MAX_ADAPTERS:
            raise Overloaded(f"the cluster has {MAX_ADAPTERS} adapters already, the maximum")
        self._entries[entry.name] = entry

    async def remove_adapter(self, name: str) -> bool:
        return self._entries.pop(name, None) is not None

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
