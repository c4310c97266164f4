"""Tests that an error in one line, or in one batch's files, fails only that line or batch."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.text.tokenizer import Tokenizer
from router.batches.batch import BatchStatus
from router.batches.batch_job import BatchJob
from router.batches.batch_request import BatchRequest, BatchResponse
from router.batches.batch_runner import BatchRunner
from router.batches.batch_store import BatchStore
from router.http.json_limits import max_json_values
from router.http.nesting import is_nested_deeper
from router.limits import MAX_NESTING, MAX_STRINGS, MAX_VALUES
from tests import router_harness
from tests.router_harness import CONTEXT, eventually
from tests.unit.router.batch_harness import (
    COMPLETIONS,
    TENANT,
    BatchRouter,
    batch_line,
    jsonl,
    make_batch,
    read_lines,
    start_batch,
    wait_until_finished,
)

tokenizer = router_harness.tokenizer


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def test_too_deeply_nested_line_fails_and_the_batch_continues(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """JSON encoders fail at 254 levels of nesting, and the parser of batch lines at 1024: the lines
    ``deep`` and ``deeper`` are between these limits, and ``deepest`` is beyond both."""
    async with BatchRouter(tokenizer, tmp_path).open() as client:
        lines = [
            batch_line("deep", prompt="x", logit_bias=nested(260)),
            batch_line("good"),
            batch_line("deeper", prompt="x", logit_bias=nested(700)),
        ]
        deepest = b'{"custom_id": "deepest", "body": ' + b"[" * 1500 + b"]" * 1500 + b"}\n"
        batch = await wait_until_finished(
            client, await start_batch(client, jsonl(*lines) + deepest)
        )
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
        wrong = await read_lines(client, batch["error_file_id"])
        assert [each["custom_id"] for each in wrong] == ["deep", "deeper", None]
        assert f"nested deeper than {MAX_NESTING}" in wrong[0]["error"]["message"]


async def test_lines_with_too_many_values_or_strings_fail_alone(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Such a line is refused before it is parsed, even if it is not JSON. Its limits are those of
    an HTTP body: they allow a prompt of more than MAX_VALUES tokens, which is too long here."""
    size = {"max_file_bytes": 10**7, "folder_bytes": 10**8}
    batch_router, bound = BatchRouter(tokenizer, tmp_path, **size), max_json_values(CONTEXT)
    lists, keys = [[]] * bound, {f"{number:x}": 0 for number in range(MAX_STRINGS)}
    data = (
        jsonl(batch_line("first"), batch_line("values", prompt="x", x=lists))
        + b'{"custom_id": "no JSON", "body": [' + b"[]," * bound + b"\n"
        + jsonl(batch_line("strings", **keys), batch_line("long", prompt=[7] * MAX_VALUES))
        + jsonl(batch_line("last"))
    )  # fmt: skip
    async with batch_router.open() as client:
        batch = await wait_until_finished(client, await start_batch(client, data))
        good = await read_lines(client, batch["output_file_id"])
        wrong = await read_lines(client, batch["error_file_id"])
    assert batch["request_counts"] == {"total": 6, "completed": 2, "failed": 4}
    assert sorted(each["custom_id"] for each in good) == ["first", "last"]
    assert [each["response"]["body"]["choices"][0]["text"] for each in good] == ["Hel", "Hel"]
    long = next(each for each in wrong if each["custom_id"] == "long")
    assert (long["response"]["status_code"], long["error"]) == (400, None)
    refused = [each for each in wrong if each["custom_id"] is None]
    number = batch["id"].removeprefix("batch_")
    values, strings = (
        f"it may have at most {most}: split it into several requests"
        for most in (bound, MAX_STRINGS)
    )
    assert [(each["id"], each["response"], each["error"]) for each in refused] == [
        (f"batch_req_{number}_{line}", None, {"code": "too_many_values", "message": message})
        for line, message in (
            (1, f"the body has {2 * bound + 7} values; {values}"),
            (2, f"the body has {2 * bound + 4} values; {values}"),
            (3, f"the body has {MAX_STRINGS + 7} strings, keys included; {strings}"),
        )
    ]


def test_nesting_depth_is_measured() -> None:
    assert not is_nested_deeper(1, 0)
    assert is_nested_deeper([], 0)
    assert not is_nested_deeper({"a": [1, "text"]}, 2)
    assert is_nested_deeper({"a": [1, "text"]}, 1)
    assert not is_nested_deeper(nested(MAX_NESTING))
    assert is_nested_deeper(nested(MAX_NESTING + 1))
    assert is_nested_deeper(nested(5_000))


