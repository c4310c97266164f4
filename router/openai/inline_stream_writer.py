"""A fast path for streamed tokens: from the worker's message into the client's socket without
waking a task.

Each stream has a task that waits for its worker. Waking that task takes several times as long as
writing the token. So an output that only adds text is encoded and written as soon as it arrives, as
long as the client keeps up.
"""

from baton.core.request import RequestOutput
from router.http.response_writer import InlineBodyWriter
from router.openai.best_of import prompt_usage
from router.openai.choice_stream import ChoiceStream
from router.openai.encoders import AnswerEncoder, ChoiceResult


class InlineStreamWriter:
    """Writes the outputs of a request's answers directly, as text chunks. ``unopened`` are the
    answers whose first chunk has not been sent yet, by index. The same dict is used and changed by
    the code that writes all other chunks."""

    def __init__(
        self, body: InlineBodyWriter, encoder: AnswerEncoder, unopened: dict[int, ChoiceResult]
    ) -> None:
        self._body = body
        self._encoder = encoder
        self._unopened = unopened

    def write_output(self, choice: ChoiceStream, output: RequestOutput) -> bool:
        """Write the text of an output and return True. If the client does not keep up, do nothing
        and return False."""
        if not self._body.is_open:
            return False
        text = choice.take_text(output)
        if text:
            opening = self._encode_opening(choice) if choice.index in self._unopened else b""
            self._body.write(opening + self._encoder.encode_text(choice.index, text))
        return True

    def _encode_opening(self, choice: ChoiceStream) -> bytes:
        usage = prompt_usage(choice)
        return self._encoder.encode_opening(self._unopened.pop(choice.index), usage)
