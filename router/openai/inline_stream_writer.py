"""The short way of a stream's tokens: from the worker's message into the client's socket, without
waking any task.

Whoever streams waits for its worker in a task of its own. Waking it for each token costs several
times what the token itself does; so what is nothing but the next piece of text is framed and
written right where it arrives, as long as the client keeps up.
"""

import orjson

from router.http.response_writer import ResponseWriter
from router.openai.choice_stream import ChoiceDelta
from router.openai.encoders import ChoiceResult, OpenAIEncoder

TEXT_PLACEHOLDER = "\x00text\x00"


class InlineStreamWriter:
    """``unopened``: answers whose first chunk was not sent yet; the long way has them, too."""

    def __init__(
        self, wire: ResponseWriter, wording: OpenAIEncoder, unopened: dict[int, ChoiceResult]
    ) -> None:
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
        frame = self._frames.get(index) or self._begin(index)
        if frame is None:
            self._wire.push(self._wording.chunk(ChoiceDelta(index, text, (), (), None)))
        else:
            self._wire.push(frame[0] + orjson.dumps(text) + frame[1])

    def _begin(self, index: int) -> tuple[bytes, bytes] | None:
        """What :meth:`OpenAIEncoder.chunk` says around the text: of one answer only that changes.
        None where all of it does."""
        if self._wording.is_padded:
            return None
        chunk = self._wording.chunk(ChoiceDelta(index, TEXT_PLACEHOLDER, (), (), None))
        begin, _, end = chunk.partition(orjson.dumps(TEXT_PLACEHOLDER))
        self._frames[index] = (begin, end)
        return begin, end
