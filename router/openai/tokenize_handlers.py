"""Handles requests to tokenize texts and to decode tokens."""

from baton.core.ids import TenantId
from router.http.raw_body import RawBody
from router.http.response_writer import JSON_HEADERS, ResponseWriter
from router.openai.chat_renderer import ChatRenderer
from router.openai.preprocessor import encode_detokenize_response, encode_tokenize_response
from router.openai.request_handler import RequestHandler
from router.openai.schema import DetokenizeBody, TokenizeBody


class TokenizeHandler(RequestHandler):
    endpoint = "tokenize"

    async def answer(self, writer: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        context = self._context
        body = await self._parse(TokenizeBody, raw, tenant)
        tokenizer, limits = self._model.text.tokenizer, self._model.limits
        ChatRenderer(tokenizer).drop_ineffective_fields(body, self._ignored)
        self._report_ignored_fields(tenant)
        answer = await context.resources.offload_executor.tokenize(
            self._model.name,
            tenant,
            self._model.text.tokenizing_bytes(raw.size_bytes),
            lambda: encode_tokenize_response(body, tokenizer, limits),
        )
        await writer.respond(200, JSON_HEADERS | self._response_headers, answer)


class DetokenizeHandler(RequestHandler):
    endpoint = "detokenize"

    async def answer(self, writer: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        context = self._context
        body = await self._parse(DetokenizeBody, raw, tenant)
        tokenizer, limits = self._model.text.tokenizer, self._model.limits
        answer = await context.resources.offload_executor.run(
            tenant, raw.size_bytes, lambda: encode_detokenize_response(body, tokenizer, limits)
        )
        await writer.respond(200, JSON_HEADERS | self._response_headers, answer)
