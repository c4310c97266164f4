"""Handles one HTTP request that has a body: authenticates and admits it, reads the body, and
encodes errors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from baton.concurrency.time_limit import TimeLimit
from baton.core.ids import TenantId
from baton.core.priority import MAX_PRIORITY_STEPS
from baton.errors import BatonError, DeadlineExceeded
from router.errors import ApiError, to_api_error
from router.http.api_key_header import api_key_header
from router.http.body_parser import parse_body
from router.http.ignored_fields import IgnoredFields
from router.http.json_limits import max_json_values
from router.http.raw_body import RawBody
from router.http.response_writer import (
    CLIENT_CLOSED_REQUEST,
    INLINE_WRITER_KEY,
    REQUEST_ID_KEY,
    ClientDisconnected,
    ResponseWriter,
    cancel_on_disconnect,
    content_length,
    get_header,
    read_body,
)
from router.openai.context import RouterContext
from router.openai.schema.strict_model import RequestBody
from router.openai.served_model import ServedModel
from router.telemetry.tracing import RequestTrace
from router.tenants.admission import RequestAdmission

log = structlog.get_logger(__name__)

Body = TypeVar("Body", bound=RequestBody)


class RequestHandler(Response, ABC):
    """Handles one HTTP request. The class is a Starlette response, so that it gets the raw ASGI
    channel: no layer in between delays the message that the client has disconnected.

    The handler also encodes its errors (:class:`ErrorEncoder`), in OpenAI's form unless a subclass
    implements another API."""

    endpoint: str

    repeats_values = False
    """Whether answers repeat values of the body."""

    def __init__(self, context: RouterContext) -> None:
        super().__init__()
        self._context = context
        self._response_headers: dict[str, str] = {}
        self._admission: RequestAdmission
        self._raw: RawBody
        self._ignored: IgnoredFields
        self._model: ServedModel
        self._min_priority = 0
        self._traceparent: str | None = None
        self._trace: RequestTrace | None = None

    @abstractmethod
    async def answer(self, writer: ResponseWriter, raw: RawBody, tenant: TenantId) -> None:
        """Answer the request. Raises ApiError or BatonError. May release ``raw`` before the end, as
        soon as the body is not needed any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(send, scope[INLINE_WRITER_KEY])
        if self._context.telemetry.tracer is not None:
            self._traceparent = get_header(scope, b"traceparent")
        request_id = scope.get(REQUEST_ID_KEY, "")
        try:
            await self._serve(scope, receive, writer)
        except ClientDisconnected:
            writer.status = CLIENT_CLOSED_REQUEST
        except (BatonError, ApiError) as error:
            await writer.send_error(to_api_error(error, request_id), self._response_headers, self)
        except Exception as error:
            log.exception("request_crashed", endpoint=self.endpoint, request_id=request_id)
            await writer.send_error(to_api_error(error), self._response_headers, self)
        finally:
            writer.stop_pings()
            status = writer.status or CLIENT_CLOSED_REQUEST
            self._context.telemetry.metrics.requests.labels(self.endpoint, str(status)).inc()
            self._end_trace(status)

    async def _serve(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        context, config = self._context, self._context.config
        context.check_not_draining()
        tenant = context.tenants.authenticator.tenant_of(api_key_header(scope))
        admission = context.tenants.admission.create_admission(tenant, content_length(scope))
        await admission.draw_request_quota()
        with admission as self._admission, context.raw_body(tenant) as raw:
            self._raw = raw
            self._response_headers |= self._admission.headers()
            await read_body(scope, receive, raw, config.max_body_bytes, config.body_timeout_seconds)
            try:
                with TimeLimit(config.request_timeout_seconds) as time_limit:
                    await cancel_on_disconnect(
                        scope[INLINE_WRITER_KEY], self.answer(writer, raw, tenant)
                    )
            except TimeoutError as error:
                if not time_limit.expired:
                    raise
                message = f"the answer was not complete within {config.request_timeout_seconds:g} s"
                raise DeadlineExceeded(message) from error

    async def answer_batch_request(
        self, take_body: Callable[[], bytes], tenant: TenantId
    ) -> tuple[int, bytes]:
        """Answer a request that comes from a batch instead of a connection, with the lowest
        priority. ``take_body`` returns its body, which counts against the budget for bodies from
        then on. Returns the HTTP status and body that a client would get. Errors are not raised but
        become a response."""
        chunks: list[bytes] = []

        async def collect(message: Message) -> None:
            chunks.append(message.get("body", b""))

        writer, seconds = ResponseWriter(collect), self._context.config.request_timeout_seconds
        self._min_priority = MAX_PRIORITY_STEPS
        try:
            admission = self._context.tenants.admission.create_admission(tenant, idle=True)
            raw_body = self._context.raw_body(tenant)
            with admission as self._admission, raw_body as raw, TimeLimit(seconds):
                self._raw = raw
                raw.add(take_body())
                await self.answer(writer, raw, tenant)
        except Exception as error:
            if not isinstance(error, BatonError | ApiError | TimeoutError):
                log.exception("request_crashed", endpoint=self.endpoint)
            if isinstance(error, TimeoutError):
                error = DeadlineExceeded(f"the answer was not complete within {seconds:g} s")
            await writer.send_error(to_api_error(error), {}, self)
        self._context.telemetry.metrics.requests.labels("batches", str(writer.status)).inc()
        self._end_trace(writer.status)
        return writer.status, b"".join(chunks)

    def encode_error(self, error: ApiError) -> bytes:
        return error.json

    def encode_error_event(self, error: ApiError) -> bytes:
        return b"data: " + error.json + b"\n\n"

    def _detach(self) -> ExitStack:
        """Return a stack that now holds the request's admission, its shares of the memory budgets,
        and its trace, so that they outlast the response. The caller closes the stack when the
        request's work has ended."""
        held = ExitStack()
        held.callback(self._admission.detach())
        held.callback(self._raw.detach())
        trace, self._trace = self._trace, None
        held.callback(self._end, trace, 200)
        return held

    def _end_trace(self, status: int) -> None:
        self._end(self._trace, status)

    def _end(self, trace: RequestTrace | None, status: int) -> None:
        if trace is not None and self._context.telemetry.tracer is not None:
            self._context.telemetry.tracer.end(trace, self.endpoint, status)

    async def _parse(self, schema: type[Body], raw: RawBody, tenant: TenantId) -> Body:
        """Parse the body, free its bytes, and find the model that it names. The response's headers
        will name the fields that were ignored. Raises ApiError (400, 404)."""
        context, data = self._context, raw.take()
        max_values = max_json_values(context.models.max_model_tokens)
        self._ignored = ignored = context.ignored_fields(tenant)
        rounds_integers = self.repeats_values
        body = await context.resources.offload_executor.run(
            tenant,
            raw.size_bytes,
            lambda: parse_body(schema, data, max_values, ignored, rounds_integers=rounds_integers),
        )
        self._report_ignored_fields(tenant)
        directory = context.tenants.authenticator.directory
        self._model = context.models.find(body.model, directory.tenant(tenant))
        return body

    def _report_ignored_fields(self, tenant: TenantId, names: Iterable[str] = ()) -> None:
        """Report all ignored fields so far, and ``names``, in the response's headers and the
        log."""
        for name in names:
            self._ignored.add(name)
        self._response_headers |= self._ignored.headers()
        self._context.telemetry.ignored_fields_log.write(tenant, self._ignored.names)

    @property
    def request_id(self) -> str:
        """The ``x-baton-request-id`` of the request; empty before it has one."""
        return self._response_headers.get("x-baton-request-id", "")
