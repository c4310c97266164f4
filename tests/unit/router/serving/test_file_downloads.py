"""Tests that downloads of files are limited while their clients read them, however slowly."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton.core.ids import TenantId
from baton.errors import Overloaded
from baton.text.tokenizer import Tokenizer
from router.batches.file_limits import DownloadAdmission
from router.limits import MAX_TENANT_DOWNLOADS
from router.serving import memory_budgets as stored_bytes
from router.serving.memory_budgets import StoredBytesBudget
from tests import router_harness
from tests.router_harness import wrong_error
from tests.unit.router.batch_harness import BatchRouter, upload

tokenizer = router_harness.tokenizer

A, B = TenantId("a"), TenantId("b")
DATA = bytes(4 * 2**20)
"""More than fits into the buffers of a connection."""


def test_downloads_are_limited_for_a_tenant_and_in_total() -> None:
    admission = DownloadAdmission(limit=3, tenant_limit=2)

    def begin(tenant: TenantId) -> Callable[[], None]:
        return admission.begin(tenant, 1.0, shared=False)

    ends = [begin(A), begin(A)]
    with pytest.raises(Overloaded, match="tenant a has 2 downloads under way"):
        begin(A)
    ends.append(begin(B))
    with pytest.raises(Overloaded, match="downloads"):
        begin(B)
    assert admission.num_in_use == 3
    ends.pop()()
    ends.pop()()
    assert admission.num_in_use == 1
    ends.append(begin(A))
    for end in ends:
        end()
    assert admission.num_in_use == 0


async def test_slow_downloads_are_limited(tokenizer: Tokenizer, tmp_path: Path) -> None:
    router = BatchRouter(tokenizer, tmp_path, max_file_bytes=2**23, folder_bytes=2**26)
    async with router.open(runs=False) as client:
        file_id = (await upload(client, DATA)).json()["id"]
        path = f"/v1/files/{file_id}/content"
        async with AsyncExitStack() as slow:
            downloads = [
                await slow.enter_async_context(client.stream("GET", path))
                for _ in range(MAX_TENANT_DOWNLOADS)
            ]
            assert [download.status_code for download in downloads] == [200] * MAX_TENANT_DOWNLOADS
            refused = await client.get(path)
            assert "8 downloads under way" in wrong_error(refused, 429)["message"]
            assert refused.headers["retry-after"] == "1"
            assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
            data = b"".join([part async for part in downloads[0].aiter_bytes()])
            assert data == DATA, "a file that is deleted meanwhile is read to its end"
            assert router.service.num_downloads <= MAX_TENANT_DOWNLOADS
        await until(lambda: router.service.num_downloads == 0)
        wrong_error(await client.get(path), 404)
        assert router.service.num_downloads == 0


async def test_lists_of_files_count_until_they_are_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_bytes, "UNMETERED_BYTES", 0)
    router = BatchRouter(tokenizer, tmp_path)
    async with router.open(runs=False) as client:
        await upload(client, b"{}")
        resources = router.router.service.resources
        resources.stored_bytes = StoredBytesBudget(100)
        refused = wrong_error(await client.get("/v1/files"), 429)
        assert "lists of files" in refused["message"]
        resources.stored_bytes = StoredBytesBudget(10_000)
        assert len((await client.get("/v1/files")).json()["data"]) == 1
        await until(lambda: resources.stored_bytes.num_in_use == 0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0)
