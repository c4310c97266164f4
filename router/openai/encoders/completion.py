"""Encoder of text completions."""

from collections.abc import Sequence
from typing import Any

from baton.core.ids import TokenId
from router.openai.encoders.encoder import OpenAIEncoder, encode_vllm_prompt_logprobs
from router.serving.answer_encoder import Usage
from router.serving.choice_result import ChoiceResult
from router.serving.choice_stream import MIN_LOGPROB, ChoiceDelta, TokenEntry


class CompletionEncoder(OpenAIEncoder):
    response_object = "text_completion"
    chunk_object = "text_completion"

    def encode_opening(self, answer: ChoiceResult, usage: Usage) -> bytes:
        if not answer.prompt_text and not self._metadata.return_token_ids:
            return b""
        choice = {
            "index": answer.index,
            "text": answer.prompt_text,
            "logprobs": self._logprobs(self._echoed_entries(answer))
            if self._echoed_entries(answer)
            else None,
            "finish_reason": None,
        }
        return self._encode_frame(self._with_ids(choice, answer))

    def encode_chunk(self, delta: ChoiceDelta) -> bytes:
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._delta_logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        if self._metadata.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._encode_frame(choice)

    def _choice(self, answer: ChoiceResult) -> dict[str, Any]:
        entries = [*self._echoed_entries(answer), *answer.token_entries]
        choice = {
            "index": answer.index,
            "text": answer.prompt_text + answer.text,
            "logprobs": self._logprobs(entries) if self._with_logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        if self._metadata.prompt_logprobs:
            choice["prompt_logprobs"] = encode_vllm_prompt_logprobs(
                answer.prompt_token_entries, self._tokenizer
            )
        return self._with_ids(choice, answer)

    def _echoed_entries(self, answer: ChoiceResult) -> Sequence[TokenEntry]:
        return answer.prompt_token_entries if self._metadata.echoes_logprobs else ()

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """Encode logprobs. As in OpenAI's API, the logprob of a prompt's first token is null."""
        values = [
            None if entry.is_first else max(entry.logprob.logprob, MIN_LOGPROB) for entry in entries
        ]
        return {
            "tokens": [self._token_text(entry.logprob.token_id) for entry in entries],
            "token_logprobs": values,
            "top_logprobs": [None if entry.is_first else self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenEntry) -> dict[str, float]:
        token = entry.logprob
        pairs = [*token.top, (token.token_id, token.logprob)]
        return {self._token_text(token_id): max(value, MIN_LOGPROB) for token_id, value in pairs}

    def _token_text(self, token_id: TokenId) -> str:
        """Decode a token. If its bytes are not valid UTF-8, they are spelt out, as in OpenAI's API
        (``bytes:\\x..``)."""
        if self._metadata.tokens_as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
