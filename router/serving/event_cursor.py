"""Where in a stream its client is, so that another router can continue the stream there."""

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.ids import TokenId
from baton.errors import Conflict
from router.errors import ApiError

LAST_EVENT_ID = "Last-Event-ID"

_POSITION = re.compile(r"(0|[1-9][0-9]{0,8})\.([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the events of one answer, after ``num_events`` of them. ``checksum`` is that of
    the tokens that these events have brought."""

    num_events: int = 0
    checksum: int = 0

    def __str__(self) -> str:
        return f"{self.num_events}.{self.checksum:08x}"


def parse_event_id(text: str, num_choices: int) -> tuple[Position, ...]:
    """Parse the id of an event of a stream with ``num_choices`` answers. Raises ApiError (400)."""
    found = [_POSITION.fullmatch(part) for part in text.split(",", num_choices)]
    if len(found) != num_choices or not all(found):
        raise ApiError(
            400,
            f"{LAST_EVENT_ID} is {text!r}; it must be the id of the last event that came of this "
            "stream, unchanged",
        )
    return tuple(Position(int(each[1]), int(each[2], 16)) for each in found if each)


class EventCursor:
    """Gives each event of a stream an id, and drops the events that the client has already
    (``seen``, one position per answer; empty in a new stream).

    The events of an answer follow from its tokens if each of them is a step of its own
    (``ChoiceStream.splits_outputs``). So the number of its events is a place in it, which another
    router finds by generating the answer again. The events that end a stream count as the first
    answer's. Whether it is the same answer is seen from the checksum of its tokens."""

    def __init__(self, num_choices: int, seen: Sequence[Position] = ()) -> None:
        self._seen = list(seen) or [Position()] * num_choices
        self._shown = [str(position) for position in self._seen]
        self._num_events = [0] * num_choices
        self._checksums = [0] * num_choices

    def is_skipping(self, index: int) -> bool:
        """Whether the client has the next event of this answer."""
        return self._num_events[index] < self._seen[index].num_events

    def add_tokens(self, index: int, token_ids: Iterable[TokenId]) -> None:
        """Add tokens of an answer. Call this before :meth:`number` for their events."""
        for token_id in token_ids:
            data = token_id.to_bytes(4, "little")
            self._checksums[index] = zlib.crc32(data, self._checksums[index])

    def number(self, index: int, events: bytes) -> bytes:
        """Return those of an answer's events that the client does not have, with ids. Raises
        Conflict if the tokens of those that it has were others."""
        return b"".join(
            [
                b"id: %b\n%b\n\n" % (event_id, event)
                for event in events.split(b"\n\n")[:-1]
                if (event_id := self._next_id(index))
            ]
        )

    def end(self) -> None:
        """Raise Conflict if the stream had fewer events than the client has."""
        if any(self.is_skipping(index) for index in range(len(self._seen))):
            raise _differs()

    def _next_id(self, index: int) -> bytes:
        """Return the id of an answer's next event; empty if the client has that event."""
        was_skipping = self.is_skipping(index)
        self._num_events[index] += 1
        position = Position(self._num_events[index], self._checksums[index])
        if was_skipping:
            if not self.is_skipping(index) and position != self._seen[index]:
                raise _differs()
            return b""
        self._shown[index] = str(position)
        return ",".join(self._shown).encode()


def _differs() -> Conflict:
    return Conflict(
        "the answer was generated again and is another one than its client has begun to read, so "
        "it can't be continued; send the request again with a new Idempotency-Key"
    )
