"""Tests the batch API over HTTP with in-memory implementations, and batches that wait for
capacity."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.core.priority import Priority
from baton.core.states import Role
from baton.core.worker_load import WorkerLoad
from baton.text.tokenizer import Tokenizer
from router.batches.batch import COMPLETION_WINDOW_SECONDS, BatchStatus
from router.batches.batch_job import BatchJob
from router.batches.batch_request import BatchResponse
from router.batches.batch_runner import BatchRunner
from router.batches.batch_store import BatchStore
from router.batches.concurrency import RouterLoad, num_allowed_batch_requests
from tests import router_harness
from tests.router_harness import RESPOND, eventually, member, wrong_error
from tests.unit.router.batch_harness import (
    CHATS,
    COMPLETIONS,
    TENANT,
    BatchRouter,
    batch_line,
    jsonl,
    make_batch,
    make_file,
    read_lines,
    start_batch,
    upload,
    wait_until_finished,
)

tokenizer = router_harness.tokenizer

# -- batches --------------------------------------------------------------------------------------


async def test_batch_separates_answers_and_errors(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Responses to valid lines are in the output file; every kind of invalid line is in the error
    file."""
    batch_router = BatchRouter(tokenizer, tmp_path)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    data = (
        jsonl(batch_line("a"), batch_line("b", prompt="y", max_tokens=2, n=2))
        + b"\n \nnonsense\n[]\n"
        + jsonl(
            batch_line("a"), batch_line("", prompt="x"), batch_line("c", url=CHATS, **chat),
            batch_line("d", prompt=""),
            batch_line("e", prompt="x", stream=True), batch_line("f", prompt="x", max_tokens=10**6),
            {**batch_line("g"), "method": "GET"}, {**batch_line("h"), "mood": 1},
            {**batch_line("i"), "body": 5},
        )
        + json.dumps(batch_line("j", prompt="z", max_tokens=1)).encode()
    )  # fmt: skip
    async with batch_router.open() as client:
        batch = await start_batch(client, data, metadata={"job": "night"})
        assert batch["status"] == "validating" and batch["metadata"] == {"job": "night"}
        assert batch["expires_at"] == batch["created_at"] + COMPLETION_WINDOW_SECONDS
        done = await wait_until_finished(client, batch)
        good = await read_lines(client, done["output_file_id"])
        bad = await read_lines(client, done["error_file_id"])
        listed = (await client.get("/v1/files", params={"purpose": "batch_output"})).json()
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 14, "completed": 3, "failed": 11}
    assert len(listed["data"]) == 2
    assert sorted(each["custom_id"] for each in good) == ["a", "b", "j"]
    for each in good:
        assert each["error"] is None and each["response"]["status_code"] == 200
        assert each["response"]["request_id"] == each["response"]["body"]["id"]
    by_id = {each["custom_id"]: each["response"]["body"] for each in good}
    assert [choice["text"] for choice in by_id["b"]["choices"]] == ["He", "He"]
    why = {each["custom_id"]: each for each in bad}
    assert why["d"]["response"]["status_code"] == why["f"]["response"]["status_code"] == 400
    assert why["f"]["response"]["body"]["error"]["param"] == "max_tokens"
    for custom_id in ("a", "c", "e", "g", "h", "i"):
        assert why[custom_id]["response"] is None
        assert why[custom_id]["error"]["code"] == "invalid_request"
    specs = [job.spec for job in batch_router.router.prefill.submitted]
    assert {spec.priority for spec in specs} == {Priority.BATCH}


async def test_batch_of_chats_completes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    async with BatchRouter(tokenizer, tmp_path).open() as client:
        data = jsonl(*(batch_line(str(number), url=CHATS, **chat) for number in range(20)))
        done = await wait_until_finished(client, await start_batch(client, data, endpoint=CHATS))
        answers = await read_lines(client, done["output_file_id"])
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert done["error_file_id"] is None
    texts = {a["response"]["body"]["choices"][0]["message"]["content"] for a in answers}
    assert texts == {"He"}


async def test_batch_of_responses_completes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with BatchRouter(tokenizer, tmp_path).open() as client:
        lines = (batch_line(name, url=RESPOND, input="Hi", max_output_tokens=2) for name in "ab")
        data = jsonl(*lines, batch_line("c", url=RESPOND, input="Hi", background=True))
        done = await wait_until_finished(client, await start_batch(client, data, endpoint=RESPOND))
        answers = await read_lines(client, done["output_file_id"])
        (refused,) = await read_lines(client, done["error_file_id"])
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    for answer in answers:
        body = answer["response"]["body"]
        assert body["id"] == answer["response"]["request_id"] and body["store"] is False
        assert body["output"][0]["content"][0]["text"] == "He"
    assert refused["response"]["body"]["error"]["param"] == "background"


