"""Encoder of chat completions."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from baton.core.ids import TokenId
from baton.text.tokenizer import Tokenizer
from router.openai.encoders.encoder import (
    OpenAIEncoder,
    ResponseMetadata,
    encode_vllm_prompt_logprobs,
)
from router.serving.answer_encoder import Usage
from router.serving.choice_result import ChoiceResult
from router.serving.choice_stream import MIN_LOGPROB, ChoiceDelta, TokenEntry
from router.serving.parsers.output_parts import (
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
)


class ChatEncoder(OpenAIEncoder):
    """Encodes chat completions. ``call_id`` makes a tool call's id from the index of its choice and
    the index of the call."""

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        call_id: Callable[[int, int], str],
    ) -> None:
        super().__init__(metadata, tokenizer, with_logprobs=with_logprobs)
        self._call_id = call_id

    def encode_opening(self, answer: ChoiceResult, usage: Usage) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._encode_frame(self._with_ids(choice, answer))

    def encode_chunk(self, delta: ChoiceDelta) -> bytes:
        """Encode one chunk per part of the delta. Token ids and logprobs go into the first chunk,
        and the finish reason into the last one."""
        deltas = [self._part(delta.index, piece) for piece in delta.parts]
        deltas = deltas or [{"content": delta.text} if delta.text else {}]
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None}
            for part in deltas
        ]
        choices[0]["logprobs"] = self._delta_logprobs(delta)
        choices[-1]["finish_reason"] = delta.finish_reason
        if self._metadata.return_token_ids:
            choices[0]["token_ids"] = delta.token_ids
        return b"".join(map(self._encode_frame, choices))

    def _part(self, choice: int, part: OutputPart) -> dict[str, Any]:
        match part:
            case TextPart(text):
                return {"content": text}
            case ReasoningPart(text):
                return {"reasoning_content": text}
            case ToolCallStart(index, _):
                return {"tool_calls": [{"index": index, **self._call(choice, part)}]}
            case ToolCallArguments(index, arguments):
                return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}

    def _call(self, choice: int, call: ToolCallStart, arguments: str = "") -> dict[str, Any]:
        function = {"name": call.name, "arguments": arguments}
        return {
            "id": self._call_id(choice, call.index), "type": "function", "function": function,
        }  # fmt: skip

    def encode_response(self, answers: Sequence[ChoiceResult], usage: Usage) -> bytes:
        data = super().encode_response(answers, usage)
        if self._metadata.return_token_ids:
            ids = orjson.dumps(answers[0].prompt_token_ids)
            data = data[:-1] + b',"prompt_token_ids":' + ids + b"}"
        if self._metadata.prompt_logprobs:
            scores = orjson.dumps(
                encode_vllm_prompt_logprobs(answers[0].prompt_token_entries, self._tokenizer)
            )
            data = data[:-1] + b',"prompt_logprobs":' + scores + b"}"
        return data

    def _choice(self, answer: ChoiceResult) -> dict[str, Any]:
        content, reasoning, calls = answer.text, answer.reasoning, answer.tool_calls
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                self._call(answer.index, call, arguments) for call, arguments in calls
            ]
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.token_entries) if self._with_logprobs else None,
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
            "token": f"token_id:{token_id}"
            if self._metadata.tokens_as_ids
            else data.decode(errors="replace"),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(data),
        }
