"""What chats and completions have in common.

A chunk is a prepared beginning and end around the little that changes; only that is encoded.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.text.tokenizer import Tokenizer
from router.openai.choice_result import ChoiceResult
from router.openai.choice_stream import ChoiceDelta
from router.openai.encoders.usage import Usage
from router.openai.token_entry import TokenEntry

OBFUSCATION_BLOCK_BYTES = 256
"""Chunks are padded to multiples of it: most tokens fit into one, their logprobs apart."""

DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """What all chunks of a response share. With ``obfuscated``, chunks are padded, so that their
    sizes don't tell what is in them; with ``running_usage`` each tells what its answer took so
    far."""

    id: str
    created: int
    model: str
    return_token_ids: bool
    usage_chunk: bool
    running_usage: bool = False
    obfuscated: bool = False
    service_tier: str | None = None
    echoes_logprobs: bool = False
    prompt_logprobs: bool = False
    system_fingerprint: str = ""


class OpenAIEncoder(ABC):
    """``with_logprobs`` says whether the client asked for them."""

    whole_object: str
    chunk_object: str

    def __init__(
        self, envelope: ResponseMetadata, tokenizer: Tokenizer, *, with_logprobs: bool
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        head = orjson.dumps(self._head(self.chunk_object))
        self._begin = b"data: " + head[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if envelope.usage_chunk else b"]}\n\n"
        self._taken: dict[int, tuple[int, int]] = {}
        """By answers' indexes: tokens of the prompt, and of the answer so far."""

    @abstractmethod
    def opening(self, answer: ChoiceResult) -> bytes:
        """The chunk that begins a choice; may be empty."""

    @abstractmethod
    def chunk(self, delta: ChoiceDelta) -> bytes: ...

    @abstractmethod
    def _choice(self, answer: ChoiceResult) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]: ...

    @property
    def is_padded(self) -> bool:
        """Whether a chunk's ending depends on its text."""
        return self._envelope.obfuscated

    def note_taken(self, index: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Told by the chunks that follow, if they tell it at all."""
        if self._envelope.running_usage:
            self._taken[index] = (prompt_tokens, completion_tokens)

    def usage_chunk(self, usage: Usage) -> bytes:
        head = self._head(self.chunk_object)
        return b"data: " + orjson.dumps({**head, "choices": [], "usage": usage.json}) + b"\n\n"

    def whole(self, answers: Sequence[ChoiceResult], usage: Usage) -> bytes:
        head = self._head(self.whole_object)
        choices = [self._choice(answer) for answer in answers]
        return orjson.dumps({**head, "choices": choices, "usage": usage.json})

    def _head(self, kind: str) -> dict[str, Any]:
        envelope = self._envelope
        head: dict[str, Any] = {
            "id": envelope.id,
            "object": kind,
            "created": envelope.created,
            "model": envelope.model,
        }
        if envelope.system_fingerprint:
            head["system_fingerprint"] = envelope.system_fingerprint
        if envelope.service_tier is not None:
            head["service_tier"] = envelope.service_tier
        return head

    def _frame(self, choice: dict[str, Any]) -> bytes:
        data, end = orjson.dumps(choice), self._end
        if self._envelope.running_usage:
            end = self._running_end(choice["index"])
        if self._envelope.obfuscated:
            padding = b"0" * (-len(data) % OBFUSCATION_BLOCK_BYTES)
            return self._begin + data + b'],"obfuscation":"' + padding + b'"' + end[1:]
        return self._begin + data + end

    def _running_end(self, index: int) -> bytes:
        """As vLLM writes it: counts, without details."""
        prompt, completion = self._taken[index]
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        return b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _delta_logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        return self._logprobs(delta.entries) if self._with_logprobs else None

    def _with_ids(self, choice: dict[str, Any], answer: ChoiceResult) -> dict[str, Any]:
        if self._envelope.return_token_ids:
            choice["prompt_token_ids"] = answer.prompt_token_ids
            choice["token_ids"] = answer.token_ids
        return choice
