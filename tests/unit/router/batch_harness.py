"""Helpers for tests of the files and batch APIs: a router with in-memory implementations, its
client, and functions that create files and batches without HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from openai.types import Batch as OpenAIBatch

from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.app import build_app
from router.batches.batch import TERMINAL_STATUSES, Batch
from router.batches.batch_store import BatchStore
from router.batches.file_store import StoredFile
from tests.http_transport import HttpServerTransport
from tests.router_harness import RouterHarness

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TENANT = TenantId("alice")
LIMIT_SETTINGS = ("folder_bytes", "max_file_bytes", "file_limits")


def batch_line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = body or {"prompt": "x", "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


class BatchRouter:
    """A router with the batch API, and its client."""

    def __init__(self, tokenizer: Tokenizer, root: Path, **settings: Any) -> None:
        bounds = {name: settings.pop(name) for name in LIMIT_SETTINGS if name in settings}
        self.router = RouterHarness(tokenizer, "Hello", automatic=True, **settings)
        self.store = BatchStore(root)
        self.service = self.router.make_batch_service(root, **bounds)

    @asynccontextmanager
    async def open(self, runs: bool = True) -> AsyncIterator[httpx.AsyncClient]:
        await self.router.service.cluster.refresh()
        transport = HttpServerTransport(build_app(self.router.service, self.service))
        running = asyncio.create_task(self.service.run()) if runs else None
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
        if running is not None:
            running.cancel()
            await asyncio.wait([running])


async def upload(client: httpx.AsyncClient, data: bytes, **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return await client.post("/v1/files", files={"file": ("in.jsonl", data)}, data=form)


async def start_batch(client: httpx.AsyncClient, data: bytes, **fields: Any) -> dict[str, Any]:
    file = (await upload(client, data)).json()
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    response = await client.post("/v1/batches", json={**body, **fields})
    assert response.status_code == 200, response.text
    OpenAIBatch.model_validate(response.json(), strict=True)
    batch: dict[str, Any] = response.json()
    return batch


async def wait_until_finished(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            now: dict[str, Any] = (await client.get(f"/v1/batches/{batch['id']}")).json()
            OpenAIBatch.model_validate(now, strict=True)
            if now["status"] in TERMINAL_STATUSES:
                return now
            await asyncio.sleep(0.005)


async def read_lines(client: httpx.AsyncClient, file_id: str) -> list[Any]:
    content = (await client.get(f"/v1/files/{file_id}/content")).content
    return [json.loads(each) for each in content.splitlines()]


def stored_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/files/*"))


def make_batch(store: BatchStore, number: int, *lines: Any, tenant: TenantId = TENANT) -> Batch:
    file_id = make_file(store, number, jsonl(*lines), tenant)
    batch = Batch(f"batch_{number}", tenant, COMPLETIONS, file_id, 1_000_000 + number)
    store.create(batch)
    return batch


def make_file(store: BatchStore, number: int, data: bytes, tenant: TenantId = TENANT) -> str:
    files = store.file_store(tenant)
    part = files.upload(str(number), 10**6, 0, lambda path, least, wanted: wanted)
    part.write(data)
    part.close()
    files.add(StoredFile(f"file-{number}", len(data), 0, "x", "batch"), part.path)
    return f"file-{number}"
