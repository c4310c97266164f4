"""Handlers of ``/v1/responses`` and ``/v1/responses/input_tokens``."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson
import structlog

from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import TenantId
from baton.errors import BatonError
from router.errors import ApiError, to_api_error
from router.http.raw_body import RawBody
from router.http.response_writer import JSON_HEADERS, ResponseWriter
from router.openai.chat_handler import ChatHandler
from router.openai.choice_result import ChoiceResult
from router.openai.choice_stream import ChoiceStream
from router.openai.context import RouterContext
from router.openai.encoders import AnswerEncoder, ResponseMetadata
from router.openai.preprocessor import count_prompt_tokens
from router.openai.request_handler import RequestHandler
from router.openai.schema import ChatBody, CompletionBody
from router.responses.background_responses import BackgroundResponses
from router.responses.chat_errors import translate_error
from router.responses.chat_request import ChatRequest, build_chat
from router.responses.conversation import ConversationReader
from router.responses.encoded_items import EncodedItems, encode_items
from router.responses.encoder import ResponsesEncoder
from router.responses.input_items import complete_items, to_items
from router.responses.item_ids import RESPONSE_PREFIX
from router.responses.output_items import OutputOptions
from router.responses.response_fields import response_fields
from router.responses.response_json import not_encodable
from router.responses.response_store import ResponseStore
from router.responses.schema import InputTokensBody, ResponsesBody
from router.responses.stored_response import StoredResponse

log = structlog.get_logger(__name__)


class _ChatSource(RequestHandler):
    """The base class of the handlers in this file. Turns a request into a chat, and errors about
    the chat back into errors about the request. If ``store`` is None, no responses are stored or
    found."""

    repeats_values = True

    def __init__(self, context: RouterContext, store: ResponseStore | None = None) -> None:
        super().__init__(context)
        self._store = store
        self._input_items: Sequence[Any] = ()
        self._message_paths: Sequence[str] = ()
        self._tool_paths: Sequence[str] = ()
        self._is_parsed = False

    async def _build_chat(
        self, body: InputTokensBody, raw: RawBody, tenant: TenantId
    ) -> ChatRequest:
        """Build the chat. What is read from the store for it counts as bytes of the request's body
        (``raw``)."""
        self._is_parsed = True
        context = self._context
        max_bytes = context.config.max_body_bytes
        reader = ConversationReader(
            self._store,
            tenant,
            max_bytes,
            raw.charge,
            partial(context.stored_bytes, tenant),
            context.resources.offload_executor,
        )
        history = await reader.read(body.previous_response_id)
        items = await reader.resolve_references(to_items(body.input))
        request = await context.resources.offload_executor.run(
            tenant, raw.size_bytes, lambda: build_chat(body, items, history)
        )
        self._input_items = items
        self._message_paths = request.message_paths
        self._tool_paths = request.tools.paths
        self._report_ignored_fields(tenant, request.ignored)
        return request

    def encode_error(self, error: ApiError) -> bytes:
        return super().encode_error(self._translate(error))

    def _translate(self, error: ApiError) -> ApiError:
        """Return the error with the request's field names in place of the chat's. An error that is
        found while the body is parsed already has the request's field names."""
        return (
            translate_error(error, self._message_paths, self._tool_paths)
            if self._is_parsed
            else error
        )


