"""Fuzzes batch files with valid lines, invalid lines and random bytes. In some cases, the
processing of a file is first interrupted as if the router had been killed.

The batch runner processes each file completely, and parses the request bodies like the router.
Every line must have a result in the output file or in the error file.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from baton.clock import ManualClock
from baton.core.ids import TenantId
from router.batches.batch import Batch
from router.batches.batch_job import BatchJob
from router.batches.batch_request import BatchResponse
from router.batches.batch_runner import BatchRunner
from router.batches.batch_store import BatchStore
from router.batches.file_store import StoredFile
from router.errors import ApiError
from router.http.body_parser import parse_body
from router.openai.schema import ChatBody, CompletionBody
from tests.fuzz.result import HANG_SECONDS, FuzzResult, Recorder

NAME = "batch-files"

TENANT = TenantId("mallory")
ENDPOINTS: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}
MAX_LINE_BYTES = 20_000
NOW = 1_000_000.0

FIELDS = ("custom_id", "method", "url", "body", "x")

Chance = np.random.Generator


def fuzz(seconds: float, seed: int) -> FuzzResult:
    return asyncio.run(_fuzz(seconds, seed))


async def _fuzz(seconds: float, seed: int) -> FuzzResult:
    chance, recorder = np.random.default_rng(seed), Recorder(NAME, seed)
    until, number = monotonic() + seconds, 0
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as folder:
        store = BatchStore(Path(folder))
        while monotonic() < until:
            number += 1
            endpoint = list(ENDPOINTS)[chance.integers(2)]
            data = make(chance, endpoint)
            recorder.begin(repr(data))
            batch = _create_batch(store, number, data, endpoint)
            try:
                for _ in range(int(chance.integers(3))):
                    _abandon_lines(store, batch, int(chance.integers(1, 4)))
                async with asyncio.timeout(HANG_SECONDS):
                    statuses = await _run(store, batch, chance)
                if statuses.completed + statuses.failed != statuses.total or b"router" in _errors(
                    store, statuses
                ):
                    recorder.server_error(f"{statuses}: {_errors(store, statuses)[:500]!r}")
            except TimeoutError:
                recorder.hang("the batch did not finish in time")
            except BaseException as error:
                recorder.crash(repr(error))
    return recorder.result()


def _create_batch(store: BatchStore, number: int, data: bytes, endpoint: str) -> Batch:
    files = store.file_store(TENANT)
    upload = files.upload(f"{number:x}", 10**7, 0, lambda path, least, wanted: wanted)
    upload.write(data)
    upload.close()
    files.add(StoredFile(f"file-{number:x}", len(data), 0, "x", "batch"), upload.path)
    batch = Batch(f"batch_{number:x}", TENANT, endpoint, f"file-{number:x}", int(NOW))
    store.create(batch)
    return batch


def _abandon_lines(store: BatchStore, batch: Batch, num_lines: int) -> None:
    """Start to process some lines and abandon them, as if the router had been killed."""
    if store.get(TENANT, batch.id).is_finished:
        return
    job = BatchJob(store, store.get(TENANT, batch.id), MAX_LINE_BYTES)
    job.open(NOW)
    for _ in range(num_lines):
        job.next_request(NOW)
    job.close()


async def _run(store: BatchStore, batch: Batch, chance: Chance) -> Batch:
    async def ask(tenant: TenantId, endpoint: str, take_body: Callable[[], bytes]) -> BatchResponse:
        try:
            parse_body(ENDPOINTS[endpoint], take_body())
        except ApiError as problem:
            return BatchResponse(problem.status, "r", problem.json)
        return BatchResponse(200, "r", b"{}")

    runner = BatchRunner(store, ask, lambda _: 8, ManualClock(NOW), MAX_LINE_BYTES, 10**9)
    running = asyncio.create_task(runner.run())
    try:
        while not store.get(TENANT, batch.id).is_finished:
            if running.done():
                await running
            runner.check_now()
            await asyncio.sleep(0.001)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return store.get(TENANT, batch.id)


def _errors(store: BatchStore, batch: Batch) -> bytes:
    """Return the lines of the batch's error file that report an internal error, except for the
    error ``router_died`` of abandoned lines."""
    if batch.error_file_id is None:
        return b""
    lines = store.file_store(TENANT).data_path(batch.error_file_id).read_bytes().splitlines()
    return b"\n".join(
        line for line in lines if b"router_died" not in line and b"internal_error" in line
    )


# -- generators -----------------------------------------------------------------------------------


def make(chance: Chance, endpoint: str) -> bytes:
    lines = [_line(chance, endpoint, number) for number in range(int(chance.integers(0, 12)))]
    ends = (b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" \n", b"")
    return b"".join(line + ends[chance.integers(len(ends))] for line in lines)


def _line(chance: Chance, endpoint: str, number: int) -> bytes:
    line = {"custom_id": f"c{number}", "method": "POST", "url": endpoint, "body": _body(chance)}
    kinds: list[Callable[[], bytes]] = [
        lambda: _encoded(line),
        lambda: _encoded(line),
        lambda: _mutated(_encoded(line), chance),
        lambda: _encoded({**line, FIELDS[number % 5]: _value(chance)}),
        lambda: _encoded(_value(chance)),
        lambda: b'{"custom_id":"d","body":' + b"[" * 3000 + b"]" * 3000 + b"}",
        lambda: _encoded(line | {"body": {"prompt": "\ud800", "n": float("nan")}}),
        lambda: _encoded({**line, "body": _nested(int(chance.integers(1, 900)))}),
        lambda: chance.bytes(int(chance.integers(1, 300))).replace(b"\n", b" "),
        lambda: b"x" * (MAX_LINE_BYTES + 10),
    ]  # fmt: skip
    return kinds[chance.integers(len(kinds))]()


def _body(chance: Chance) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
        "stream": True, "guided_regex": "a+",
        "logit_bias": _nested(int(chance.integers(1, 600))), "n": 2,
        "tools": _value(chance), "metadata": _value(chance), "stop": _value(chance),
    }  # fmt: skip
    return {name: value for name, value in fields.items() if chance.random() < 0.4}


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _value(chance: Chance) -> Any:
    values: list[Any] = [
        None, True, 0, -1, 2**53, 1e308, "", "x", "é\0", [], {}, [1, [2]], {"a": {"b": []}},
        "y" * 3000, {"type": "function"}, _nested(int(chance.integers(1, 240))),
    ]  # fmt: skip
    return values[chance.integers(len(values))]


def _nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def _mutated(data: bytes, chance: Chance) -> bytes:
    at = int(chance.integers(len(data)))
    new = bytes([int(chance.integers(256))]) if chance.random() < 0.5 else data[at : at + 20] * 3
    return (data[:at] + new + data[at + int(chance.integers(3)) :]).replace(b"\n", b" ")
