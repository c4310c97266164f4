"""One HTTP request that has a body: who asks, what for, the answer, the account."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import TenantId
from baton.core.priority import MAX_PRIORITY_STEPS
from baton.errors import BatonError, DeadlineExceeded
from router.errors import ApiError, to_api_error
from router.http.body_parser import Body, parse_body
from router.http.json_limits import max_json_values
from router.http.raw_body import RawBody
from router.http.response_writer import (
    CLIENT_CLOSED_REQUEST,
    INLINE_WRITER_KEY,
    JSON_HEADERS,
    REQUEST_ID_KEY,
    STREAM_HEADERS,
    ClientDisconnected,
    ResponseWriter,
    cancel_on_disconnect,
    content_length,
    get_header,
    read_body,
)
from router.openai.best_of import response_usage, select_best
from router.openai.choice_stream import ChoiceDelta, ChoiceStream
from router.openai.context import RouterContext
from router.openai.encoders import (
    DONE_EVENT,
    ChatEncoder,
    ChoiceResult,
    CompletionEncoder,
    OpenAIEncoder,
    ResponseMetadata,
)
from router.openai.grammar_validator import TOOLS_FIELD
from router.openai.inline_stream_writer import InlineStreamWriter
from router.openai.preprocessor import (
    Preprocessor,
    Prompt,
    count_prompt_logprobs,
    encode_detokenize_response,
    encode_tokenize_response,
)
from router.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.openai.system_fingerprint import system_fingerprint
from router.telemetry.tracing import RequestTrace
from router.tenants.admission import (
    DEFAULT_RESERVED_OUTPUT_TOKENS,
    RequestAdmission,
    num_reserved_tokens,
)

BYTES_PER_TOKEN_ENTRY = 64
"""Of JSON, for a token of a scored prompt."""

log = structlog.get_logger(__name__)


class RequestHandler(Response, ABC):
    """Handed to Starlette as a response, so that it gets the raw channel: nothing stands between
    the client's leaving and the workers."""

    endpoint: str

    def __init__(self, service: RouterContext) -> None:
        super().__init__()
        self._service = service
        self._known_headers: dict[str, str] = {}
        self._visit: RequestAdmission
        self._steps_back = 0
        self._traceparent: str | None = None
        self._trace: RequestTrace | None = None

    @abstractmethod
    async def answer(self, wire: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        """Raises Problem or BatonError. Releases ``raw`` once nothing of it is needed any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = ResponseWriter(send, scope.get(INLINE_WRITER_KEY))
        if self._service.tracing is not None:
            self._traceparent = get_header(scope, b"traceparent")
        try:
            await self._serve(scope, receive, wire)
        except ClientDisconnected:
            wire.status = CLIENT_CLOSED_REQUEST
        except (BatonError, ApiError) as error:
            await wire.fail(to_api_error(error), self._known_headers)
        except Exception as error:
            request_id = scope.get(REQUEST_ID_KEY, "")
            log.exception("request_crashed", endpoint=self.endpoint, request_id=request_id)
            await wire.fail(to_api_error(error), self._known_headers)
        finally:
            status = wire.status or CLIENT_CLOSED_REQUEST
            self._service.metrics.requests.labels(self.endpoint, str(status)).inc()
            self._end_trace(status)

    async def _serve(self, scope: Scope, receive: Receive, wire: ResponseWriter) -> None:
        service, config = self._service, self._service.config
        service.check_open()
        tenant = service.doorkeeper.tenant_of(get_header(scope, b"authorization"))
        visit = service.entrance.enter(tenant, content_length(scope))
        await visit.prepare()
        with visit as self._visit, service.raw_body(tenant) as raw:
            self._known_headers |= self._visit.headers()
            await read_body(scope, receive, raw, config.max_body_bytes, config.body_seconds)
            try:
                with TimeLimit(config.request_seconds) as whole:
                    await cancel_on_disconnect(
                        receive, self.answer(wire, raw, tenant), scope.get(INLINE_WRITER_KEY)
                    )
            except TimeoutError as error:
                if not whole.expired:
                    raise
                message = f"the answer was not complete within {config.request_seconds:g} s"
                raise DeadlineExceeded(message) from error

    async def answer_alone(self, data: bytes, tenant: TenantId) -> tuple[int, bytes]:
        """Without a connection, and behind all who have one: the status and the body of what a
        client would get."""
        parts: list[bytes] = []

        async def keep(message: Message) -> None:
            parts.append(message.get("body", b""))

        wire, seconds = ResponseWriter(keep), self._service.config.request_seconds
        self._steps_back = MAX_PRIORITY_STEPS
        try:
            visit = self._service.entrance.enter(tenant, idle=True)
            with visit as self._visit, self._service.raw_body(tenant) as raw, TimeLimit(seconds):
                raw.add(data)
                await self.answer(wire, raw, tenant)
        except Exception as error:
            if not isinstance(error, BatonError | ApiError | TimeoutError):
                log.exception("request_crashed", endpoint=self.endpoint)
            late = DeadlineExceeded(f"the answer was not complete within {seconds:g} s")
            await wire.fail(to_api_error(late if isinstance(error, TimeoutError) else error), {})
        self._service.metrics.requests.labels("batches", str(wire.status)).inc()
        self._end_trace(wire.status)
        return wire.status, b"".join(parts)

    def _end_trace(self, status: int) -> None:
        if self._trace is not None and self._service.tracing is not None:
            self._service.tracing.end(self._trace, self.endpoint, status)

    async def _parsed(self, schema: type[Body], raw: RawBody, tenant: TenantId) -> Body:
        """Raises Problem (400). Its bytes are forgotten then."""
        service, data = self._service, raw.take()
        max_values = max_json_values(service.cluster.max_model_tokens)
        return await service.large_work.run(
            tenant, raw.size_bytes, lambda: parse_body(schema, data, max_values)
        )

    @property
    def request_id(self) -> str:
        """As the client knows it; empty before there is one."""
        return self._known_headers.get("x-baton-request-id", "")


class GenerationHandler(RequestHandler):
    """Chats and completions."""

    id_prefix: str
    schema: type[ChatBody] | type[CompletionBody]

    async def answer(self, wire: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        service = self._service
        arrived_at = service.clock.monotonic()
        request_id = f"{self.id_prefix}-{service.new_id()}"
        self._known_headers["x-baton-request-id"] = request_id
        if service.tracing is not None:
            self._trace = service.tracing.begin(request_id, self._traceparent)
        body = await self._parsed(self.schema, raw, tenant)
        service.check_model(body.model)
        body.priority = max(body.priority or 0, self._steps_back)
        asker = service.asker(tenant, body)
        preparer = service.preparer(asker)
        prompts = await service.large_work.run(
            tenant, raw.size_bytes, lambda: self._prepare(preparer, body)
        )
        raw.release()
        field = body.format[0] if body.format is not None else TOOLS_FIELD
        await service.formats.admit(prompts[0].sampling.grammar, field, tenant)
        await self._promise(prompts, body)
        choices = service.choices(request_id, asker, body, prompts, arrived_at)
        if self._trace is not None:
            self._trace.follow([choice.record for choice in choices], service.clock.monotonic())
        self._visit.follow([choice.record for choice in choices], body.candidates)
        answers = [
            ChoiceResult(choice.index, prompt.token_ids, prompt.text)
            for choice, prompt in zip(choices, _repeat_each(prompts, body.candidates), strict=True)
        ]
        wording = self._wording(self._envelope(request_id, body), body)
        with service.scores.take(
            count_prompt_logprobs([len(prompt.token_ids) for prompt in prompts], body)
        ):
            if body.stream:
                await self._stream(wire, choices, answers, wording, body)
            else:
                await self._whole(wire, choices, answers, wording, body)

    async def _promise(self, prompts: Sequence[Prompt], body: ChatBody | CompletionBody) -> None:
        """What the tenant may use of its limits. Raises RateLimited or Overloaded."""
        asked = body.asked_tokens or DEFAULT_RESERVED_OUTPUT_TOKENS
        answer = min(asked, max(prompt.sampling.max_tokens for prompt in prompts))
        sizes = [len(prompt.token_ids) for prompt in prompts]
        await self._visit.prepare_promise(num_reserved_tokens(sizes, body.candidates, answer))
        self._visit.promise(sizes, body.candidates, answer)
        self._known_headers |= self._visit.headers()

    @abstractmethod
    def _prepare(self, preparer: Preprocessor, body: Any) -> list[Prompt]: ...

    @abstractmethod
    def _wording(
        self, envelope: ResponseMetadata, body: ChatBody | CompletionBody
    ) -> OpenAIEncoder: ...

    async def _whole(
        self,
        wire: ResponseWriter,
        choices: Sequence[ChoiceStream],
        answers: Sequence[ChoiceResult],
        wording: OpenAIEncoder,
        body: ChatBody | CompletionBody,
    ) -> None:
        async def collect(delta: ChoiceDelta) -> None:
            answers[delta.index].add(delta)

        await self._service.follow_all(choices, collect)
        best = select_best(choices, answers, body.candidates, body.choices)
        usage = response_usage(choices, body.candidates)
        size = sum(len(answer.prompt_entries) for answer in best) * BYTES_PER_TOKEN_ENTRY
        tenant = self._visit.tenant.id
        data = await self._service.large_work.run(tenant, size, lambda: wording.whole(best, usage))
        await wire.respond(200, JSON_HEADERS | self._debug_headers(choices[0]), data)

    async def _stream(
        self,
        wire: ResponseWriter,
        choices: Sequence[ChoiceStream],
        answers: Sequence[ChoiceResult],
        wording: OpenAIEncoder,
        body: ChatBody | CompletionBody,
    ) -> None:
        """The response begins with the first output: what fails earlier has its own status."""
        unopened = {answer.index: answer for answer in answers}
        one_at_a_time = asyncio.Lock()

        async def send(delta: ChoiceDelta) -> None:
            async with one_at_a_time:
                size, opening = len(answers[delta.index].prompt_token_ids), b""
                if delta.index in unopened:
                    answer = unopened.pop(delta.index)
                    answer.prompt_entries = delta.prompt_entries
                    wording.note_taken(delta.index, size, 0)
                    opening = wording.opening(answer)
                wording.note_taken(delta.index, size, choices[delta.index].num_tokens)
                frames = opening + wording.chunk(delta)
                if not wire.started:
                    headers = self._debug_headers(choices[delta.index])
                    await wire.start(200, STREAM_HEADERS | headers)
                await wire.write(frames)

        outlet = None if body.wants_running_usage else InlineStreamWriter(wire, wording, unopened)
        await self._service.follow_all(choices, send, outlet)
        usage = b""
        if body.wants_usage_chunk:
            usage = wording.usage_chunk(response_usage(choices, body.candidates))
        await wire.end(usage + DONE_EVENT)

    def _envelope(self, request_id: str, body: ChatBody | CompletionBody) -> ResponseMetadata:
        return ResponseMetadata(
            id=request_id,
            created=self._service.clock.wall_nanoseconds() // 1_000_000_000,
            model=self._service.config.model,
            return_token_ids=bool(body.return_token_ids),
            usage_chunk=body.wants_usage_chunk,
            running_usage=body.wants_running_usage,
            echoes_logprobs=isinstance(body, CompletionBody) and bool(body.echo),
            prompt_logprobs=body.prompt_logprobs is not None,
            obfuscated=body.wants_obfuscation,
            system_fingerprint=system_fingerprint(self._service.cluster.any_worker),
            service_tier="default" if isinstance(body, ChatBody) and body.service_tier else None,
        )

    def _debug_headers(self, choice: ChoiceStream) -> dict[str, str]:
        return self._known_headers | choice.record.headers()


class ChatHandler(GenerationHandler):
    endpoint = "chat"
    id_prefix = "chatcmpl"
    schema = ChatBody

    def _prepare(self, preparer: Preprocessor, body: Any) -> list[Prompt]:
        if self._service.config.refuses_special_tokens:
            self._service.special_tokens.check(body.messages)
        return preparer.chat(body)

    def _wording(
        self, envelope: ResponseMetadata, body: ChatBody | CompletionBody
    ) -> OpenAIEncoder:
        with_logprobs = body.num_logprobs is not None
        dialect = self._service.dialect

        def call_id(choice: int, call: int) -> str:
            return dialect.call_id(envelope.id, choice, call)

        return ChatEncoder(
            envelope, self._service.tokenizer, with_logprobs=with_logprobs, call_id=call_id
        )


class CompletionHandler(GenerationHandler):
    endpoint = "completions"
    id_prefix = "cmpl"
    schema = CompletionBody

    def _prepare(self, preparer: Preprocessor, body: Any) -> list[Prompt]:
        return preparer.completion(body)

    def _wording(
        self, envelope: ResponseMetadata, body: ChatBody | CompletionBody
    ) -> OpenAIEncoder:
        with_logprobs = body.num_logprobs is not None
        return CompletionEncoder(envelope, self._service.tokenizer, with_logprobs=with_logprobs)


class TokenizeHandler(RequestHandler):
    endpoint = "tokenize"

    async def answer(self, wire: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        service = self._service
        body = await self._parsed(TokenizeBody, raw, tenant)
        service.check_model(body.model)
        tokenizer, limits = service.tokenizer, service.limits
        answer = await service.large_work.run(
            tenant, raw.size_bytes, lambda: encode_tokenize_response(body, tokenizer, limits)
        )
        await wire.respond(200, JSON_HEADERS, answer)


class DetokenizeHandler(RequestHandler):
    endpoint = "detokenize"

    async def answer(self, wire: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        service = self._service
        body = await self._parsed(DetokenizeBody, raw, tenant)
        service.check_model(body.model)
        tokenizer, limits = service.tokenizer, service.limits
        answer = await service.large_work.run(
            tenant, raw.size_bytes, lambda: encode_detokenize_response(body, tokenizer, limits)
        )
        await wire.respond(200, JSON_HEADERS, answer)


def _repeat_each(prompts: Sequence[Prompt], times: int) -> list[Prompt]:
    return [prompt for prompt in prompts for _ in range(times)]