class FakeBackend:
    """An inference backend that crashes on the prompt ``crash``, never answers the prompt ``slow``,
    and answers all other prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def __call__(
        self, tenant: TenantId, endpoint: str, take_body: Callable[[], bytes]
    ) -> BatchResponse:
        data = take_body()
        prompt = "slow" if b"slow" in data else "crash" if b"crash" in data else "good"
        self.prompts.append(prompt)
        if prompt == "crash":
            raise KeyError("an unexpected error in the backend")
        if prompt == "slow":
            await asyncio.Event().wait()
        return BatchResponse(200, "r", b"{}")


def make_runner(store: BatchStore, backend: FakeBackend) -> BatchRunner:
    return BatchRunner(store, backend, lambda _: 4, ManualClock(1_000_000.0), 10_000, 10**6)


async def until(condition: Any, runner: BatchRunner) -> None:
    running = asyncio.create_task(runner.run())
    await eventually(lambda: condition() or running.done())
    assert not running.done(), running.exception()
    running.cancel()
    await asyncio.wait([running])


async def test_line_that_crashes_fails_alone(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    batch = make_batch(store, 1, batch_line("a", prompt="crash"), batch_line("b"))
    await until(lambda: not store.list_unfinished(), make_runner(store, FakeBackend()))
    batch_after = store.get(TENANT, batch.id)
    assert (batch_after.status, batch_after.completed, batch_after.failed) == (
        BatchStatus.COMPLETED,
        1,
        1,
    )


@pytest.mark.parametrize("spoilt", ["input", "output"])
async def test_batch_with_unreadable_files_fails_alone(tmp_path: Path, spoilt: str) -> None:
    store = BatchStore(tmp_path)
    bad, good = (
        make_batch(store, number, batch_line("a"), tenant=TenantId(who))
        for number, who in ((1, "alice"), (2, "bob"))
    )
    path = store.file_store(TENANT).data_path(bad.input_file_id)
    if spoilt == "output":
        path = store.path(bad, "output")
    path.unlink(missing_ok=True)
    path.mkdir()
    runner = make_runner(store, FakeBackend())
    await until(lambda: store.get(TenantId("bob"), good.id).is_finished, runner)
    assert store.get(TenantId("bob"), good.id).status is BatchStatus.COMPLETED
    if spoilt == "input":
        batch_after = store.get(TENANT, bad.id)
        assert (
            batch_after.status is BatchStatus.FAILED
            and "directory" in batch_after.errors[0]["message"]
        )


# -- lines that kill routers ----------------------------------------------------------------------


def crash_router(store: BatchStore, num_lines: int) -> list[BatchRequest]:
    """Start ``num_lines`` lines of a batch, as a router does that crashes before it records any
    response. Return the lines' requests."""
    job = BatchJob(store, store.list_unfinished()[0], 1000)
    job.open(0.0)
    found = [job.next_request(0.0) for _ in range(num_lines)]
    job.close()
    return [each for each in found if each is not None]


async def test_line_that_killed_two_routers_is_not_retried(tmp_path: Path) -> None:
    store, backend = BatchStore(tmp_path), FakeBackend()
    batch = make_batch(store, 1, batch_line("a", prompt="slow"), batch_line("b"))
    assert [each.number for each in crash_router(store, 1)] == [0]
    assert [each.number for each in crash_router(store, 2)] == [1, 0]
    crash_router(store, 0)  # a crash without lines in flight changes nothing
    await until(lambda: not store.list_unfinished(), make_runner(store, backend))
    batch_after = store.get(TENANT, batch.id)
    assert backend.prompts == ["good"] and (batch_after.completed, batch_after.failed) == (1, 1)
    wrong = store.file_store(TENANT).data_path(batch_after.error_file_id or "").read_text()
    assert "routers died 2 times while this request was in flight" in wrong
    assert "router_died" in wrong and not store.path(batch, "attempts").exists()


async def test_suspect_lines_are_retried_one_at_a_time(tmp_path: Path) -> None:
    """Lines that were in flight when a router crashed are retried one at a time. So if one of them
    kills a second router, no other line is in flight."""
    store, backend = BatchStore(tmp_path), FakeBackend()
    make_batch(store, 1, *(batch_line(str(number), prompt="slow") for number in range(3)))
    assert len(crash_router(store, 3)) == 3
    await until(lambda: backend.prompts == ["slow"], make_runner(store, backend))
    assert backend.prompts == ["slow"]


async def test_orderly_router_stops_do_not_count_against_lines(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    batch = make_batch(store, 1, batch_line("a", prompt="slow"))
    for _ in range(4):
        backend = FakeBackend()
        await until(lambda backend=backend: bool(backend.prompts), make_runner(store, backend))
    assert store.get(TENANT, batch.id).failed == 0
    job = BatchJob(store, store.list_unfinished()[0], 1000)
    job.open(0.0)
    found = job.next_request(0.0)
    assert found is not None and not job.is_suspect(found)
    job.put_back(found)  # a router does this if the request is refused because of overload
    again = job.next_request(0.0)
    assert again is not None and (again.line, again.custom_id) == (found.line, "a")
    job.close()
    # Closing the job above counts as one crash.
    assert [each.number for each in crash_router(store, 2)] == [0]


def test_finished_lines_of_a_failed_batch_are_published(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    batch = make_batch(store, 1, batch_line("a"), batch_line("b"))
    job = BatchJob(store, batch, 1000)
    job.open(0.0)
    found, other = job.next_request(0.0), job.next_request(0.0)
    assert found is not None and other is not None
    job.record_response(found, BatchResponse(200, "r", b"{}"))
    job.fail("the disk is gone", 1.0)
    # This line was still in flight. Its response changes nothing any more.
    job.record_response(other, BatchResponse(200, "r", b"{}"))
    batch_after = store.get(TENANT, batch.id)
    assert batch_after.status is BatchStatus.FAILED and batch_after.endpoint == COMPLETIONS
    assert store.file_store(TENANT).get(batch_after.output_file_id or "").bytes > 0
