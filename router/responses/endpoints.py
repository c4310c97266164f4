"""The endpoints ``/v1/responses`` and ``/v1/responses/input_tokens``."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import orjson
import structlog

from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import TenantId
from baton.errors import BatonError
from router.errors import ApiError, invalid_field
from router.generation.record import GenerationRecord
from router.responses.background_responses import BackgroundResponses
from router.responses.chat_request import ChatRequest, build_chat, build_request
from router.responses.conversation import ConversationReader
from router.responses.encoder import ResponsesEncoder, response_fields
from router.responses.input_items import RESPONSE_PREFIX, complete_items, to_items
from router.responses.output_items import OutputOptions
from router.responses.response_store import ResponseStore
from router.responses.schema import InputTokensBody, ResponsesBody
from router.responses.stored_response import (
    EncodedItems,
    StoredResponse,
    encode_items,
    not_encodable,
)
from router.serving.answer_encoder import AnswerEncoder
from router.serving.generate import ParsedRequest, generate
from router.serving.preprocessor import Prompt, count_prompt_tokens
from router.serving.request_handler import Endpoint, IncomingRequest

log = structlog.get_logger(__name__)


def responses_endpoint(
    store: ResponseStore | None = None, background: BackgroundResponses | None = None
) -> Endpoint:
    """Return the endpoint ``/v1/responses``. If ``store`` is None, no responses are stored or
    found; if ``background`` is None, no responses are generated in the background."""
    parse = partial(parse_response, store=store, background=background)
    return Endpoint("responses", partial(generate, id_prefix=RESPONSE_PREFIX, parse=parse))


def input_tokens_endpoint(store: ResponseStore | None = None) -> Endpoint:
    """Return the endpoint that counts the tokens of the prompt that a request to ``/v1/responses``
    would have."""
    return Endpoint("input_tokens", partial(count_input_tokens, store=store))


async def parse_response(
    incoming: IncomingRequest,
    *,
    store: ResponseStore | None,
    background: BackgroundResponses | None,
) -> ParsedRequest:
    body, _ = await incoming.parse(ResponsesBody, lambda body: None, rounds_integers=True)
    if body.background:
        _check_background(body, background)
    items, source = await _read_chat(incoming, body, store)
    request = build_request(body, source.chat)
    is_stored = store is not None and body.is_stored

    def create_encoder(
        _prompts: Sequence[Prompt], _records: Sequence[GenerationRecord]
    ) -> ResponsesEncoder:
        model, response_id = incoming.model, incoming.id
        dialect = model.text.output_format
        options = OutputOptions(
            response_id,
            source.tools.identities,
            lambda call: dialect.call_id(response_id, 0, call),
            summarizes_reasoning=body.reasoning is not None and body.reasoning.wants_summary,
            encrypts_reasoning=body.includes_encrypted_reasoning,
        )
        fields = response_fields(
            response_id,
            incoming.unix_seconds,
            model.shown_name,
            body,
            source.tools,
            model.sampling_defaults,
            is_stored=is_stored,
        )
        clock = incoming.context.clock
        return ResponsesEncoder(
            fields,
            options,
            model.text.tokenizer if request.num_logprobs is not None else None,
            is_obfuscated=body.wants_obfuscation,
            unix_seconds=lambda: clock.wall_nanoseconds() // 1_000_000_000,
        )

    keeper = None
    if store is not None and is_stored:
        keeper = ResponseKeeper(incoming, items, store, background if body.background else None)
    return ParsedRequest(request, create_encoder, keeper)


async def count_input_tokens(incoming: IncomingRequest, *, store: ResponseStore | None) -> None:
    body, _ = await incoming.parse(InputTokensBody, lambda body: None, rounds_integers=True)
    _, source = await _read_chat(incoming, body, store)
    text, limits = incoming.model.text, incoming.model.limits
    count = await incoming.tokenize(
        lambda: count_prompt_tokens(source.chat, text.tokenizer, text.output_format, limits)
    )
    answer = {"object": "response.input_tokens", "input_tokens": count}
    await incoming.respond(orjson.dumps(answer))


async def _read_chat(
    incoming: IncomingRequest, body: InputTokensBody, store: ResponseStore | None
) -> tuple[Sequence[Any], ChatRequest]:
    """Return the request's input items, and the chat. What is read from the store for it counts as
    bytes of the request's body."""
    context, tenant, raw = incoming.context, incoming.tenant, incoming.raw
    executor = context.resources.offload_executor
    reader = ConversationReader(
        store,
        tenant,
        context.config.max_body_bytes,
        raw.charge,
        partial(context.stored_bytes, tenant),
        executor,
    )
    history = await reader.read(body.previous_response_id)
    items = await reader.resolve_references(to_items(body.input))
    source = await executor.run(tenant, raw.size_bytes, lambda: build_chat(body, items, history))
    incoming.report_ignored_fields(source.ignored)
    return items, source


