"""Batches over HTTP and twins, and when there is no room for them."""

import asyncio
import json
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
from tests.unit import test_router_http
from tests.unit.batch_office import (
    CHATS,
    COMPLETIONS,
    WHO,
    Office,
    finished,
    jsonl,
    line,
    lines_of,
    make_batch,
    make_file,
    start,
    upload,
)
from tests.unit.test_router_http import eventually, member, wrong_error

tokenizer = test_router_http.tokenizer

# -- batches --------------------------------------------------------------------------------------


async def test_a_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Good lines and every kind of wrong one: these are lines of the error file."""
    office = Office(tokenizer, tmp_path)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    data = (
        jsonl(line("a"), line("b", prompt="y", max_tokens=2, n=2))
        + b"\n \nnonsense\n[]\n"
        + jsonl(
            line("a"), line("", prompt="x"), line("c", url=CHATS, **chat), line("d", prompt=""),
            line("e", prompt="x", stream=True), line("f", prompt="x", max_tokens=10**6),
            {**line("g"), "method": "GET"}, {**line("h"), "mood": 1}, {**line("i"), "body": 5},
        )
        + json.dumps(line("j", prompt="z", max_tokens=1)).encode()
    )  # fmt: skip
    async with office.open() as client:
        batch = await start(client, data, metadata={"job": "night"})
        assert batch["status"] == "validating" and batch["metadata"] == {"job": "night"}
        assert batch["expires_at"] == batch["created_at"] + COMPLETION_WINDOW_SECONDS
        done = await finished(client, batch)
        good = await lines_of(client, done["output_file_id"])
        bad = await lines_of(client, done["error_file_id"])
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
    specs = [job.spec for job in office.house.prefill.submitted]
    assert {spec.priority for spec in specs} == {Priority.BATCH}


async def test_a_batch_of_chats(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    async with Office(tokenizer, tmp_path).open() as client:
        data = jsonl(*(line(str(number), url=CHATS, **chat) for number in range(20)))
        done = await finished(client, await start(client, data, endpoint=CHATS))
        answers = await lines_of(client, done["output_file_id"])
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert done["error_file_id"] is None
    texts = {a["response"]["body"]["choices"][0]["message"]["content"] for a in answers}
    assert texts == {"He"}


async def test_wrong_batches(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with Office(tokenizer, tmp_path).open() as client:
        file = (await upload(client, jsonl(line("a")))).json()["id"]
        good = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for fields, param in (
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"input_file_id": 5}, "input_file_id"),
            ({"metadata": {"x": 5}}, "metadata.x"),
            ({"mood": "x"}, "mood"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}},
             "output_expires_after.seconds"),
        ):  # fmt: skip
            response = await client.post("/v1/batches", json={**good, **fields})
            assert wrong_error(response)["param"] == param
        for missing in ("file-ff", "file-../x", "x"):
            asked = {**good, "input_file_id": missing}
            wrong_error(await client.post("/v1/batches", json=asked), 404)
        wrong_error(await client.post("/v1/batches", content=b"x" * 100_000), 413)
        wrong_error(await client.get("/v1/batches/batch_0"), 404)
        blank = await finished(client, await start(client, b"\n \n"))
        assert blank["status"] == "failed"
        assert "1 to 50000 lines" in blank["errors"]["data"][0]["message"]
        done = await finished(client, await start(client, jsonl(line("a"))))
        wrong_error(await client.post(f"/v1/batches/{done['id']}/cancel"), 409)
        output = {**good, "input_file_id": done["output_file_id"]}
        assert wrong_error(await client.post("/v1/batches", json=output))["param"]


async def test_batches_are_listed_and_bounded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    office = Office(tokenizer, tmp_path)
    async with office.open(runs=False) as client:
        file = (await upload(client, jsonl(line("a")))).json()["id"]
        body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for _ in range(100):
            assert (await client.post("/v1/batches", json=body)).status_code == 200
        wrong_error(await client.post("/v1/batches", json=body), 429)
        assert (
            "cancel it first"
            in wrong_error(await client.delete(f"/v1/files/{file}"), 409)["message"]
        )
        page = (await client.get("/v1/batches", params={"limit": 60})).json()
        rest = (
            await client.get("/v1/batches", params={"after": page["last_id"], "limit": 60})
        ).json()
        ids = [batch["id"] for batch in page["data"] + rest["data"]]
        assert len(ids) == len(set(ids)) == 100 and page["has_more"] and not rest["has_more"]


async def test_cancelling(tokenizer: Tokenizer, tmp_path: Path) -> None:
    office = Office(tokenizer, tmp_path)
    async with office.open(runs=False) as client:
        batch = await start(client, jsonl(*(line(str(number)) for number in range(50))))
        told = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert told["status"] == "cancelling"
    job = BatchJob(office.library, office.library.unfinished()[0], 1000)
    job.open(1000.0)
    assert job.next_line(1001.0) is None
    assert job.finish_if_done(1002.0)
    assert (job.batch.status, job.batch.times) == (
        BatchStatus.CANCELLED, {"in_progress": 1000, "cancelling": 1001, "cancelled": 1002},
    )  # fmt: skip
    assert office.library.unfinished() == []


# -- room -----------------------------------------------------------------------------------------


def business(**fields: Any) -> RouterLoad:
    decode = [member(f"d{number}", Role.DECODE) for number in range(3)]
    given = {"inside": 0, "limit": 100, "prefill": [], "decode": decode, "draining": False}
    return RouterLoad(**{**given, **fields})


def test_room_for_lines() -> None:
    def loaded(**load: Any) -> Any:
        return [member("d0", Role.DECODE, load=WorkerLoad(**load))]

    assert num_allowed_batch_requests(2, 0, business()) == 6
    assert num_allowed_batch_requests(1000, 0, business()) == 256
    assert num_allowed_batch_requests(2, 0, business(draining=True)) == 0
    assert num_allowed_batch_requests(2, 0, business(decode=[])) == 0
    assert num_allowed_batch_requests(2, 0, business(inside=50)) == 0
    assert num_allowed_batch_requests(2, 0, business(inside=49)) == 6
    assert num_allowed_batch_requests(2, 0, business(prefill=loaded(waiting=1))) == 0
    assert num_allowed_batch_requests(2, 1, business(prefill=loaded(waiting=1))) == 6
    assert (
        num_allowed_batch_requests(2, 0, business(decode=loaded(free_blocks=9, num_blocks=100)))
        == 0
    )
    assert (
        num_allowed_batch_requests(2, 0, business(decode=loaded(free_blocks=10, num_blocks=100)))
        == 2
    )


class Asked:
    """What a runner asked, and what it is told."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.status = 200
        self.inside = 0
        self.most = 0

    async def __call__(self, tenant: TenantId, endpoint: str, data: bytes) -> BatchResponse:
        self.ids.append(json.loads(data)["prompt"])
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        return BatchResponse(self.status, "r", {"n": len(self.ids)})


