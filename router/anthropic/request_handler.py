"""Handlers of Anthropic's routes."""

from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from baton.core.ids import TenantId
from router.anthropic.errors import encode_error, encode_error_event
from router.anthropic.message_encoder import PING, MessageEncoder
from router.anthropic.schema import CountTokensBody, MessagesBody
from router.anthropic.usage import CacheBreakpoints
from router.errors import ApiError
from router.http.raw_body import RawBody
from router.http.response_writer import JSON_HEADERS, REQUEST_ID_KEY, ResponseWriter
from router.openai.chat_handler import ChatHandler
from router.openai.encoders import AnswerEncoder, ResponseMetadata
from router.openai.preprocessor import Preprocessor, Prompt, count_prompt_tokens
from router.openai.request_handler import RequestHandler
from router.openai.schema import ChatBody, CompletionBody

CALL_ID_PREFIX = "toolu_"


class AnthropicHandler(RequestHandler):
    """Handles a request of Anthropic's API: errors have Anthropic's form, and the header
    ``request-id`` has the id by which the client and the logs know the request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._response_headers["request-id"] = scope.get(REQUEST_ID_KEY, "")
        await super().__call__(scope, receive, send)

    def encode_error(self, error: ApiError) -> bytes:
        return encode_error(error, self._response_headers.get("request-id", ""))

    def encode_error_event(self, error: ApiError) -> bytes:
        return encode_error_event(error, self._response_headers.get("request-id", ""))


class MessagesHandler(AnthropicHandler, ChatHandler):
    endpoint = "messages"
    id_prefix = "msg_"
    caps_max_tokens = True
    ping = PING
    _body: MessagesBody
    _prompt: Prompt

    async def _read_body(self, raw: RawBody, tenant: TenantId) -> ChatBody | CompletionBody:
        self._body = await self._parse(MessagesBody, raw, tenant)
        self._report_ignored_fields(tenant, self._body.ignored_fields)
        return self._body.chat

    def _build_prompts(self, preprocessor: Preprocessor, body: Any) -> list[Prompt]:
        try:
            prompts = super()._build_prompts(preprocessor, body)
        except ApiError as error:
            error.param = error.param and self._body.source_of(error.param)
            raise
        self._prompt = prompts[0]
        return prompts

    def _create_encoder(
        self, metadata: ResponseMetadata, body: ChatBody | CompletionBody
    ) -> AnswerEncoder:
        output_format = self._model.text.output_format

        def call_id(call: int) -> str:
            return output_format.call_id(metadata.id, 0, call, CALL_ID_PREFIX)

        return MessageEncoder(
            metadata,
            call_id=call_id,
            encode_failure=self.encode_error_event,
            breakpoints=CacheBreakpoints.of(self._prompt.prefix_pins),
            is_capped=self._prompt.sampling.max_tokens < self._body.max_tokens,
            hides_thinking=self._body.hides_thinking,
        )


class CountTokensHandler(AnthropicHandler):
    endpoint = "count_tokens"

    async def answer(self, writer: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        context = self._context
        body = await self._parse(CountTokensBody, raw, tenant)
        self._report_ignored_fields(tenant, body.ignored_fields)
        text, limits = self._model.text, self._model.limits
        count = await context.resources.offload_executor.tokenize(
            self._model.name,
            tenant,
            text.tokenizing_bytes(raw.size_bytes),
            lambda: count_prompt_tokens(body.chat, text.tokenizer, text.output_format, limits),
        )
        answer = orjson.dumps({"input_tokens": count})
        await writer.respond(200, JSON_HEADERS | self._response_headers, answer)
