"""A fast path for streamed tokens: from the worker's message into the client's socket without
waking a task.

Each stream has a task that waits for its worker. Waking that task takes several times as long as
writing the token. So an output that only adds text is encoded and written as soon as it arrives, as
long as the client keeps up.
"""

import orjson

from baton.core.request import RequestOutput
from router.http.response_writer import InlineBodyWriter
from router.openai.choice_stream import ChoiceDelta, ChoiceStream
from router.openai.encoders import ChoiceResult, OpenAIEncoder

TEXT_PLACEHOLDER = "\x00text\x00"


class InlineStreamWriter:
    """Writes the outputs of a request's answers directly, as text chunks. ``unopened`` are the
    answers whose first chunk was not sent yet, by index. The same dict is used and changed by the
    code that writes all other chunks."""

    def __init__(
        self, body: InlineBodyWriter, encoder: OpenAIEncoder, unopened: dict[int, ChoiceResult]
    ) -> None:
        self._body = body
        self._encoder = encoder
        self._unopened = unopened
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def write_output(self, choice: ChoiceStream, output: RequestOutput) -> bool:
        """Write the text of an output and return True. If the client does not keep up, do nothing
        and return False."""
        if not self._body.is_open:
            return False
        text = choice.take_text(output)
        if text:
            self._body.write(self._encode(choice.index, text))
        return True

    def _encode(self, index: int, text: str) -> bytes:
        opening = b""
        if index in self._unopened:
            opening = self._encoder.encode_opening_chunk(self._unopened.pop(index))
        frame = self._frames.get(index) or self._prepare_frame(index)
        if frame is None:
            return opening + self._encoder.encode_chunk(ChoiceDelta(index, text, (), (), None))
        return opening + frame[0] + orjson.dumps(text) + frame[1]

    def _prepare_frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the bytes that :meth:`OpenAIEncoder.encode_chunk` writes before and after the
        text, since an answer's chunks differ only in their text. Returns None if the bytes after
        the text depend on it."""
        if self._encoder.is_padded:
            return None
        chunk = self._encoder.encode_chunk(ChoiceDelta(index, TEXT_PLACEHOLDER, (), (), None))
        begin, _, end = chunk.partition(orjson.dumps(TEXT_PLACEHOLDER))
        self._frames[index] = (begin, end)
        return begin, end