class ResponsesHandler(_ChatSource, ChatHandler):
    """Handles ``/v1/responses``. If ``background`` is None, no responses are generated in the
    background."""

    endpoint = "responses"
    id_prefix = RESPONSE_PREFIX
    _body: ResponsesBody
    _request: ChatRequest

    def __init__(
        self,
        context: RouterContext,
        store: ResponseStore | None = None,
        background: BackgroundResponses | None = None,
    ) -> None:
        super().__init__(context, store)
        self._background = background
        self._encoded_items: EncodedItems | None = None

    async def _read_body(self, raw: RawBody, tenant: TenantId) -> ChatBody | CompletionBody:
        body = await self._parse(ResponsesBody, raw, tenant)
        if body.background:
            self._check_background(body)
        self._body = body
        self._request = await self._build_chat(body, raw, tenant)
        return self._request.chat

    def _check_background(self, body: ResponsesBody) -> None:
        """Raise ApiError (400) for a response that can't be generated in the background."""
        param, reason = "background", None
        if not body.is_stored:
            reason = "background: requires that the response is stored; leave out store: false"
        elif self._background is None:
            reason = "background: is not supported, because no responses are stored here"
        elif body.stream:
            param = "stream"
            reason = "stream: can't be combined with background, since streams are not resumable"
        if reason is not None:
            raise ApiError(400, reason, param=param, code="unsupported_parameter")

    def _create_encoder(
        self, metadata: ResponseMetadata, body: ChatBody | CompletionBody
    ) -> AnswerEncoder:
        request, dialect = self._body, self._model.text.output_format
        options = OutputOptions(
            metadata.id,
            self._request.tools.identities,
            lambda call: dialect.call_id(metadata.id, 0, call),
            summarizes_reasoning=request.reasoning is not None and request.reasoning.wants_summary,
            encrypts_reasoning=request.includes_encrypted_reasoning,
        )
        return ResponsesEncoder(
            response_fields(metadata, request, self._request.tools, is_stored=self._is_stored),
            options,
            self._model.text.tokenizer if body.num_logprobs is not None else None,
            is_obfuscated=metadata.is_obfuscated,
            unix_seconds=self._unix_seconds,
        )

    @property
    def _is_stored(self) -> bool:
        return self._store is not None and self._body.is_stored

    async def _deliver(
        self,
        writer: ResponseWriter,
        choices: Sequence[ChoiceStream],
        answers: Sequence[ChoiceResult],
        encoder: AnswerEncoder,
        body: ChatBody | CompletionBody,
    ) -> None:
        assert isinstance(encoder, ResponsesEncoder)
        if not self._body.background:
            try:
                await super()._deliver(writer, choices, answers, encoder, body)
            except (BatonError, ApiError) as error:
                if writer.has_started:  # the client knows the response's id
                    encoder.fail(self._translate(to_api_error(error)))
                    await self._on_complete(encoder)
                raise
            return
        assert self._background is not None, "_check_background() comes first"
        generate = partial(self._generate_in_background, choices, answers, encoder, body)
        response = await self._background.start(
            self._admission.tenant.id,
            await self._with_input(encoder.queued_response),
            generate,
            self._detach(),
        )
        headers = JSON_HEADERS | self._response_headers
        await writer.respond(200, headers, response)

    async def _generate_in_background(
        self,
        choices: Sequence[ChoiceStream],
        answers: Sequence[ChoiceResult],
        encoder: ResponsesEncoder,
        body: ChatBody | CompletionBody,
        _response_id: str,
    ) -> StoredResponse:
        """Generate the response without a connection, within the same time limit as any other
        response. Raises ApiError or TimeoutError."""
        try:
            with TimeLimit(self._context.config.request_timeout_seconds):
                await self._generate(choices, answers, encoder, body)
        except (BatonError, ApiError) as error:
            raise self._translate(to_api_error(error)) from error
        return await self._with_input(encoder.response)

    async def _on_complete(self, encoder: AnswerEncoder) -> None:
        """Store the response, complete or failed. If it can't be stored, the client still gets its
        answer: a request that continues it will then not find it."""
        if self._store is None or not self._is_stored:
            return
        assert isinstance(encoder, ResponsesEncoder)
        response, tenant = encoder.response, self._admission.tenant.id
        try:
            await self._store.put(tenant, await self._with_input(response))
        except BatonError as error:
            log.warning(
                "response_not_stored", response_id=response["id"], tenant=tenant, error=str(error)
            )

    async def _with_input(self, response: Mapping[str, Any]) -> StoredResponse:
        """Return the response with the input. Raises Invalid if the input can't be encoded."""
        if self._encoded_items is None:
            items = self._input_items
            self._encoded_items = await self._context.resources.offload_executor.run(
                self._admission.tenant.id,
                self._raw.size_bytes,
                lambda: _encode_input(items, response["id"]),
            )
            self._input_items = ()
        return StoredResponse(response, self._encoded_items)

    def encode_error_event(self, error: ApiError) -> bytes:
        return super().encode_error_event(self._translate(error))


def _encode_input(items: Sequence[Any], response_id: str) -> EncodedItems:
    try:
        return encode_items(complete_items(items, response_id))
    except orjson.JSONEncodeError as error:
        raise not_encodable(error) from error


class InputTokensHandler(_ChatSource):
    """Counts the tokens of the prompt that a request to ``/v1/responses`` would have."""

    endpoint = "input_tokens"

    async def answer(self, writer: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        context = self._context
        body = await self._parse(InputTokensBody, raw, tenant)
        request = await self._build_chat(body, raw, tenant)
        text, limits = self._model.text, self._model.limits
        count = await context.resources.offload_executor.tokenize(
            self._model.name,
            tenant,
            text.tokenizing_bytes(raw.size_bytes),
            lambda: count_prompt_tokens(request.chat, text.tokenizer, text.output_format, limits),
        )
        answer = orjson.dumps({"object": "response.input_tokens", "input_tokens": count})
        await writer.respond(200, JSON_HEADERS | self._response_headers, answer)
