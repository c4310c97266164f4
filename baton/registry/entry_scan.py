"""Reads signed entries from Redis, beside which anybody may have written millions of others."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from baton.registry.limits import MAX_READ_BYTES, MAX_READ_ENTRIES

Entry = TypeVar("Entry")

NamedEntry = tuple[str, bytes]

PAGE_ENTRIES = 128
"""How many entries one call of Redis reads: at most 8 MiB of the largest, which take 10 ms to
verify."""

FIRST_CURSOR = b"0"


class EntryScan(Generic[Entry]):
    """Reads the entries that ``parse`` accepts, ``limit`` of them at most. Entries are verified
    before they are counted, so that no number of forged ones displaces a signed one.

    ``scan`` reads the entries at a cursor, and returns the next cursor, which is ``FIRST_CURSOR``
    after the last ones. ``look_up`` reads the entries with certain names. If there are more entries
    than are read at a time, one call reads those that were accepted before, and the next part of
    the others: forged entries delay only the discovery of new ones."""

    def __init__(
        self,
        scan: Callable[[bytes], Awaitable[tuple[bytes, Sequence[NamedEntry]]]],
        look_up: Callable[[Sequence[str]], Awaitable[Sequence[NamedEntry]]],
        parse: Callable[[str, bytes], Entry | None],
        limit: int,
    ) -> None:
        self._scan = scan
        self._look_up = look_up
        self._parse = parse
        self._limit = limit
        self._known: Sequence[str] = ()
        self._cursor = FIRST_CURSOR

    def expect(self, name: str) -> None:
        """Look up this entry, too, in the next call: it has just been written."""
        self._known = [*self._known, name]

    async def read(self) -> list[Entry]:
        """Return the accepted entries, ordered by name. Raises Unavailable."""
        found: dict[str, Entry] = {}
        if not await self._read_next(found):
            missing = [name for name in self._known if name not in found]
            for start in range(0, len(missing), PAGE_ENTRIES):
                self._add(found, await self._look_up(missing[start : start + PAGE_ENTRIES]))
        self._known = sorted(found)[: self._limit]
        return [found[name] for name in self._known]

    async def _read_next(self, found: dict[str, Entry]) -> bool:
        """Read the next part of the entries. Return whether these are all entries."""
        cursor = self._cursor
        has_begun = cursor == FIRST_CURSOR
        num_entries = num_bytes = 0
        while num_entries < MAX_READ_ENTRIES and num_bytes < MAX_READ_BYTES:
            cursor, page = await self._scan(cursor)
            self._add(found, page)
            num_entries += max(len(page), PAGE_ENTRIES)
            num_bytes += sum(len(value) for _, value in page)
            if cursor == FIRST_CURSOR:
                break
        self._cursor = cursor
        return has_begun and cursor == FIRST_CURSOR

    def _add(self, found: dict[str, Entry], page: Sequence[NamedEntry]) -> None:
        for name, value in page:
            entry = self._parse(name, value)
            if entry is not None:
                found[name] = entry


def named_entries(flat: Sequence[Any]) -> list[NamedEntry]:
    """Return the entries that a script has returned as name, value, name, value … Names that are
    not UTF-8 are left out: nothing of Baton's has such a name."""
    found = []
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        try:
            found.append((name.decode(), value))
        except UnicodeDecodeError:
            continue
    return found
