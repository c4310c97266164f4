"""The adapters that are loaded into an engine."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from baton.errors import Overloaded, Unavailable

DEFAULT_MAX_ADAPTERS = 16


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in memory. ``prepared`` is its form for the model
    (``DecoderModel.prepare_adapter``); ``rank`` is its largest rank."""

    digest: bytes
    prepared: Any
    rank: int = 0
    size_bytes: int = 0


class AdapterTable:
    """The loaded adapters by digest, at most ``max_adapters``. Only the engine's thread may use
    it.

    An adapter that is to be unloaded is *retiring* until the last request that uses it has ended:
    its requests go on, and new ones are refused.
    """

    def __init__(self, max_adapters: int = DEFAULT_MAX_ADAPTERS) -> None:
        self.max_adapters = max_adapters
        self._loaded: dict[bytes, LoadedAdapter] = {}
        self._retiring: set[bytes] = set()

    def check_room(self, digest: bytes) -> None:
        """Raise Overloaded if an adapter can't be added because there are ``max_adapters``
        others."""
        if digest not in self._loaded and len(self._loaded) >= self.max_adapters:
            raise Overloaded(f"{len(self._loaded)} adapters are loaded, the maximum (max_adapters)")

    def add(self, adapter: LoadedAdapter) -> None:
        """Add an adapter, or keep it if it was retiring. Raises Overloaded as :meth:`check_room`
        does."""
        self.check_room(adapter.digest)
        self._loaded.setdefault(adapter.digest, adapter)
        self._retiring.discard(adapter.digest)

    def retire(self, digest: bytes) -> None:
        """Refuse new requests for an adapter from now on."""
        if digest in self._loaded:
            self._retiring.add(digest)

    def drop_unused(self, used: Collection[bytes]) -> None:
        """Unload the retiring adapters, except those that requests still use."""
        for digest in self._retiring.difference(used):
            del self._loaded[digest]
            self._retiring.remove(digest)

    def require(self, digest: bytes) -> None:
        """Raise Unavailable unless new requests may use the adapter: another worker may have
        it."""
        if digest not in self._loaded or digest in self._retiring:
            raise Unavailable(f"the adapter {digest.hex()} is not loaded on this worker")

    def prepared(self, digest: bytes) -> Any:
        """Return the prepared adapter, which must be loaded; it may be retiring."""
        return self._loaded[digest].prepared

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The adapters that new requests may use, in the order in which they were loaded."""
        return tuple(each for each in self._loaded if each not in self._retiring)

    @property
    def num_loaded(self) -> int:
        """Number of adapters in memory, retiring ones included."""
        return len(self._loaded)

    @property
    def size_bytes(self) -> int:
        """Memory that the adapters take, retiring ones included."""
        return sum(adapter.size_bytes for adapter in self._loaded.values())
