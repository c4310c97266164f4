"""The common base of the encoders of OpenAI's chats and completions.

The JSON before and after a chunk's ``choices`` element is the same in all chunks of a response, so
it is encoded once, and each chunk encodes only its choice. Running usage and padding, if enabled,
are added to each chunk.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.openai.choice_result import ChoiceResult
from router.openai.choice_stream import ChoiceDelta
from router.openai.encoders.answer_encoder import AnswerEncoder
from router.openai.encoders.usage import Usage
from router.openai.token_entry import TokenEntry

OBFUSCATION_BLOCK_BYTES = 256
"""With obfuscation, chunks are padded to multiples of this size. Most chunks of one token fit into
one block, unless they have logprobs."""

DONE_EVENT = b"data: [DONE]\n\n"

TEXT_PLACEHOLDER = "\x00text\x00"


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """The fields that all chunks of a response share. If ``is_obfuscated`` is True, chunks are
    padded, so that their sizes don't reveal their contents. If ``has_running_usage`` is True, each
    chunk has its answer's usage so far."""

    id: str
    created: int
    model: str
    return_token_ids: bool
    has_usage_chunk: bool
    has_running_usage: bool = False
    is_obfuscated: bool = False
    service_tier: str | None = None
    echoes_logprobs: bool = False
    prompt_logprobs: bool = False
    system_fingerprint: str = ""
    tokens_as_ids: bool = False
    """Whether tokens in logprobs are written as ``token_id:5``."""


class OpenAIEncoder(AnswerEncoder):
    """Encodes responses and stream chunks. ``with_logprobs`` says whether the client requested
    logprobs."""

    response_object: str
    chunk_object: str

    def __init__(
        self, metadata: ResponseMetadata, tokenizer: Tokenizer, *, with_logprobs: bool
    ) -> None:
        self._metadata = metadata
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        head = orjson.dumps(self._common_fields(self.chunk_object))
        self._chunk_prefix = b"data: " + head[:-1] + b',"choices":['
        self._chunk_suffix = b'],"usage":null}\n\n' if metadata.has_usage_chunk else b"]}\n\n"
        self._token_counts: dict[int, tuple[int, int]] = {}
        """Tokens of the prompt and of the answer so far, by the answer's index."""
        self._text_frames: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def _choice(self, answer: ChoiceResult) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]: ...

    def encode_text(self, index: int, text: str) -> bytes:
        if self._metadata.is_obfuscated:  # the padding's length depends on the text
            return self.encode_chunk(ChoiceDelta(index, text, (), (), None))
        begin, end = self._text_frames.get(index) or self._prepare_text_frame(index)
        return begin + orjson.dumps(text) + end

    def _prepare_text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Cache and return the bytes that :meth:`encode_chunk` writes before and after the text.
        These bytes are the same in all chunks of a choice that only add text."""
        chunk = self.encode_chunk(ChoiceDelta(index, TEXT_PLACEHOLDER, (), (), None))
        begin, _, end = chunk.partition(orjson.dumps(TEXT_PLACEHOLDER))
        self._text_frames[index] = (begin, end)
        return begin, end

    def set_token_counts(self, index: int, prompt_tokens: int, completion_tokens: int) -> None:
        if self._metadata.has_running_usage:
            self._token_counts[index] = (prompt_tokens, completion_tokens)

    def encode_end(self, usage: Usage) -> bytes:
        if not self._metadata.has_usage_chunk:
            return DONE_EVENT
        head = self._common_fields(self.chunk_object)
        chunk = orjson.dumps({**head, "choices": [], "usage": usage.json})
        return b"data: " + chunk + b"\n\n" + DONE_EVENT

    def encode_failure(self, error: ApiError) -> bytes:
        return b"data: " + error.json + b"\n\n"

    def encode_response(self, answers: Sequence[ChoiceResult], usage: Usage) -> bytes:
        head = self._common_fields(self.response_object)
        choices = [self._choice(answer) for answer in answers]
        return orjson.dumps({**head, "choices": choices, "usage": usage.json})

    def _common_fields(self, kind: str) -> dict[str, Any]:
        envelope = self._metadata
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

    def _encode_frame(self, choice: dict[str, Any]) -> bytes:
        data, end = orjson.dumps(choice), self._chunk_suffix
        if self._metadata.has_running_usage:
            end = self._suffix_with_usage(choice["index"])
        if self._metadata.is_obfuscated:
            padding = b"0" * (-len(data) % OBFUSCATION_BLOCK_BYTES)
            return self._chunk_prefix + data + b'],"obfuscation":"' + padding + b'"' + end[1:]
        return self._chunk_prefix + data + end

    def _suffix_with_usage(self, index: int) -> bytes:
        """Return the end of a chunk with usage, in vLLM's format: counts without details."""
        prompt, completion = self._token_counts[index]
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        return b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _delta_logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        return self._logprobs(delta.token_entries) if self._with_logprobs else None

    def _with_ids(self, choice: dict[str, Any], answer: ChoiceResult) -> dict[str, Any]:
        if self._metadata.return_token_ids:
            choice["prompt_token_ids"] = answer.prompt_token_ids
            choice["token_ids"] = answer.token_ids.tolist()
        return choice
