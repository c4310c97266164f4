"""/v1/files and /v1/batches, as OpenAI has them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, BinaryIO, Protocol, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from baton.core.ids import TenantId
from router.batches.bodies import BatchBody, ExpiresAfter, page_of
from router.batches.desk import Desk
from router.batches.shelf import Upload
from router.multipart import FormReader, boundary_of
from router.parse import parse
from router.problem import Problem
from router.service import Service
from router.wire import declared_size

MAX_BATCH_BODY_BYTES = 64 * 1024
"""Of the request for a batch; its lines are in a file."""

FORM_FIELDS = frozenset(
    {"purpose", "expires_after", "expires_after[anchor]", "expires_after[seconds]"}
)

CHUNK_BYTES = 256 * 1024

Result = TypeVar("Result")


class Listed(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def json(self) -> dict[str, Any]: ...


def add_batches(app: FastAPI, service: Service, desk: Desk) -> None:
    _add_files(app, service, desk)
    _add_batches(app, service, desk)


def _add_files(app: FastAPI, service: Service, desk: Desk) -> None:
    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        tenant = _tenant(service, request)
        service.check_open()
        with service.entrance.room(service.doorkeeper.roll.tenant(tenant), 1):
            return await _upload(request, service, desk, tenant)

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        shelf = desk.shelf(_tenant(service, request))
        query = dict(request.query_params)
        files = await _on_disk(shelf.list)
        purpose = query.pop("purpose", None)
        wanted = [file for file in files if purpose in (None, file.purpose)]
        if query.pop("order", "desc") == "desc":
            wanted.reverse()
        return _page(wanted, query, 10_000)

    @app.get("/v1/files/{file_id}")
    async def get_file(request: Request, file_id: str) -> Response:
        shelf = desk.shelf(_tenant(service, request))
        return _json((await _on_disk(shelf.get, file_id)).json)

    @app.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        shelf = desk.shelf(_tenant(service, request))
        record, file = await _on_disk(shelf.open, file_id)
        headers = {"content-length": str(record.bytes)}
        return StreamingResponse(_chunks(file), 200, headers, "application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        await _on_disk(desk.delete_file, _tenant(service, request), file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})


def _add_batches(app: FastAPI, service: Service, desk: Desk) -> None:
    @app.post("/v1/batches")
    async def create(request: Request) -> Response:
        tenant = _tenant(service, request)
        service.check_open()
        body = parse(BatchBody, await _read(request, service))
        expires = body.output_expires_after
        batch = await _on_disk(
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
        batches = await _on_disk(desk.batches, _tenant(service, request))
        return _page(batches, dict(request.query_params), 100)

    @app.get("/v1/batches/{batch_id}")
    async def get_batch(request: Request, batch_id: str) -> Response:
        tenant = _tenant(service, request)
        return _json((await _on_disk(desk.batch, tenant, batch_id)).json)

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        batch = await _on_disk(desk.cancel, _tenant(service, request), batch_id)
        desk.hurry()
        return _json(batch.json)


async def _on_disk(call: Callable[..., Result], *arguments: Any) -> Result:
    """In a thread. Raises Problem (503) where the operator's folder is full, or none."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except OSError as error:
        message = f"files can't be kept by this router: {error.strerror}"
        raise Problem(503, message, kind="service_unavailable_error", code="no_folder") from error


async def _upload(request: Request, service: Service, desk: Desk, tenant: TenantId) -> Response:
    """Raises Problem. What was begun and not finished leaves nothing."""
    boundary = boundary_of(request.headers.get("content-type"))
    if declared_size(request.scope) > desk.max_file_bytes + MAX_BATCH_BODY_BYTES:
        raise Problem(413, f"a file has at most {desk.max_file_bytes} bytes", param="file")
    upload = await _on_disk(desk.open_upload, tenant)
    try:
        form = FormReader(boundary, lambda _: upload)
        await _read_form(request, form, service)
        expires = _check_form(form, upload)
        seconds = None if expires is None else expires.seconds
        record = await _on_disk(desk.add_file, tenant, upload, form.filename, seconds)
    except BaseException:
        upload.discard()
        raise
    return _json(record.json)


async def _read_form(request: Request, form: FormReader, service: Service) -> None:
    """In threads: a disk may be slow. A body has ``body_seconds`` for as many bytes as one may have
    elsewhere, and so many times as long for as many times as much."""
    config = service.config
    seconds = config.body_seconds * (1 + declared_size(request.scope) // config.max_body_bytes)
    try:
        async with asyncio.timeout(seconds):
            async for data in request.stream():
                if data:
                    await _on_disk(form.push, data)
    except TimeoutError as error:
        raise Problem(408, f"the body did not arrive within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise Problem(400, "the body ended too early") from error
    form.close()


def _check_form(form: FormReader, upload: Upload) -> ExpiresAfter | None:
    """Raises Problem (400)."""
    upload.close()
    unknown = form.fields.keys() - FORM_FIELDS
    if unknown:
        name = min(unknown)
        message = f"Unrecognized request argument supplied: {name}"
        raise Problem(400, message, param=name, code="unknown_parameter")
    if form.fields.get("purpose") != "batch":
        given = form.fields.get("purpose")
        raise Problem(400, f"purpose is {given!r}, and must be 'batch'", param="purpose")
    if form.filename is None:
        raise Problem(400, "Missing required parameter: file", param="file")
    if upload.size_bytes == 0:
        raise Problem(400, "the file is empty", param="file", code="invalid_value")
    return ExpiresAfter.of_form(form.fields)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    """And closes it, also when the client leaves."""
    with file:
        while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield data


async def _read(request: Request, service: Service) -> bytes:
    """A small body of JSON. Raises Problem."""
    body = b""
    try:
        async with asyncio.timeout(service.config.body_seconds):
            async for data in request.stream():
                body += data
                if len(body) > MAX_BATCH_BODY_BYTES:
                    raise Problem(413, f"the body has more than {MAX_BATCH_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise Problem(408, "the body did not arrive in time") from error
    except ClientDisconnect as error:
        raise Problem(400, "the body ended too early") from error
    return body


def _tenant(service: Service, request: Request) -> TenantId:
    return service.doorkeeper.tenant_of(request.headers.get("authorization"))


def _page(items: Sequence[Listed], query: dict[str, str], max_limit: int) -> Response:
    page, more = page_of(items, query, max_limit)
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
