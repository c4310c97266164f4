"""The short way of a stream's tokens: from the worker's message into the client's socket, without
waking any task.

Whoever streams waits for its worker in a task of its own. Waking it for each token costs several
times what the token itself does; so what is nothing but the next piece of text is framed and
written right where it arrives, as long as the client keeps up.
"""

import orjson

from router.choice import Delta
from router.wire import Wire
from router.wording import Answer, Wording

MARK = "\x00text\x00"


class StreamOutlet:
    """``unopened``: answers whose first chunk was not sent yet; the long way has them, too."""

    def __init__(self, wire: Wire, wording: Wording, unopened: dict[int, Answer]) -> None:
        self._wire = wire
        self._wording = wording
        self._unopened = unopened
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @property
    def is_open(self) -> bool:
        return self._wire.can_push

    def put(self, index: int, text: str) -> None:
        if index in self._unopened:
            self._wire.push(self._wording.opening(self._unopened.pop(index)))
        self._wire.push(self._frame(index, text))

    def _frame(self, index: int, text: str) -> bytes:
        """As :meth:`Wording.chunk` would make it: of one answer only the text changes."""
        if self._wording.is_padded:
            return self._wording.chunk(Delta(index, text, (), (), None))
        if index not in self._frames:
            begin, _, end = self._wording.chunk(Delta(index, MARK, (), (), None)).partition(
                orjson.dumps(MARK)
            )
            self._frames[index] = (begin, end)
        begin, end = self._frames[index]
        return begin + orjson.dumps(text) + end
