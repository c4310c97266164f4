"""Fuzzes a router over in-memory workers with valid and broken bodies for chats, completions,
/tokenize, /detokenize, files and batches. No response may be a server error, and neither requests
nor memory may leak."""

import asyncio
import gzip
import json
import tempfile
from pathlib import Path

import httpx
import numpy as np

from baton.clock import SystemClock
from baton.text.tokenizer import Tokenizer
from router.batches.file_limits import FileLimits
from tests.fuzz.json_maker import COMPLETE, JsonMaker
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder
from tests.router_harness import RouterHarness, write_tokenizer

NAME = "json"
CLOCK = SystemClock()
JSON = {"content-type": "application/json"}
COMPRESSED = 0.1
"""The fraction of bodies that are compressed."""

UPLOADS = 0.15
"""The fraction of cases that are uploads."""

FILE_BYTES = 100_000
FOLDER_BYTES = 2**20
LIMITS = FileLimits(uploads_per_minute=10**9)
CASES_UNTIL_CHECK = 100


def fuzz(seconds: float, seed: int) -> FuzzResult:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        return runner.run(_Fuzz(Path(folder), seed).run(seconds))


class _Fuzz:
    def __init__(self, folder: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._chance = rng.random
        self._maker = JsonMaker(rng)
        self._recorder = Recorder(NAME, seed)
        tokenizer = Tokenizer.load(write_tokenizer(folder))
        self._router = RouterHarness(tokenizer, "Hello, wörld!", automatic=True)
        self._batch_service = self._router.make_batch_service(
            folder / "batches",
            max_file_bytes=FILE_BYTES,
            folder_bytes=FOLDER_BYTES,
            file_limits=LIMITS,
        )

    async def run(self, seconds: float) -> FuzzResult:
        until, number = CLOCK.monotonic() + seconds, 0
        batches = asyncio.create_task(self._batch_service.run())
        async with await self._router.client() as client:
            while CLOCK.monotonic() < until:
                await self._case(client)
                number += 1
                if batches.done():
                    self._recorder.crash(f"the batch runner stopped: {batches.exception()!r}")
                    break
                if number % CASES_UNTIL_CHECK == 0:
                    self._check_what_is_left()
                    await self._clear(client)
        batches.cancel()
        await asyncio.wait([batches])
        return self._recorder.result()

    async def _case(self, client: httpx.AsyncClient) -> None:
        if self._chance() < UPLOADS:
            headers, data = self._maker.form()
            answer = await self._ask(client, "/v1/files", data, headers)
            if answer is not None and answer.status_code == 200:
                await self._start(client, answer.json()["id"])
            return
        path, data = self._maker.request()
        if self._chance() < COMPRESSED:
            packed = gzip.compress(data, 1)
            data = self._maker.broken(packed) if self._chance() < 0.3 else packed
            await self._ask(client, path, data, JSON | {"content-encoding": "gzip"})
        else:
            await self._ask(client, path, data, JSON)

    async def _start(self, client: httpx.AsyncClient, file_id: str) -> None:
        body = {"input_file_id": file_id, "endpoint": COMPLETE, "completion_window": "24h"}
        await self._ask(client, "/v1/batches", json.dumps(body).encode(), JSON)

    async def _ask(
        self, client: httpx.AsyncClient, path: str, data: bytes, headers: dict[str, str]
    ) -> httpx.Response | None:
        self._recorder.begin(f"{path} {headers} {data!r}")
        try:
            async with asyncio.timeout(HANG_SECONDS):
                answer = await client.post(path, content=data, headers=headers)
        except TimeoutError:
            self._recorder.hang("no answer")
            return None
        # Any exception that escapes from the router is a bug.
        except Exception as error:
            self._recorder.crash(repr(error))
            return None
        if answer.status_code >= 500 or b'"internal error"' in answer.content:
            self._recorder.server_error(f"{answer.status_code} {answer.text[:500]}")
        elif answer.status_code >= 400 and not answer.json()["error"]["message"]:
            self._recorder.crash("an error response without a message")
        return answer

    def _check_what_is_left(self) -> None:
        """Check that no requests are still being served, except for the lines of batches."""
        tenants, resources = self._router.service.tenants, self._router.service.resources
        is_batch_running = self._batch_service._runner.num_running > 0
        inside = 0 if is_batch_running else tenants.request_limiter.num_in_use
        if inside or resources.body_budget.num_bytes or resources.offload_executor.num_waiting:
            self._recorder.crash(
                f"{inside} requests and {resources.body_budget.num_bytes} bytes are left"
            )

    async def _clear(self, client: httpx.AsyncClient) -> None:
        """Delete all files, so that more can be uploaded."""
        for file in (await client.get("/v1/files")).json()["data"]:
            await client.delete(f"/v1/files/{file['id']}")