def _check_background(body: ResponsesBody, background: BackgroundResponses | None) -> None:
    """Raise ApiError (400) for a response that can't be generated in the background."""
    param, reason = "background", None
    if not body.is_stored:
        reason = "background: requires that the response is stored; leave out store: false"
    elif background is None:
        reason = "background: is not supported, because no responses are stored here"
    elif body.stream:
        param = "stream"
        reason = "stream: can't be combined with background, whose client does not wait"
    if reason is not None:
        raise invalid_field(param, reason, "unsupported_parameter")


class ResponseKeeper:
    """Implements :class:`router.serving.generate.AnswerKeeper`: stores the response of one request,
    with its input. If ``background`` is given, the response is generated there."""

    def __init__(
        self,
        incoming: IncomingRequest,
        items: Sequence[Any],
        store: ResponseStore,
        background: BackgroundResponses | None,
    ) -> None:
        self._tenant: TenantId = incoming.tenant
        self._config = incoming.context.config
        self._executor = incoming.context.resources.offload_executor
        self._raw = incoming.raw
        self._items = items
        self._encoded_items: EncodedItems | None = None
        self._store = store
        self._background = background

    @property
    def is_background(self) -> bool:
        return self._background is not None

    async def keep(self, encoder: AnswerEncoder, failure: ApiError | None = None) -> None:
        """Store the response, complete or failed. If it can't be stored, the client still gets its
        answer: a request that continues it will then not find it."""
        assert isinstance(encoder, ResponsesEncoder)
        if failure is not None:
            encoder.fail(failure)
        response = encoder.response
        try:
            await self._store.put(self._tenant, await self._with_input(response))
        except BatonError as error:
            response_id, tenant = response["id"], self._tenant
            log.warning(
                "response_not_stored", response_id=response_id, tenant=tenant, error=str(error)
            )

    async def start(
        self, encoder: AnswerEncoder, generate: Callable[[], Awaitable[bytes]], held: ExitStack
    ) -> bytes:
        assert isinstance(encoder, ResponsesEncoder)
        assert self._background is not None, "is_background comes first"

        async def generate_response(_response_id: str) -> StoredResponse:
            """Generate the response without a connection, within the same time limit as any other
            response. Raises ApiError, BatonError or TimeoutError."""
            with TimeLimit(self._config.request_timeout_seconds):
                await generate()
            return await self._with_input(encoder.response)

        stored = await self._with_input(encoder.queued_response)
        return await self._background.start(self._tenant, stored, generate_response, held)

    async def _with_input(self, response: Mapping[str, Any]) -> StoredResponse:
        """Return the response with the input. Raises Invalid if the input can't be encoded."""
        if self._encoded_items is None:
            items = self._items
            self._encoded_items = await self._executor.run(
                self._tenant, self._raw.size_bytes, lambda: _encode_input(items, response["id"])
            )
            self._items = ()
        return StoredResponse(response, self._encoded_items)


def _encode_input(items: Sequence[Any], response_id: str) -> EncodedItems:
    try:
        return encode_items(complete_items(items, response_id))
    except orjson.JSONEncodeError as error:
        raise not_encodable(error) from error