def make_runner(library: BatchStore, ask: Asked, room: Any) -> BatchRunner:
    return BatchRunner(library, ask, room, ManualClock(1_000_000.0), 1000, 10**6)


async def until(condition: Any, runner: BatchRunner) -> None:
    running = asyncio.create_task(runner.run())
    await eventually(condition)
    running.cancel()
    await asyncio.wait([running])


async def test_tenants_take_turns(tmp_path: Path) -> None:
    library, asked = BatchStore(tmp_path), Asked()
    for number, who in enumerate(("alice", "alice", "bob")):
        lines = [line(f"{who}{number}{each}", prompt=f"{who}{number}") for each in range(3)]
        make_batch(library, number, *lines, tenant=TenantId(who))
    await until(lambda: not library.unfinished(), make_runner(library, asked, lambda _: 1))
    assert asked.ids[:6] == ["alice0", "bob2"] * 3
    assert asked.ids[6:] == ["alice1"] * 3 and asked.most == 1


async def test_no_room_no_lines(tmp_path: Path) -> None:
    library, asked, room = BatchStore(tmp_path), Asked(), [0]
    batch = make_batch(library, 1, line("a"))
    runner = make_runner(library, asked, lambda _: room[0])
    running = asyncio.create_task(runner.run())
    await eventually(lambda: library.get(WHO, batch.id).status is BatchStatus.IN_PROGRESS)
    assert asked.ids == []
    room[0] = 1
    runner.hurry()
    await eventually(lambda: library.get(WHO, batch.id).status is BatchStatus.COMPLETED)
    running.cancel()
    await asyncio.wait([running])


