"""The base class of the encoders of all APIs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from router.errors import ApiError
from router.openai.choice_result import ChoiceResult
from router.openai.choice_stream import ChoiceDelta
from router.openai.encoders.usage import Usage


class AnswerEncoder(ABC):
    """Encodes one response in the form of one API: as a whole (:meth:`encode_response`), or as the
    server-sent events of a stream. Each response has an encoder of its own, since some APIs number
    their events.

    In a stream, each choice is opened once, before its first delta; :meth:`encode_end` comes after
    the last delta of all choices, or :meth:`encode_failure` if the stream fails."""

    keeps_logprobs = False
    """True if the logprobs of a stream are kept until its end, which repeats them."""

    @abstractmethod
    def encode_opening(self, answer: ChoiceResult, usage: Usage) -> bytes:
        """Encode the events that open a choice. Returns empty bytes if the API has no such events.
        ``usage`` counts the prompt of this choice, and no tokens of the answer."""

    @abstractmethod
    def encode_chunk(self, delta: ChoiceDelta) -> bytes:
        """Encode the events of a delta."""

    @abstractmethod
    def encode_text(self, index: int, text: str) -> bytes:
        """Encode a delta that only adds text to the choice with this index. This is called once per
        token."""

    @abstractmethod
    def encode_end(self, usage: Usage) -> bytes:
        """Encode the events that end the stream."""

    @abstractmethod
    def encode_failure(self, error: ApiError) -> bytes:
        """Encode the events that end a stream that has failed."""

    @abstractmethod
    def encode_response(self, answers: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """Encode the whole response."""

    @abstractmethod
    def set_token_counts(self, index: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Set a choice's token counts so far, for APIs whose events report the usage while the
        answer is generated."""
