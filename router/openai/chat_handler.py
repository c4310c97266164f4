"""Handles chat requests."""

from typing import Any

from baton.core.ids import TenantId
from router.http.raw_body import RawBody
from router.openai.chat_renderer import ChatRenderer
from router.openai.encoders import AnswerEncoder, ChatEncoder, ResponseMetadata
from router.openai.generation_handler import GenerationHandler
from router.openai.preprocessor import Preprocessor, Prompt
from router.openai.schema import ChatBody, CompletionBody


class ChatHandler(GenerationHandler):
    endpoint = "chat"
    id_prefix = "chatcmpl-"
    caps_max_tokens = False
    """If this is True, a ``max_tokens`` beyond the context is reduced to the rest of the context;
    otherwise it is refused."""

    async def _read_body(self, raw: RawBody, tenant: TenantId) -> ChatBody | CompletionBody:
        return await self._parse(ChatBody, raw, tenant)

    def _build_prompts(self, preprocessor: Preprocessor, body: Any) -> list[Prompt]:
        if self._context.config.refuses_special_tokens:
            self._model.text.special_tokens.check(body.messages)
        ChatRenderer(self._model.text.tokenizer).drop_ineffective_fields(body, self._ignored)
        return preprocessor.prepare_chat(body, caps_max_tokens=self.caps_max_tokens)

    def _create_encoder(
        self, metadata: ResponseMetadata, body: ChatBody | CompletionBody
    ) -> AnswerEncoder:
        with_logprobs = body.num_logprobs is not None
        dialect = self._model.text.output_format

        def call_id(choice: int, call: int) -> str:
            return dialect.call_id(metadata.id, choice, call)

        return ChatEncoder(
            metadata, self._model.text.tokenizer, with_logprobs=with_logprobs, call_id=call_id
        )
