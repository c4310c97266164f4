"""Tests the files API over HTTP: uploads, lists, limits, and isolation of tenants."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai.types import FileObject

from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.batches.file_limits import FileLimits
from router.batches.file_store import FileStore, StoredFile
from router.errors import ApiError
from router.http.multipart import FileSink, MultipartParser, parse_boundary
from router.limits import MAX_FIELD_BYTES
from router.tenants.tenants_file import parse_tenants_file
from tests import router_harness
from tests.router_harness import wrong_error
from tests.unit.router.batch_harness import (
    COMPLETIONS,
    TENANT,
    BatchRouter,
    start_batch,
    stored_files,
    upload,
)

tokenizer = router_harness.tokenizer

# -- files ----------------------------------------------------------------------------------------


async def test_file_can_be_uploaded_listed_read_and_deleted(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with BatchRouter(tokenizer, tmp_path).open(runs=False) as client:
        data = b"\x00\r\n--not a boundary\r\n" + "ö".encode() * 300
        response = await upload(client, data)
        file = response.json()
        FileObject.model_validate(file, strict=True)
        fields = (file["bytes"], file["filename"], file["purpose"])
        assert fields == (len(data), "in.jsonl", "batch")
        assert (await client.get(f"/v1/files/{file['id']}")).json() == file
        assert (await client.get(f"/v1/files/{file['id']}/content")).content == data
        other = (await upload(client, b"{}")).json()
        listed = (await client.get("/v1/files", params={"order": "asc"})).json()
        assert {each["id"] for each in listed["data"]} == {file["id"], other["id"]}
        page = (await client.get("/v1/files", params={"limit": 1})).json()
        assert len(page["data"]) == 1 and page["has_more"]
        rest = (await client.get("/v1/files", params={"after": page["last_id"]})).json()
        assert len(rest["data"]) == 1 and not rest["has_more"]
        assert (await client.get("/v1/files", params={"purpose": "vision"})).json()["data"] == []
        gone = await client.delete(f"/v1/files/{file['id']}")
        assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
        for path in ("", "/content"):
            wrong_error(await client.get(f"/v1/files/{file['id']}{path}"), 404)
        wrong_error(await client.delete(f"/v1/files/{file['id']}"), 404)
    assert [path.suffix for path in stored_files(tmp_path)] == [".data", ".json"]


async def test_invalid_uploads_leave_no_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch_router = BatchRouter(tokenizer, tmp_path)
    async with batch_router.open(runs=False) as client:
        assert wrong_error(await upload(client, b"{}", purpose="vision"))["param"] == "purpose"
        assert wrong_error(await upload(client, b"{}", mood="x"))["param"] == "mood"
        assert wrong_error(await upload(client, b""))["param"] == "file"
        wrong_error(await upload(client, b"x" * 10_001), 413)
        wrong_error(await upload(client, b"x" * 200_000), 413)
        none = await client.post("/v1/files", files={"purpose": (None, "batch")})
        assert wrong_error(none)["param"] == "file"
        wrong_error(await client.post("/v1/files", json={}), 415)
        bad = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
        assert wrong_error(await upload(client, b"{}", **bad))["param"] == "seconds"
        for content in (b"", b"--b", b"--b\r\n\r\n", b"--b\r\nx: y\r\n\r\nz\r\n--b--"):
            headers = {"content-type": "multipart/form-data; boundary=b"}
            answer = await client.post("/v1/files", content=content, headers=headers)
            assert wrong_error(answer)["code"] == "invalid_form"
        for query in ({"limit": 0}, {"limit": "x"}, {"after": "file-0"}, {"mood": 1}):
            wrong_error(await client.get("/v1/files", params=query))
    assert stored_files(tmp_path) == []
    assert batch_router.router.service.tenants.request_limiter.num_in_use == 0


def form(headers: str) -> bytes:
    return f"--b\r\n{headers}\r\n\r\nx\r\n--b--".encode()


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (f"x: {'y' * MAX_FIELD_BYTES}", "a part's headers have more than 4096 bytes"),
        (
            'content-disposition: form-data; name="file"; filename="' + "é" * 256 + '"',
            "the file's name has more than 255 characters",
        ),
    ],
)
def test_long_headers_are_refused_however_they_arrive(headers: str, message: str) -> None:
    for size in (1, 4096, 10_000):
        files: list[str] = []

        def open_file(name: str, files: list[str] = files) -> FileSink:
            files.append(name)
            raise AssertionError("the file must not be opened")

        parser = MultipartParser(b"b", open_file)
        data = form(headers)
        with pytest.raises(ApiError, match=f"the form is malformed: {message}"):
            for start in range(0, len(data), size):
                parser.push(data[start : start + size])
        assert files == []


async def test_unusable_folder_fails_only_the_files_api(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The files API answers 503 or an empty list; the rest of the router keeps working."""
    root = tmp_path / "file"
    root.touch()
    async with BatchRouter(tokenizer, root).open() as client:
        assert "can't store files" in wrong_error(await upload(client, b"{}"), 503)["message"]
        assert (await client.get("/v1/files")).json()["data"] == []
        assert (await client.get("/v1/models")).status_code == 200