async def test_invalid_batch_requests_are_rejected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with BatchRouter(tokenizer, tmp_path).open() as client:
        file = (await upload(client, jsonl(batch_line("a")))).json()["id"]
        good = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for fields, param in (
            ({"endpoint": "/v1/moderations"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"input_file_id": 5}, "input_file_id"),
            ({"metadata": {"x": 5}}, "metadata.x"),
            ({"complation_window": "x"}, "complation_window"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}},
             "output_expires_after.seconds"),
        ):  # fmt: skip
            response = await client.post("/v1/batches", json={**good, **fields})
            assert wrong_error(response)["param"] == param
        ignored = await client.post("/v1/batches", json={**good, "mood": "x"})
        assert ignored.headers["x-baton-ignored-fields"] == "mood"
        for missing in ("file-ff", "file-../x", "x"):
            body = {**good, "input_file_id": missing}
            wrong_error(await client.post("/v1/batches", json=body), 404)
        wrong_error(await client.post("/v1/batches", content=b"x" * 100_000), 413)
        wrong_error(await client.get("/v1/batches/batch_0"), 404)
        blank = await wait_until_finished(client, await start_batch(client, b"\n \n"))
        assert blank["status"] == "failed"
        assert "it must have 1 to 50000" in blank["errors"]["data"][0]["message"]
        done = await wait_until_finished(client, await start_batch(client, jsonl(batch_line("a"))))
        wrong_error(await client.post(f"/v1/batches/{done['id']}/cancel"), 409)
        output = {**good, "input_file_id": done["output_file_id"]}
        assert wrong_error(await client.post("/v1/batches", json=output))["param"]


