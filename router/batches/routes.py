"""/v1/files and /v1/batches, as OpenAI has them."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from baton.core.ids import TenantId
from router.batches.file_store import FileUpload
from router.batches.schema import CreateBatchBody, ExpiresAfter, paginate
from router.batches.service import BatchService
from router.errors import ApiError
from router.http.body_parser import parse_body
from router.http.multipart import MultipartParser, parse_boundary
from router.http.response_writer import content_length
from router.openai.context import RouterContext

MAX_BATCH_BODY_BYTES = 64 * 1024
"""Of the request for a batch; its lines are in a file."""

FORM_FIELDS = frozenset(
    {"purpose", "expires_after", "expires_after[anchor]", "expires_after[seconds]"}
)

CHUNK_BYTES = 256 * 1024


class ListItem(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def json(self) -> dict[str, Any]: ...


def add_batch_routes(app: FastAPI, service: RouterContext, desk: BatchService) -> None:
    _add_file_routes(app, service, desk)
    _add_batch_routes(app, service, desk)


def _add_file_routes(app: FastAPI, service: RouterContext, desk: BatchService) -> None:
    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        service.check_open()
        with _admitted_tenant(service, request) as tenant, desk.upload_turn(tenant):
            return await _upload(request, service, desk, tenant)

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        query = dict(request.query_params)
        with _admitted_tenant(service, request) as tenant:
            files = await desk.on_disk(tenant, desk.shelf(tenant).list)
        purpose = query.pop("purpose", None)
        wanted = [file for file in files if purpose in (None, file.purpose)]
        if query.pop("order", "desc") == "desc":
            wanted.reverse()
        return _list_response(wanted, query, 10_000)

    @app.get("/v1/files/{file_id}")
    async def get_file(request: Request, file_id: str) -> Response:
        with _admitted_tenant(service, request) as tenant:
            return _json((await desk.on_disk(tenant, desk.shelf(tenant).get, file_id)).json)

    @app.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        with _admitted_tenant(service, request) as tenant:
            record, file = await desk.on_disk(tenant, desk.shelf(tenant).open, file_id)
        headers = {"content-length": str(record.bytes)}
        return StreamingResponse(_chunks(file), 200, headers, "application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        with _admitted_tenant(service, request) as tenant:
            await desk.on_disk(tenant, desk.delete_file, tenant, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})


def _add_batch_routes(app: FastAPI, service: RouterContext, desk: BatchService) -> None:
    @app.post("/v1/batches")
    async def create(request: Request) -> Response:
        service.check_open()
        with _admitted_tenant(service, request) as tenant:
            body = parse_body(CreateBatchBody, await _read_small_body(request, service))
            expires = body.output_expires_after
            batch = await desk.on_disk(
                tenant,
                desk.create,
                tenant,
                body.endpoint,
                body.input_file_id,
                body.metadata,
                None if expires is None else expires.seconds,
            )
        desk.hurry()
        return _json(batch.json)

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        with _admitted_tenant(service, request) as tenant:
            batches = await desk.on_disk(tenant, desk.batches, tenant)
        return _list_response(batches, dict(request.query_params), 100)

    @app.get("/v1/batches/{batch_id}")
    async def get_batch(request: Request, batch_id: str) -> Response:
        with _admitted_tenant(service, request) as tenant:
            return _json((await desk.on_disk(tenant, desk.batch, tenant, batch_id)).json)

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        with _admitted_tenant(service, request) as tenant:
            batch = await desk.on_disk(tenant, desk.cancel, tenant, batch_id)
        desk.hurry()
        return _json(batch.json)


async def _upload(
    request: Request, service: RouterContext, desk: BatchService, tenant: TenantId
) -> Response:
    """Raises Problem. What was begun and not finished leaves nothing."""
    boundary = parse_boundary(request.headers.get("content-type"))
    told = content_length(request.scope)
    if told > desk.max_file_bytes + MAX_BATCH_BODY_BYTES:
        raise ApiError(413, f"a file has at most {desk.max_file_bytes} bytes", param="file")
    expected = max(told - MAX_BATCH_BODY_BYTES, 0)
    upload = await desk.on_disk(tenant, desk.open_upload, tenant, expected)
    try:
        form = MultipartParser(boundary, lambda _: upload)
        await _read_form(request, form, service, desk, tenant)
        expires = await desk.on_disk(tenant, _check_form, form, upload)
        seconds = None if expires is None else expires.seconds
        record = await desk.on_disk(tenant, desk.add_file, tenant, upload, form.filename, seconds)
    except BaseException:
        upload.discard()
        raise
    return _json(record.json)


async def _read_form(
    request: Request,
    form: MultipartParser,
    service: RouterContext,
    desk: BatchService,
    tenant: TenantId,
) -> None:
    """In threads: a disk may be slow. A body has ``body_seconds`` for as many bytes as one may have
    elsewhere, and so many times as long for as many times as much."""
    config = service.config
    seconds = config.body_seconds * (1 + content_length(request.scope) // config.max_body_bytes)
    try:
        async with asyncio.timeout(seconds):
            async for data in request.stream():
                if data:
                    await desk.on_disk(tenant, form.push, data)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the body ended too early") from error
    form.close()


def _check_form(form: MultipartParser, upload: FileUpload) -> ExpiresAfter | None:
    """Raises Problem (400)."""
    upload.close()
    unknown = form.fields.keys() - FORM_FIELDS
    if unknown:
        name = min(unknown)
        message = f"Unrecognized request argument supplied: {name}"
        raise ApiError(400, message, param=name, code="unknown_parameter")
    if form.fields.get("purpose") != "batch":
        given = form.fields.get("purpose")
        raise ApiError(400, f"purpose is {given!r}, and must be 'batch'", param="purpose")
    if form.filename is None:
        raise ApiError(400, "Missing required parameter: file", param="file")
    if upload.size_bytes == 0:
        raise ApiError(400, "the file is empty", param="file", code="invalid_value")
    return ExpiresAfter.of_form(form.fields)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    """And closes it, also when the client leaves."""
    with file:
        while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield data


async def _read_small_body(request: Request, service: RouterContext) -> bytes:
    """A small body of JSON. Raises Problem."""
    body = b""
    try:
        async with asyncio.timeout(service.config.body_seconds):
            async for data in request.stream():
                body += data
                if len(body) > MAX_BATCH_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {MAX_BATCH_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the body ended too early") from error
    return body


@contextmanager
def _admitted_tenant(service: RouterContext, request: Request) -> Iterator[TenantId]:
    """Who asks, with a place among the requests under way. Raises Problem (401) or Overloaded."""
    tenant = service.doorkeeper.tenant_of(request.headers.get("authorization"))
    with service.entrance.room(service.doorkeeper.roll.tenant(tenant), 1):
        yield tenant


def _list_response(items: Sequence[ListItem], query: dict[str, str], max_limit: int) -> Response:
    page, more = paginate(items, query, max_limit)
    return _json(
        {
            "object": "list",
            "data": [item.json for item in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": more,
        }
    )


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
