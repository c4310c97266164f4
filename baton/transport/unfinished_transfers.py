"""Reads that could not be ended, and what becomes free once they have."""

from collections.abc import Callable, Sequence

from baton.transport.base import Transfer, Transport


class UnfinishedTransfers:
    """Whoever can't end a read leaves it here, with what to do when it has ended."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Transport, list[Transfer], Callable[[], object]]] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def keep(
        self, transport: Transport, transfers: Sequence[Transfer], on_end: Callable[[], object]
    ) -> None:
        """``on_end`` is called by a later :meth:`sweep`, once, after the last of them ended."""
        self._under_way.append((transport, list(transfers), on_end))

    def sweep(self) -> None:
        """Looks again; cheap when there are none."""
        for stray in list(self._under_way):
            transport, transfers, on_end = stray
            transfers[:] = [each for each in transfers if not transport.release(each)]
            if not transfers:
                self._under_way.remove(stray)
                on_end()