async def test_full_folder_rejects_large_uploads(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch_router = BatchRouter(tokenizer, tmp_path, folder_bytes=1000)
    async with batch_router.open(runs=False) as client:
        assert (await upload(client, b"x" * 600)).status_code == 200
        wrong_error(await upload(client, b"x" * 600), 413)
        assert (await upload(client, b"x" * 10)).status_code == 200
        assert len((await client.get("/v1/files")).json()["data"]) == 2


async def test_concurrent_uploads_share_the_free_space(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Each upload reserves its space before anything is written."""
    limits = FileLimits(concurrent_uploads=20)
    batch_router = BatchRouter(tokenizer, tmp_path, folder_bytes=20_000, file_limits=limits)
    async with batch_router.open(runs=False) as client:
        answers = await asyncio.gather(*(upload(client, b"x" * 3000) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200, 413}
        refused = next(answer for answer in answers if answer.status_code == 413)
        assert wrong_error(refused, 413)["code"] == "no_space"
    assert 3000 < sum(path.stat().st_size for path in stored_files(tmp_path)) <= 20_000
    assert all(path.suffix != ".part" for path in stored_files(tmp_path))


def test_files_are_moved_while_nobody_adds_up_their_sizes(tmp_path: Path) -> None:
    """A scan that has passed the new name, and does not find the old one any more, would miss a
    file. So the limits could be exceeded by what was moved meanwhile."""
    steps: list[tuple[str, bool]] = []
    data = tmp_path / "1.part"
    data.write_bytes(b"x")

    @contextmanager
    def lock() -> Iterator[None]:
        steps.append(("locked", data.exists()))
        yield
        steps.append(("released", files.data_path("file-1").exists()))

    files = FileStore(tmp_path, lock)
    files.add(StoredFile("file-1", 1, 0, "x", "batch"), data)
    assert steps == [("locked", True), ("released", True)]
    assert files.get("file-1").bytes == 1 and not data.exists()


def test_upload_space_is_reserved_before_it_is_used(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch_router = BatchRouter(tokenizer, tmp_path, folder_bytes=20_000, max_file_bytes=15_000)
    first = batch_router.service.open_upload(TENANT, 8000)
    second = batch_router.service.open_upload(TenantId("bob"), 8000)
    with pytest.raises(ApiError, match="only 4000 bytes are free"):
        batch_router.service.open_upload(TENANT, 8000)
    first.write(b"x" * 9000)
    with pytest.raises(ApiError, match="only 8000 bytes are free"):
        second.write(b"x" * 10_000)
    first.close()
    assert batch_router.store.used_bytes() == 17_000
    second.discard()
    assert batch_router.store.used_bytes() == batch_router.store.used_bytes(TENANT) == 9000


async def test_tenants_number_and_total_size_of_files_are_limited(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    limits = FileLimits(files=3, file_bytes=8000)
    keys = {"sk-a": "alice", "sk-b": "bob"}
    batch_router = BatchRouter(tokenizer, tmp_path, file_limits=limits, api_keys=keys)
    async with batch_router.open(runs=False) as client:
        client.headers["authorization"] = "Bearer sk-a"
        first = (await upload(client, b"x" * 3000)).json()
        error = wrong_error(await upload(client, b"x" * 6000), 413)
        assert error["code"] == "no_space" and "may have 8000 bytes in total" in error["message"]
        for _ in range(2):
            assert (await upload(client, b"x")).status_code == 200
        error = wrong_error(await upload(client, b"x"), 413)
        assert error["code"] == "too_many_files" and "there are already 3 files" in error["message"]
        client.headers["authorization"] = "Bearer sk-b"
        assert (await upload(client, b"x" * 6000)).status_code == 200
        client.headers["authorization"] = "Bearer sk-a"
        await client.delete(f"/v1/files/{first['id']}")
        assert (await upload(client, b"x" * 6000)).status_code == 200


async def test_tenants_upload_rate_and_concurrency_are_limited(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    limits = FileLimits(uploads_per_minute=3, concurrent_uploads=1)
    keys = {"sk-a": "alice", "sk-b": "bob"}
    batch_router = BatchRouter(tokenizer, tmp_path, file_limits=limits, api_keys=keys)
    async with batch_router.open(runs=False) as client:
        client.headers["authorization"] = "Bearer sk-a"
        with batch_router.service.admit_upload(TENANT):
            refused = await upload(client, b"x")
            assert "concurrent uploads: limit 1" in wrong_error(refused, 429)["message"]
        assert [(await upload(client, b"x")).status_code for _ in range(2)] == [200, 200]
        refused = await upload(client, b"x")
        error = wrong_error(refused, 429)
        assert error["code"] == "rate_limit_exceeded"
        assert "uploads per minute: limit 3" in error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        client.headers["authorization"] = "Bearer sk-b"
        assert (await upload(client, b"x")).status_code == 200
    assert batch_router.router.service.tenants.request_limiter.num_in_use == 0


def test_file_limits_come_from_the_tenants_file() -> None:
    text = b"""
defaults: {limits: {file_bytes: 5000}}
tenants:
  alice: {limits: {files: 7, uploads_per_minute: 8, concurrent_uploads: 9}}
  bob: {}
"""
    directory = parse_tenants_file(text)
    settings = FileLimits(1, 2, 3, 4)
    assert settings.with_tenant_limits(directory.tenant(TENANT)) == FileLimits(7, 5000, 8, 9)
    assert settings.with_tenant_limits(directory.tenant(TenantId("bob"))) == FileLimits(
        1, 5000, 3, 4
    )
    assert settings.with_tenant_limits(directory.tenant(TenantId("carol"))) == settings


async def test_tenants_can_not_see_each_others_files_and_batches(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    batch_router = BatchRouter(tokenizer, tmp_path, api_keys={"sk-a": "alice", "sk-b": "../bob"})
    async with batch_router.open(runs=False) as client:
        wrong_error(await client.get("/v1/files"), 401)
        client.headers["authorization"] = "Bearer sk-a"
        file = (await upload(client, b"{}")).json()
        batch = await start_batch(client, b"{}\n")
        client.headers["authorization"] = "Bearer sk-b"
        assert (await client.get("/v1/files")).json()["data"] == []
        assert (await client.get("/v1/batches")).json()["data"] == []
        wrong_error(await client.get(f"/v1/files/{file['id']}"), 404)
        wrong_error(await client.delete(f"/v1/files/{file['id']}"), 404)
        wrong_error(await client.get(f"/v1/batches/{batch['id']}"), 404)
        wrong_error(await client.post(f"/v1/batches/{batch['id']}/cancel"), 404)
        body = {"endpoint": COMPLETIONS, "completion_window": "24h"}
        taken = await client.post("/v1/batches", json={**body, "input_file_id": file["id"]})
        wrong_error(taken, 404)
    assert all(
        path.parts[-3].isalnum() and len(path.parts[-3]) == 32 for path in stored_files(tmp_path)
    )


async def test_expired_files_are_deleted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch_router = BatchRouter(tokenizer, tmp_path)
    async with batch_router.open(runs=False) as client:
        hour = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await upload(client, b"{}", **hour)).json()
        stays = (await upload(client, b"{}")).json()
        assert file["expires_at"] == file["created_at"] + 3600
        batch_router.store.delete_expired(file["expires_at"] - 1)
        assert len((await client.get("/v1/files")).json()["data"]) == 2
        batch_router.store.delete_expired(file["expires_at"])
        assert [f["id"] for f in (await client.get("/v1/files")).json()["data"]] == [stays["id"]]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_multipart_form_can_arrive_in_pieces(size: int) -> None:
    body = (
        b'preamble\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
        b"Content-Type: text/plain\r\n\r\n{}\r\n-\r\n--\r\n--c\r\n--b--\r\nepilogue"
    )
    written: list[bytes] = []

    class Keep:
        def write(self, data: bytes) -> None:
            written.append(data)

    form = MultipartParser(b"b", lambda _: Keep())
    for position in range(0, len(body), size):
        form.push(body[position : position + size])
    form.close()
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "a.jsonl")
    assert b"".join(written) == b"{}\r\n-\r\n--\r\n--c"


def test_multipart_forms_are_bounded() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n'
    for body in (part + b"y" * 5000, b"--b\r\n" + b"y" * 5000, (part + b"y\r\n") * 17, b"--bxx"):
        with pytest.raises(ApiError):
            MultipartParser(b"b", lambda _: pytest.fail()).push(body)
    with pytest.raises(ApiError):
        parse_boundary("multipart/form-data; boundary=" + "x" * 71)
