"""The base class of the encoders of all APIs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import ApiError
from router.serving.choice_result import ChoiceResult
from router.serving.choice_stream import ChoiceDelta


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    @property
    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


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

    def encode_comment(self, text: str) -> bytes:
        """Encode a comment in a stream, which clients skip."""
        return f": {text}\n\n".encode()

    @abstractmethod
    def encode_failure(self, error: ApiError) -> bytes:
        """Encode the events that end a stream that has failed."""

    @abstractmethod
    def encode_response(self, answers: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """Encode the whole response."""

    def set_token_counts(  # noqa: B027
        self, index: int, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Set a choice's token counts so far, for APIs whose events report the usage while the
        answer is generated. Most report it only at the end, so this does nothing."""
