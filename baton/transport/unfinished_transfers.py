"""Keeps transfers that could not be released, to free their blocks once they have ended."""

from collections.abc import Callable, Sequence

from baton.transport.base import Transfer, Transport


class UnfinishedTransfers:
    """Keeps transfers that could not be released, with a callback for when they have ended."""

    def __init__(self) -> None:
        self._entries: list[tuple[Transport, list[Transfer], Callable[[], object]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, transport: Transport, transfers: Sequence[Transfer], on_end: Callable[[], object]
    ) -> None:
        """Keep ``transfers``. A later :meth:`sweep` calls ``on_end`` once, after the last of them
        has ended."""
        self._entries.append((transport, list(transfers), on_end))

    def sweep(self) -> None:
        """Try to release the transfers again. Cheap when there are none."""
        for entry in list(self._entries):
            transport, transfers, on_end = entry
            transfers[:] = [each for each in transfers if not transport.release(each)]
            if not transfers:
                self._entries.remove(entry)
                on_end()
