"""OpenAI's JSON for chats and completions, whole and in chunks.

A chunk is a prepared beginning and end around the little that changes; only that is encoded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.core.ids import TokenId
from baton.text.tokenizer import Tokenizer
from router.choice import Delta
from router.entry import LOWEST_LOGPROB, TokenEntry
from router.markup.pieces import CallBegun, CallGrown, Piece, Text, Thought
from router.prompt_entries import as_vllm

OBFUSCATION_BYTES = 256
"""Chunks are padded to multiples of it: most tokens fit into one, their logprobs apart."""

DONE = b"data: [DONE]\n\n"


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


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of a response share. With ``obfuscated``, chunks are padded, so that their
    sizes don't tell what is in them."""

    id: str
    created: int
    model: str
    return_token_ids: bool
    usage_chunk: bool
    obfuscated: bool = False
    service_tier: str | None = None
    echoes_logprobs: bool = False
    prompt_logprobs: bool = False


@dataclass(slots=True)
class Answer:
    """One choice. The prompt's are what is repeated to the client: ``prompt_text`` for echo,
    ``prompt_token_ids`` for return_token_ids. Of ``calls``, name and arguments."""

    index: int
    prompt_token_ids: Sequence[TokenId]
    prompt_text: str = ""
    pieces: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    prompt_entries: Sequence[TokenEntry] = ()

    def add(self, delta: Delta) -> None:
        self.prompt_entries = self.prompt_entries or delta.prompt_entries
        self.pieces.append(delta.text)
        for piece in delta.pieces:
            self._add_piece(piece)
        self.token_ids.extend(delta.token_ids)
        self.entries.extend(delta.entries)
        self.finish_reason = delta.finish_reason

    def _add_piece(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                self.pieces.append(text)
            case Thought(text):
                self.thoughts.append(text)
            case CallBegun(_, name):
                self.calls.append((name, []))
            case CallGrown(index, arguments):
                self.calls[index][1].append(arguments)


class Wording(ABC):
    """``with_logprobs`` says whether the client asked for them."""

    whole_object: str
    chunk_object: str

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        head = orjson.dumps(self._head(self.chunk_object))
        self._begin = b"data: " + head[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if envelope.usage_chunk else b"]}\n\n"

    @abstractmethod
    def opening(self, answer: Answer) -> bytes:
        """The chunk that begins a choice; may be empty."""

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes: ...

    @abstractmethod
    def _choice(self, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]: ...

    @property
    def is_padded(self) -> bool:
        """Whether a chunk's ending depends on its text."""
        return self._envelope.obfuscated

    def usage_chunk(self, usage: Usage) -> bytes:
        head = self._head(self.chunk_object)
        return b"data: " + orjson.dumps({**head, "choices": [], "usage": usage.json}) + b"\n\n"

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
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
        if envelope.service_tier is not None:
            head["service_tier"] = envelope.service_tier
        return head

    def _frame(self, choice: dict[str, Any]) -> bytes:
        data = orjson.dumps(choice)
        if self._envelope.obfuscated:
            padding = b"0" * (-len(data) % OBFUSCATION_BYTES)
            return self._begin + data + b'],"obfuscation":"' + padding + b'"' + self._end[1:]
        return self._begin + data + self._end

    def _delta_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return self._logprobs(delta.entries) if self._with_logprobs else None

    def _with_ids(self, choice: dict[str, Any], answer: Answer) -> dict[str, Any]:
        if self._envelope.return_token_ids:
            choice["prompt_token_ids"] = answer.prompt_token_ids
            choice["token_ids"] = answer.token_ids
        return choice


class ChatWording(Wording):
    """``call_id`` names a call by the indexes of its choice and itself."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        envelope: Envelope,
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        call_id: Callable[[int, int], str],
    ) -> None:
        super().__init__(envelope, tokenizer, with_logprobs=with_logprobs)
        self._call_id = call_id

    def opening(self, answer: Answer) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame(self._with_ids(choice, answer))

    def chunk(self, delta: Delta) -> bytes:
        """Several, if there are several pieces: tokens with the first, the reason with the last."""
        parts = [self._part(delta.index, piece) for piece in delta.pieces]
        parts = parts or [{"content": delta.text} if delta.text else {}]
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None}
            for part in parts
        ]
        choices[0]["logprobs"] = self._delta_logprobs(delta)
        choices[-1]["finish_reason"] = delta.finish_reason
        if self._envelope.return_token_ids:
            choices[0]["token_ids"] = delta.token_ids
        return b"".join(map(self._frame, choices))

    def _part(self, choice: int, piece: Piece) -> dict[str, Any]:
        match piece:
            case Text(text):
                return {"content": text}
            case Thought(text):
                return {"reasoning_content": text}
            case CallBegun(index, _):
                return {"tool_calls": [{"index": index, **self._call(choice, piece)}]}
            case CallGrown(index, arguments):
                return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}

    def _call(self, choice: int, call: CallBegun, arguments: str = "") -> dict[str, Any]:
        function = {"name": call.name, "arguments": arguments}
        return {
            "id": self._call_id(choice, call.index), "type": "function", "function": function,
        }  # fmt: skip

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        data = super().whole(answers, usage)
        if self._envelope.return_token_ids:
            ids = orjson.dumps(answers[0].prompt_token_ids)
            data = data[:-1] + b',"prompt_token_ids":' + ids + b"}"
        if self._envelope.prompt_logprobs:
            scores = orjson.dumps(as_vllm(answers[0].prompt_entries, self._tokenizer))
            data = data[:-1] + b',"prompt_logprobs":' + scores + b"}"
        return data

    def _choice(self, answer: Answer) -> dict[str, Any]:
        content = "".join(answer.pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.thoughts:
            message["reasoning_content"] = "".join(answer.thoughts)
        if answer.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                self._call(answer.index, CallBegun(number, name), "".join(arguments))
                for number, (name, arguments) in enumerate(answer.calls)
            ]
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.entries) if self._with_logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        return self._with_ids(choice, answer)

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        content = []
        for entry in entries:
            chosen = self._token(entry.logprob.token_id, entry.logprob.logprob)
            top = [self._token(token_id, logprob) for token_id, logprob in entry.logprob.top]
            content.append({**chosen, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: TokenId, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(data),
        }


class CompletionWording(Wording):
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, answer: Answer) -> bytes:
        if not answer.prompt_text and not self._envelope.return_token_ids:
            return b""
        choice = {
            "index": answer.index,
            "text": answer.prompt_text,
            "logprobs": self._logprobs(self._echoed(answer)) if self._echoed(answer) else None,
            "finish_reason": None,
        }
        return self._frame(self._with_ids(choice, answer))

    def chunk(self, delta: Delta) -> bytes:
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._delta_logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        if self._envelope.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._frame(choice)

    def _choice(self, answer: Answer) -> dict[str, Any]:
        entries = [*self._echoed(answer), *answer.entries]
        choice = {
            "index": answer.index,
            "text": answer.prompt_text + "".join(answer.pieces),
            "logprobs": self._logprobs(entries) if self._with_logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        if self._envelope.prompt_logprobs:
            choice["prompt_logprobs"] = as_vllm(answer.prompt_entries, self._tokenizer)
        return self._with_ids(choice, answer)

    def _echoed(self, answer: Answer) -> Sequence[TokenEntry]:
        return answer.prompt_entries if self._envelope.echoes_logprobs else ()

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """OpenAI writes null for the first token of a prompt."""
        values = [
            None if entry.is_first else max(entry.logprob.logprob, LOWEST_LOGPROB)
            for entry in entries
        ]
        return {
            "tokens": [self._spell(entry.logprob.token_id) for entry in entries],
            "token_logprobs": values,
            "top_logprobs": [None if entry.is_first else self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenEntry) -> dict[str, float]:
        token = entry.logprob
        pairs = [*token.top, (token.token_id, token.logprob)]
        return {self._spell(token_id): max(value, LOWEST_LOGPROB) for token_id, value in pairs}

    def _spell(self, token_id: TokenId) -> str:
        """Tokens that are not whole characters are spelt by their bytes, as OpenAI does."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
