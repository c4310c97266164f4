"""Turns states into frames for the console's pages.

All pages share the frames. A state is built and encoded at most once per second, by whichever page
asks first, and only while a page asks: without pages, the console costs nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.clock import Clock
from baton.errors import Overloaded
from router.console.state import ConsoleState
from router.console.worker_rows import Rows
from router.limits import MAX_PAGES

FRAME_INTERVAL_SECONDS = 1.0
CLOSING_POLL_SECONDS = 0.2


@dataclass(slots=True)
class Frame:
    """A state, encoded for pages. ``changes`` is what a page needs that has the previous frame:
    new rows, the fields of other rows that have changed, and the ids of rows that are gone."""

    number: int
    state: ConsoleState
    changes: bytes
    _full: bytes = field(default=b"")

    @property
    def full(self) -> bytes:
        """The whole state, for a page that does not have the previous frame. It is encoded when the
        first such page asks for it."""
        if not self._full:
            rows = {name: {"rows": table} for name, table in self.state.tables.items()}
            self._full = _encode(self.number, self.state, rows, is_full=True)
        return self._full


def _encode(number: int, state: ConsoleState, tables: dict[str, Any], *, is_full: bool) -> bytes:
    return orjson.dumps(
        {"number": number, "is_full": is_full, "cluster": state.cluster, "tables": tables}
    )


def encode_frame(number: int, state: ConsoleState, previous: ConsoleState | None) -> Frame:
    """Encode a state as the frame ``number``."""
    if previous is None:
        return Frame(number, state, b"")
    changes = {
        name: change
        for name, table in state.tables.items()
        if (change := _find_changes(table, previous.tables.get(name, {})))
    }
    return Frame(number, state, _encode(number, state, changes, is_full=False))


def _find_changes(table: Rows, before: Rows) -> dict[str, Any]:
    """Return what turns the rows ``before`` into ``table``: ``rows`` are new or replaced rows,
    ``fields`` are the new values of other rows' changed fields, and ``removed`` are ids. Each is
    left out if it is empty."""
    rows, fields = {}, {}
    for key, row in table.items():
        known = before.get(key)
        if known is None or known.keys() != row.keys():
            rows[key] = row
        elif known != row:
            fields[key] = {name: value for name, value in row.items() if known[name] != value}
    removed = [key for key in before if key not in table]
    changes = {"rows": rows, "fields": fields, "removed": removed}
    return {name: change for name, change in changes.items() if change}


class ConsolePage:
    """One connected page. It gets the changes since its last frame if it has kept up, otherwise the
    whole state: a slow page skips frames, so that nothing queues up for it."""

    def __init__(self, feed: "ConsoleFeed") -> None:
        self._feed = feed
        self._number = 0

    async def next_frame(self) -> bytes:
        """Wait for a frame that this page does not have, and return it as JSON."""
        frame = await self._feed.frame_after(self._number)
        has_previous = 0 < self._number == frame.number - 1
        self._number = frame.number
        return frame.changes if has_previous and frame.changes else frame.full


class ConsoleFeed:
    """Makes the frames. ``build_state`` is called at most once per
    :data:`FRAME_INTERVAL_SECONDS`. ``is_closing`` returns whether the router drains; the last frame
    then comes at once."""

    def __init__(
        self,
        build_state: Callable[[], Awaitable[ConsoleState]],
        clock: Clock,
        is_closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._build_state = build_state
        self._is_closing = is_closing
        self._clock = clock
        self._frame: Frame | None = None
        self._last_number = 0
        self._built_at = float("-inf")
        self._lock = asyncio.Lock()
        self.num_pages = 0

    @contextmanager
    def open_page(self) -> Iterator[ConsolePage]:
        """Connect a page. Raises Overloaded if :data:`MAX_PAGES` pages are connected."""
        if self.num_pages >= MAX_PAGES:
            raise Overloaded(
                f"{MAX_PAGES} pages of the console are open on this router; close one of them",
                retry_after_seconds=5.0,
            )
        self.num_pages += 1
        try:
            yield ConsolePage(self)
        finally:
            self.num_pages -= 1
            if not self.num_pages:
                self._frame = None  # nobody needs it, and it may be large

    async def snapshot(self) -> bytes:
        """Return the current state as JSON; it is at most :data:`FRAME_INTERVAL_SECONDS` old."""
        return (await self.frame_after(0)).full

    async def frame_after(self, number: int) -> Frame:
        """Return the latest frame if its number is higher than ``number`` and it is current;
        otherwise wait until it is time for the next one, and build it. One caller builds it for all
        that wait. If that caller is cancelled, the next one continues."""
        async with self._lock:
            frame = self._frame
            age = self._clock.monotonic() - self._built_at
            if frame is None or frame.number <= number or age >= FRAME_INTERVAL_SECONDS:
                await self._wait_until(self._built_at + FRAME_INTERVAL_SECONDS)
                self._built_at = self._clock.monotonic()
                frame = await self._build(frame)
            return frame

    async def _wait_until(self, due: float) -> None:
        """Wait until the monotonic time ``due``, but not while the router closes, since its streams
        must end before it stops."""
        while not self._is_closing() and (left := due - self._clock.monotonic()) > 0:
            await self._clock.sleep(min(left, CLOSING_POLL_SECONDS))

    async def _build(self, previous: Frame | None) -> Frame:
        state = await self._build_state()
        self._last_number += 1
        before = previous.state if previous is not None else None
        self._frame = encode_frame(self._last_number, state, before)
        return self._frame