async def test_batches_are_paged_and_limited_in_number(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    batch_router = BatchRouter(tokenizer, tmp_path)
    async with batch_router.open(runs=False) as client:
        file = (await upload(client, jsonl(batch_line("a")))).json()["id"]
        body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for _ in range(100):
            assert (await client.post("/v1/batches", json=body)).status_code == 200
        wrong_error(await client.post("/v1/batches", json=body), 429)
        assert (
            "cancel the batch first"
            in wrong_error(await client.delete(f"/v1/files/{file}"), 409)["message"]
        )
        page = (await client.get("/v1/batches", params={"limit": 60})).json()
        rest = (
            await client.get("/v1/batches", params={"after": page["last_id"], "limit": 60})
        ).json()
        ids = [batch["id"] for batch in page["data"] + rest["data"]]
        assert len(ids) == len(set(ids)) == 100 and page["has_more"] and not rest["has_more"]


async def test_cancelled_batch_starts_no_further_lines(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    batch_router = BatchRouter(tokenizer, tmp_path)
    async with batch_router.open(runs=False) as client:
        batch = await start_batch(client, jsonl(*(batch_line(str(number)) for number in range(50))))
        cancelled = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert cancelled["status"] == "cancelling"
    job = BatchJob(batch_router.store, batch_router.store.list_unfinished()[0], 1000)
    job.open(1000.0)
    assert job.next_request(1001.0) is None
    assert job.finish_if_done(1002.0)
    assert (job.batch.status, job.batch.times) == (
        BatchStatus.CANCELLED, {"in_progress": 1000, "cancelling": 1001, "cancelled": 1002},
    )  # fmt: skip
    assert batch_router.store.list_unfinished() == []


# -- capacity for lines ---------------------------------------------------------------------------


def router_load(**fields: Any) -> RouterLoad:
    decode = [member(f"d{number}", Role.DECODE) for number in range(3)]
    given = {"num_requests": 0, "limit": 100, "prefill": [], "decode": decode, "draining": False}
    return RouterLoad(**{**given, **fields})


def test_lines_in_flight_follow_the_clusters_free_capacity() -> None:
    def loaded(**load: Any) -> Any:
        return [member("d0", Role.DECODE, load=WorkerLoad(**load))]

    assert num_allowed_batch_requests(2, 0, router_load()) == 6
    assert num_allowed_batch_requests(1000, 0, router_load()) == 256
    assert num_allowed_batch_requests(2, 0, router_load(draining=True)) == 0
    assert num_allowed_batch_requests(2, 0, router_load(decode=[])) == 0
    assert num_allowed_batch_requests(2, 0, router_load(num_requests=50)) == 0
    assert num_allowed_batch_requests(2, 0, router_load(num_requests=49)) == 6
    assert num_allowed_batch_requests(2, 0, router_load(prefill=loaded(waiting=1))) == 0
    assert num_allowed_batch_requests(2, 1, router_load(prefill=loaded(waiting=1))) == 6
    assert (
        num_allowed_batch_requests(2, 0, router_load(decode=loaded(free_blocks=9, num_blocks=100)))
        == 0
    )
    assert (
        num_allowed_batch_requests(2, 0, router_load(decode=loaded(free_blocks=10, num_blocks=100)))
        == 2
    )


class FakeBackend:
    """An inference backend that records its requests and answers with ``status``."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.ids: list[str] = []
        self.status = 200
        self.inside = 0
        self.most = 0

    async def __call__(
        self, tenant: TenantId, endpoint: str, take_body: Callable[[], bytes]
    ) -> BatchResponse:
        self.bodies.append(take_body())
        self.ids.append(json.loads(self.bodies[-1])["prompt"])
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        return BatchResponse(self.status, "r", b"{}")


def make_runner(store: BatchStore, ask: FakeBackend, room: Any) -> BatchRunner:
    return BatchRunner(store, ask, room, ManualClock(1_000_000.0), 1000, 10**6)


async def until(condition: Any, runner: BatchRunner) -> None:
    running = asyncio.create_task(runner.run())
    await eventually(condition)
    running.cancel()
    await asyncio.wait([running])


async def test_batches_of_different_tenants_alternate(tmp_path: Path) -> None:
    store, backend = BatchStore(tmp_path), FakeBackend()
    for number, who in enumerate(("alice", "alice", "bob")):
        lines = [batch_line(f"{who}{number}{each}", prompt=f"{who}{number}") for each in range(3)]
        make_batch(store, number, *lines, tenant=TenantId(who))
    await until(lambda: not store.list_unfinished(), make_runner(store, backend, lambda _: 1))
    assert backend.ids[:6] == ["alice0", "bob2"] * 3
    assert backend.ids[6:] == ["alice1"] * 3 and backend.most == 1


async def test_no_lines_start_without_capacity(tmp_path: Path) -> None:
    store, backend, room = BatchStore(tmp_path), FakeBackend(), [0]
    batch = make_batch(store, 1, batch_line("a"))
    runner = make_runner(store, backend, lambda _: room[0])
    running = asyncio.create_task(runner.run())
    await eventually(lambda: store.get(TENANT, batch.id).status is BatchStatus.IN_PROGRESS)
    assert backend.ids == []
    room[0] = 1
    runner.check_now()
    await eventually(lambda: store.get(TENANT, batch.id).status is BatchStatus.COMPLETED)
    running.cancel()
    await asyncio.wait([running])


async def test_no_lines_start_without_disk_space(tmp_path: Path) -> None:
    store, backend = BatchStore(tmp_path), FakeBackend()
    batch = make_batch(store, 1, batch_line("a"))
    filler = make_file(store, 2, b"x" * 5000)
    runner = BatchRunner(store, backend, lambda _: 1, ManualClock(1_000_000.0), 1000, 5000)
    running = asyncio.create_task(runner.run())
    await eventually(lambda: store.get(TENANT, batch.id).status is BatchStatus.IN_PROGRESS)
    assert backend.ids == []
    store.file_store(TENANT).delete(filler)
    runner.check_now()
    await eventually(lambda: store.get(TENANT, batch.id).status is BatchStatus.COMPLETED)
    running.cancel()
    await asyncio.wait([running])


def test_abandoned_uploads_are_deleted_after_a_day(tmp_path: Path) -> None:
    files = BatchStore(tmp_path).file_store(TENANT)
    left = files.upload("left", 10, 0, lambda path, least, wanted: wanted)
    left.write(b"x")
    left.close()
    began = left.path.stat().st_mtime
    files.delete_expired(began + 3600)
    assert left.path.exists()
    files.delete_expired(began + 24 * 3600 + 1)
    assert not left.path.exists()


def test_oldest_finished_batches_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.batch_store.MAX_BATCHES", 3)
    store = BatchStore(tmp_path)
    for number in range(5):
        batch = make_batch(store, number, batch_line("a"))
        if number != 1:
            batch.set_status(BatchStatus.FAILED, 0.0)
            store.save(batch)
    assert [batch.id for batch in store.list_batches(TENANT)] == ["batch_4", "batch_3", "batch_1"]


async def test_refused_lines_are_retried_with_backoff(tmp_path: Path) -> None:
    store, backend = BatchStore(tmp_path), FakeBackend()
    batch = make_batch(store, 1, batch_line("a"))
    clock = ManualClock(1_000_000.0)
    runner = BatchRunner(store, backend, lambda _: 1, clock, 1000, 10**6)
    backend.status = 503
    running = asyncio.create_task(runner.run())
    for pause, times in ((1.0, 1), (2.0, 2), (4.0, 3)):
        await eventually(lambda times=times: len(backend.ids) == times and runner.num_running == 0)
        if times == 3:
            backend.status = 200
        clock.advance(pause)
        runner.check_now()
    await eventually(lambda: store.get(TENANT, batch.id).status is BatchStatus.COMPLETED)
    running.cancel()
    await asyncio.wait([running])
    assert store.get(TENANT, batch.id).completed == 1
    assert backend.bodies == [b'{"prompt":"x","max_tokens":3,"priority":3}'] * 4


async def test_only_one_of_two_routers_runs_batches(tmp_path: Path) -> None:
    one, two = FakeBackend(), FakeBackend()
    store = BatchStore(tmp_path)
    make_batch(store, 1, *(batch_line(str(number)) for number in range(9)))
    first = asyncio.create_task(make_runner(store, one, lambda _: 1).run())
    await eventually(lambda: bool(one.ids))
    second = asyncio.create_task(make_runner(store, two, lambda _: 1).run())
    await eventually(lambda: not store.list_unfinished())
    for task in (first, second):
        task.cancel()
        await asyncio.wait([task])
    assert len(one.ids) == 9 and two.ids == []
    make_batch(store, 2, batch_line("a"))
    await until(lambda: not store.list_unfinished(), make_runner(store, two, lambda _: 1))
    assert len(two.ids) == 1