async def test_no_room_on_the_disk_no_lines(tmp_path: Path) -> None:
    library, asked = BatchStore(tmp_path), Asked()
    batch = make_batch(library, 1, line("a"))
    filler = make_file(library, 2, b"x" * 5000)
    runner = BatchRunner(library, asked, lambda _: 1, ManualClock(1_000_000.0), 1000, 5000)
    running = asyncio.create_task(runner.run())
    await eventually(lambda: library.get(WHO, batch.id).status is BatchStatus.IN_PROGRESS)
    assert asked.ids == []
    library.shelf(WHO).delete(filler)
    runner.hurry()
    await eventually(lambda: library.get(WHO, batch.id).status is BatchStatus.COMPLETED)
    running.cancel()
    await asyncio.wait([running])


def test_what_was_left_behind_goes(tmp_path: Path) -> None:
    shelf = BatchStore(tmp_path).shelf(WHO)
    left = shelf.upload("left", 10, 0, lambda path, least, wanted: wanted)
    left.write(b"x")
    left.close()
    began = left.path.stat().st_mtime
    shelf.expire(began + 3600)
    assert left.path.exists()
    shelf.expire(began + 24 * 3600 + 1)
    assert not left.path.exists()


def test_the_oldest_batches_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.batch_store.MAX_BATCHES", 3)
    library = BatchStore(tmp_path)
    for number in range(5):
        batch = make_batch(library, number, line("a"))
        if number != 1:
            batch.become(BatchStatus.FAILED, 0.0)
            library.save(batch)
    assert [batch.id for batch in library.batches(WHO)] == ["batch_4", "batch_3", "batch_1"]


async def test_refused_lines_are_asked_again(tmp_path: Path) -> None:
    library, asked = BatchStore(tmp_path), Asked()
    batch = make_batch(library, 1, line("a"))
    clock = ManualClock(1_000_000.0)
    runner = BatchRunner(library, asked, lambda _: 1, clock, 1000, 10**6)
    asked.status = 503
    running = asyncio.create_task(runner.run())
    for pause, times in ((1.0, 1), (2.0, 2), (4.0, 3)):
        await eventually(lambda times=times: len(asked.ids) == times and runner.num_running == 0)
        if times == 3:
            asked.status = 200
        clock.advance(pause)
        runner.hurry()
    await eventually(lambda: library.get(WHO, batch.id).status is BatchStatus.COMPLETED)
    running.cancel()
    await asyncio.wait([running])
    assert library.get(WHO, batch.id).completed == 1 and len(asked.ids) == 4


async def test_one_of_two_routers_runs(tmp_path: Path) -> None:
    one, two = Asked(), Asked()
    library = BatchStore(tmp_path)
    make_batch(library, 1, *(line(str(number)) for number in range(9)))
    first = asyncio.create_task(make_runner(library, one, lambda _: 1).run())
    await eventually(lambda: bool(one.ids))
    second = asyncio.create_task(make_runner(library, two, lambda _: 1).run())
    await eventually(lambda: not library.unfinished())
    for task in (first, second):
        task.cancel()
        await asyncio.wait([task])
    assert len(one.ids) == 9 and two.ids == []
    make_batch(library, 2, line("a"))
    await until(lambda: not library.unfinished(), make_runner(library, two, lambda _: 1))
    assert len(two.ids) == 1
