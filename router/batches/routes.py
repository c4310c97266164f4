"""The routes of ``/v1/files`` and ``/v1/batches``, as in OpenAI's API."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from baton.core.ids import TenantId
from router.batches.file_store import FileStore, FileUpload
from router.batches.schema import CreateBatchBody, ExpiresAfter
from router.batches.service import BatchService
from router.errors import ApiError
from router.http.body_parser import parse_body
from router.http.held_response import HeldResponse
from router.http.item_list import list_page
from router.http.multipart import MultipartParser, parse_boundary
from router.http.response_writer import content_length
from router.limits import MAX_BATCH_BODY_BYTES
from router.serving.context import RouterContext

FORM_FIELDS = frozenset(
    {"purpose", "expires_after", "expires_after[anchor]", "expires_after[seconds]"}
)

CHUNK_BYTES = 256 * 1024


def add_batch_routes(app: FastAPI, context: RouterContext, service: BatchService) -> None:
    _add_file_routes(app, context, service)
    _add_batch_routes(app, context, service)


def _add_file_routes(app: FastAPI, context: RouterContext, service: BatchService) -> None:
    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        context.check_not_draining()
        with _admitted_tenant(context, request) as tenant, service.admit_upload(tenant):
            return await _upload(request, context, service, tenant)

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        query = dict(request.query_params)
        with _admitted_tenant(context, request) as tenant, context.stored_bytes(tenant) as memory:
            # In the thread, since a page may have 10,000 files.
            data = await service.run_in_thread(
                tenant, _encode_file_list, service.file_store(tenant), query
            )
            memory.require(len(data))
            return HeldResponse(data, memory.detach())

    @app.get("/v1/files/{file_id}")
    async def get_file(request: Request, file_id: str) -> Response:
        with _admitted_tenant(context, request) as tenant:
            return _json(
                (await service.run_in_thread(tenant, service.file_store(tenant).get, file_id)).json
            )

    @app.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        with _admitted_tenant(context, request) as tenant, ExitStack() as held:
            held.callback(service.begin_download(tenant))
            record, file = await service.run_in_thread(
                tenant, service.file_store(tenant).open, file_id
            )
            held.enter_context(file)
            return _Download(file, record.bytes, held.pop_all().close)

    @app.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        with _admitted_tenant(context, request) as tenant:
            await service.run_in_thread(tenant, service.delete_file, tenant, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})


def _add_batch_routes(app: FastAPI, context: RouterContext, service: BatchService) -> None:
    @app.post("/v1/batches")
    async def create(request: Request) -> Response:
        context.check_not_draining()
        with _admitted_tenant(context, request) as tenant:
            ignored = context.ignored_fields(tenant)
            data = await _read_small_body(request, context)
            body = parse_body(CreateBatchBody, data, ignored=ignored)
            expires = body.output_expires_after
            batch = await service.run_in_thread(
                tenant,
                service.create,
                tenant,
                body.endpoint,
                body.input_file_id,
                body.metadata,
                None if expires is None else expires.seconds,
            )
        service.notify_runner()
        context.telemetry.ignored_fields_log.write(tenant, ignored.names)
        response = _json(batch.json)
        response.headers.update(ignored.headers())
        return response

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        with _admitted_tenant(context, request) as tenant:
            batches = await service.run_in_thread(tenant, service.list_batches, tenant)
        return _json(list_page(batches, dict(request.query_params), 100))

    @app.get("/v1/batches/{batch_id}")
    async def get_batch(request: Request, batch_id: str) -> Response:
        with _admitted_tenant(context, request) as tenant:
            return _json(
                (await service.run_in_thread(tenant, service.get_batch, tenant, batch_id)).json
            )

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        with _admitted_tenant(context, request) as tenant:
            batch = await service.run_in_thread(tenant, service.cancel, tenant, batch_id)
        service.notify_runner()
        return _json(batch.json)


async def _upload(
    request: Request, context: RouterContext, service: BatchService, tenant: TenantId
) -> Response:
    """Receive a file. An upload that fails leaves nothing on disk. Raises ApiError."""
    boundary = parse_boundary(request.headers.get("content-type"))
    content_bytes = content_length(request.scope)
    if content_bytes > service.max_file_bytes + MAX_BATCH_BODY_BYTES:
        message = f"the file is too large; it may have at most {service.max_file_bytes} bytes"
        raise ApiError(413, message, param="file")
    expected = max(content_bytes - MAX_BATCH_BODY_BYTES, 0)
    upload = await service.run_in_thread(tenant, service.open_upload, tenant, expected)
    try:
        form = MultipartParser(boundary, lambda _: upload)
        await _read_form(request, form, context, service, tenant)
        expires = await service.run_in_thread(tenant, _check_form, form, upload)
        seconds = None if expires is None else expires.seconds
        record = await service.run_in_thread(
            tenant, service.add_file, tenant, upload, form.filename, seconds
        )
    except BaseException:
        upload.discard()
        raise
    return _json(record.json)


async def _read_form(
    request: Request,
    form: MultipartParser,
    context: RouterContext,
    service: BatchService,
    tenant: TenantId,
) -> None:
    """Parse the form in threads, since the file in it is written to a disk, which may be slow. The
    time limit is ``body_timeout_seconds`` for each ``max_body_bytes`` of the form."""
    config = context.config
    seconds = config.body_timeout_seconds * (
        1 + content_length(request.scope) // config.max_body_bytes
    )
    try:
        async with asyncio.timeout(seconds):
            async for data in request.stream():
                if data:
                    await service.run_in_thread(tenant, form.push, data)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client disconnected before it had sent the whole body") from error
    form.close()


def _check_form(form: MultipartParser, upload: FileUpload) -> ExpiresAfter | None:
    """Check the form fields and the uploaded file. Return for how long to keep the file, or None if
    the form does not say. Raises ApiError (400)."""
    upload.close()
    unknown = form.fields.keys() - FORM_FIELDS
    if unknown:
        name = min(unknown)
        message = f"Unrecognized request argument supplied: {name}"
        raise ApiError(400, message, param=name, code="unknown_parameter")
    if form.fields.get("purpose") != "batch":
        given = form.fields.get("purpose")
        raise ApiError(400, f"purpose is {given!r}; it must be 'batch'", param="purpose")
    if form.filename is None:
        raise ApiError(400, "Missing required parameter: file", param="file")
    if upload.size_bytes == 0:
        raise ApiError(400, "the file is empty", param="file", code="invalid_value")
    return ExpiresAfter.of_form(form.fields)


class _Download(StreamingResponse):
    """Sends a file. ``end`` is called at its end, or when the client disconnects."""

    def __init__(self, file: BinaryIO, size_bytes: int, end: Callable[[], None]) -> None:
        headers = {"content-length": str(size_bytes)}
        super().__init__(_chunks(file), 200, headers, "application/octet-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield data


async def _read_small_body(request: Request, context: RouterContext) -> bytes:
    """Read a small JSON body. Raises ApiError."""
    body = b""
    try:
        async with asyncio.timeout(context.config.body_timeout_seconds):
            async for data in request.stream():
                body += data
                if len(body) > MAX_BATCH_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {MAX_BATCH_BODY_BYTES} bytes")
    except TimeoutError as error:
        seconds = context.config.body_timeout_seconds
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client disconnected before it had sent the whole body") from error
    return body


@contextmanager
def _admitted_tenant(context: RouterContext, request: Request) -> Iterator[TenantId]:
    """Authenticate the client, and hold a slot of the request limiter during the ``with`` block.
    Raises ApiError (401) or Overloaded."""
    tenants = context.tenants
    tenant = tenants.authenticator.tenant_of(request.headers.get("authorization"))
    with tenants.admission.hold_slots(tenants.authenticator.directory.tenant(tenant), 1):
        yield tenant


def _encode_file_list(store: FileStore, query: dict[str, str]) -> bytes:
    """Return the JSON of the page of files that the query parameters select. Raises ApiError
    (400)."""
    purpose = query.pop("purpose", None)
    wanted = [file for file in store.list_files() if purpose in (None, file.purpose)]
    if query.pop("order", "desc") == "desc":
        wanted.reverse()
    return orjson.dumps(list_page(wanted, query, 10_000))


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
