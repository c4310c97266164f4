"""Files and batches: over HTTP and twins, across restarts, and when there is no room."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import Batch as OpenAIBatch
from openai.types import FileObject

from baton.clock import ManualClock
from baton.core.ids import TenantId
from baton.core.load import Load
from baton.core.priority import Priority
from baton.core.states import Role
from baton.text.tokenizer import Tokenizer
from router.app import build_app
from router.batches.batch import TERMINAL, TRANSITIONS, WINDOW_SECONDS, Batch, Status
from router.batches.job import Job
from router.batches.library import Library
from router.batches.line import Line, Reply, number_of, read_line, written
from router.batches.room import Business, lines_now
from router.batches.runner import Runner
from router.batches.shelf import FileRecord
from router.multipart import FormReader, boundary_of
from router.problem import Problem
from tests.unit import test_router_http
from tests.unit.test_router_http import House, eventually, member, wrong_error

tokenizer = test_router_http.tokenizer

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WHO = TenantId("alice")


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = body or {"prompt": "x", "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


class Office:
    """A router with a desk, and its client."""

    def __init__(self, tokenizer: Tokenizer, root: Path, **settings: Any) -> None:
        bounds = {name: settings.pop(name) for name in ("folder_bytes",) if name in settings}
        self.house = House(tokenizer, "Hello", automatic=True, **settings)
        self.library = Library(root)
        self.desk = self.house.make_desk(root, **bounds)

    @asynccontextmanager
    async def open(self, runs: bool = True) -> AsyncIterator[httpx.AsyncClient]:
        await self.house.service.cluster.refresh()
        transport = httpx.ASGITransport(build_app(self.house.service, self.desk))
        running = asyncio.create_task(self.desk.run()) if runs else None
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
        if running is not None:
            running.cancel()
            await asyncio.wait([running])


async def upload(client: httpx.AsyncClient, data: bytes, **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return await client.post("/v1/files", files={"file": ("in.jsonl", data)}, data=form)


async def start(client: httpx.AsyncClient, data: bytes, **fields: Any) -> dict[str, Any]:
    file = (await upload(client, data)).json()
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    response = await client.post("/v1/batches", json={**body, **fields})
    assert response.status_code == 200, response.text
    OpenAIBatch.model_validate(response.json(), strict=True)
    batch: dict[str, Any] = response.json()
    return batch


async def finished(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            now: dict[str, Any] = (await client.get(f"/v1/batches/{batch['id']}")).json()
            OpenAIBatch.model_validate(now, strict=True)
            if now["status"] in TERMINAL:
                return now
            await asyncio.sleep(0.005)


async def lines_of(client: httpx.AsyncClient, file_id: str) -> list[Any]:
    content = (await client.get(f"/v1/files/{file_id}/content")).content
    return [json.loads(each) for each in content.splitlines()]


def kept(root: Path) -> list[Path]:
    return sorted(root.glob("*/files/*"))


# -- files ----------------------------------------------------------------------------------------


async def test_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with Office(tokenizer, tmp_path).open(runs=False) as client:
        data = b"\x00\r\n--not a boundary\r\n" + "ö".encode() * 300
        response = await upload(client, data)
        file = response.json()
        FileObject.model_validate(file, strict=True)
        assert (file["bytes"], file["filename"], file["purpose"]) == (
            len(data),
            "in.jsonl",
            "batch",
        )
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
    assert [path.suffix for path in kept(tmp_path)] == [".data", ".json"]


async def test_wrong_uploads_leave_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    office = Office(tokenizer, tmp_path)
    async with office.open(runs=False) as client:
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
    assert kept(tmp_path) == []
    assert office.house.service.gate.inside == 0


async def test_a_folder_that_is_full(tokenizer: Tokenizer, tmp_path: Path) -> None:
    office = Office(tokenizer, tmp_path, folder_bytes=1000)
    async with office.open(runs=False) as client:
        assert (await upload(client, b"x" * 600)).status_code == 200
        wrong_error(await upload(client, b"x" * 600), 413)
        assert (await upload(client, b"x" * 10)).status_code == 200
        assert len((await client.get("/v1/files")).json()["data"]) == 2


async def test_files_of_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    office = Office(tokenizer, tmp_path, api_keys={"sk-a": "alice", "sk-b": "../bob"})
    async with office.open(runs=False) as client:
        wrong_error(await client.get("/v1/files"), 401)
        client.headers["authorization"] = "Bearer sk-a"
        file = (await upload(client, b"{}")).json()
        batch = await start(client, b"{}\n")
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
    assert all(path.parts[-3].isalnum() and len(path.parts[-3]) == 32 for path in kept(tmp_path))


async def test_files_expire(tokenizer: Tokenizer, tmp_path: Path) -> None:
    office = Office(tokenizer, tmp_path)
    async with office.open(runs=False) as client:
        hour = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await upload(client, b"{}", **hour)).json()
        stays = (await upload(client, b"{}")).json()
        assert file["expires_at"] == file["created_at"] + 3600
        office.library.expire(file["expires_at"] - 1)
        assert len((await client.get("/v1/files")).json()["data"]) == 2
        office.library.expire(file["expires_at"])
        assert [f["id"] for f in (await client.get("/v1/files")).json()["data"]] == [stays["id"]]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_forms_in_pieces(size: int) -> None:
    body = (
        b'preamble\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
        b"Content-Type: text/plain\r\n\r\n{}\r\n-\r\n--\r\n--c\r\n--b--\r\nepilogue"
    )
    written: list[bytes] = []

    class Keep:
        def write(self, data: bytes) -> None:
            written.append(data)

    form = FormReader(b"b", lambda _: Keep())
    for start in range(0, len(body), size):
        form.push(body[start : start + size])
    form.close()
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "a.jsonl")
    assert b"".join(written) == b"{}\r\n-\r\n--\r\n--c"


def test_forms_have_bounds() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n'
    for body in (part + b"y" * 5000, b"--b\r\n" + b"y" * 5000, (part + b"y\r\n") * 17, b"--bxx"):
        with pytest.raises(Problem):
            FormReader(b"b", lambda _: pytest.fail()).push(body)
    with pytest.raises(Problem):
        boundary_of("multipart/form-data; boundary=" + "x" * 71)


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
        assert batch["expires_at"] == batch["created_at"] + WINDOW_SECONDS
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
    job = Job(office.library, office.library.unfinished()[0], 1000)
    job.open(1000.0)
    assert job.next_line(1001.0) is None
    assert job.finish_if_done(1002.0)
    assert (job.batch.status, job.batch.times) == (
        Status.CANCELLED, {"in_progress": 1000, "cancelling": 1001, "cancelled": 1002},
    )  # fmt: skip
    assert office.library.unfinished() == []


# -- room -----------------------------------------------------------------------------------------


def business(**fields: Any) -> Business:
    decode = [member(f"d{number}", Role.DECODE) for number in range(3)]
    given = {"inside": 0, "limit": 100, "prefill": [], "decode": decode, "draining": False}
    return Business(**{**given, **fields})


def test_room_for_lines() -> None:
    def loaded(**load: Any) -> Any:
        return [member("d0", Role.DECODE, load=Load(**load))]

    assert lines_now(2, 0, business()) == 6
    assert lines_now(1000, 0, business()) == 256
    assert lines_now(2, 0, business(draining=True)) == 0
    assert lines_now(2, 0, business(decode=[])) == 0
    assert lines_now(2, 0, business(inside=50)) == 0
    assert lines_now(2, 0, business(inside=49)) == 6
    assert lines_now(2, 0, business(prefill=loaded(waiting=1))) == 0
    assert lines_now(2, 1, business(prefill=loaded(waiting=1))) == 6
    assert lines_now(2, 0, business(decode=loaded(free_blocks=9, num_blocks=100))) == 0
    assert lines_now(2, 0, business(decode=loaded(free_blocks=10, num_blocks=100))) == 2


class Asked:
    """What a runner asked, and what it is told."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.status = 200
        self.inside = 0
        self.most = 0

    async def __call__(self, tenant: TenantId, endpoint: str, data: bytes) -> Reply:
        self.ids.append(json.loads(data)["prompt"])
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        return Reply(self.status, "r", {"n": len(self.ids)})


def make_batch(library: Library, number: int, *lines: Any, tenant: TenantId = WHO) -> Batch:
    file_id = make_file(library, number, jsonl(*lines), tenant)
    batch = Batch(f"batch_{number}", tenant, COMPLETIONS, file_id, 1_000_000 + number)
    library.create(batch)
    return batch


def make_file(library: Library, number: int, data: bytes, tenant: TenantId = WHO) -> str:
    shelf = library.shelf(tenant)
    part = shelf.upload(str(number), 10**6)
    part.write(data)
    part.close()
    shelf.add(FileRecord(f"file-{number}", len(data), 0, "x", "batch"), part.path)
    return f"file-{number}"


def make_runner(library: Library, ask: Asked, room: Any) -> Runner:
    return Runner(library, ask, room, ManualClock(1_000_000.0), 1000, 10**6)


async def until(condition: Any, runner: Runner) -> None:
    running = asyncio.create_task(runner.run())
    await eventually(condition)
    running.cancel()
    await asyncio.wait([running])


async def test_tenants_take_turns(tmp_path: Path) -> None:
    library, asked = Library(tmp_path), Asked()
    for number, who in enumerate(("alice", "alice", "bob")):
        lines = [line(f"{who}{number}{each}", prompt=f"{who}{number}") for each in range(3)]
        make_batch(library, number, *lines, tenant=TenantId(who))
    await until(lambda: not library.unfinished(), make_runner(library, asked, lambda _: 1))
    assert asked.ids[:6] == ["alice0", "bob2"] * 3
    assert asked.ids[6:] == ["alice1"] * 3 and asked.most == 1


async def test_no_room_no_lines(tmp_path: Path) -> None:
    library, asked, room = Library(tmp_path), Asked(), [0]
    batch = make_batch(library, 1, line("a"))
    runner = make_runner(library, asked, lambda _: room[0])
    running = asyncio.create_task(runner.run())
    await eventually(lambda: library.get(WHO, batch.id).status is Status.IN_PROGRESS)
    assert asked.ids == []
    room[0] = 1
    runner.hurry()
    await eventually(lambda: library.get(WHO, batch.id).status is Status.COMPLETED)
    running.cancel()
    await asyncio.wait([running])


async def test_no_room_on_the_disk_no_lines(tmp_path: Path) -> None:
    library, asked = Library(tmp_path), Asked()
    batch = make_batch(library, 1, line("a"))
    filler = make_file(library, 2, b"x" * 5000)
    runner = Runner(library, asked, lambda _: 1, ManualClock(1_000_000.0), 1000, 5000)
    running = asyncio.create_task(runner.run())
    await eventually(lambda: library.get(WHO, batch.id).status is Status.IN_PROGRESS)
    assert asked.ids == []
    library.shelf(WHO).delete(filler)
    runner.hurry()
    await eventually(lambda: library.get(WHO, batch.id).status is Status.COMPLETED)
    running.cancel()
    await asyncio.wait([running])


def test_what_was_left_behind_goes(tmp_path: Path) -> None:
    shelf = Library(tmp_path).shelf(WHO)
    left = shelf.upload("left", 10)
    left.write(b"x")
    left.close()
    began = left.path.stat().st_mtime
    shelf.expire(began + 3600)
    assert left.path.exists()
    shelf.expire(began + 24 * 3600 + 1)
    assert not left.path.exists()


def test_the_oldest_batches_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.library.MAX_BATCHES", 3)
    library = Library(tmp_path)
    for number in range(5):
        batch = make_batch(library, number, line("a"))
        if number != 1:
            batch.become(Status.FAILED, 0.0)
            library.save(batch)
    assert [batch.id for batch in library.batches(WHO)] == ["batch_4", "batch_3", "batch_1"]


async def test_refused_lines_are_asked_again(tmp_path: Path) -> None:
    library, asked = Library(tmp_path), Asked()
    batch = make_batch(library, 1, line("a"))
    clock = ManualClock(1_000_000.0)
    runner = Runner(library, asked, lambda _: 1, clock, 1000, 10**6)
    asked.status = 503
    running = asyncio.create_task(runner.run())
    for pause, times in ((1.0, 1), (2.0, 2), (4.0, 3)):
        await eventually(lambda times=times: len(asked.ids) == times and runner.num_running == 0)
        if times == 3:
            asked.status = 200
        clock.advance(pause)
        runner.hurry()
    await eventually(lambda: library.get(WHO, batch.id).status is Status.COMPLETED)
    running.cancel()
    await asyncio.wait([running])
    assert library.get(WHO, batch.id).completed == 1 and len(asked.ids) == 4


async def test_one_of_two_routers_runs(tmp_path: Path) -> None:
    one, two = Asked(), Asked()
    library = Library(tmp_path)
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


# -- restarts -------------------------------------------------------------------------------------


def test_a_job_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed after any number of lines, even in the middle of writing one."""
    library = Library(tmp_path)
    lines = [line(str(number)) for number in range(4)] + ["wrong"]
    batch = make_batch(library, 1, *lines)
    asked: list[int] = []
    for life in range(3):
        job = Job(library, library.unfinished()[0], 1000)
        job.open(0.0)
        assert (job.batch.completed, job.batch.failed) == (life, 0)
        found = job.next_line(0.0)
        assert found is not None
        asked.append(found.number)
        job.note_reply(found, Reply(200, "r", {}))
        job.close()
        with library.part(batch, "output").open("ab") as part:
            part.write(b'{"id": "batch_req_1_3", "custom')
    job = Job(library, library.unfinished()[0], 1000)
    job.open(0.0)
    while (found := job.next_line(0.0)) is not None:
        asked.append(found.number)
        job.note_reply(found, Reply(400 if found.number == 3 else 200, "r", {}))
    assert job.finish_if_done(5.0)
    assert asked == [0, 1, 2, 3]
    assert (job.batch.completed, job.batch.failed, job.batch.total) == (3, 2, 5)
    shelf = library.shelf(WHO)
    output = shelf.data(job.batch.output_file_id or "").read_bytes().splitlines()
    assert [number_of(each) for each in output] == [0, 1, 2]


@pytest.mark.parametrize("status", [Status.FINALIZING, Status.CANCELLING])
def test_an_ending_is_ended(tmp_path: Path, status: Status) -> None:
    """Killed after the output was handed out, before the batch said so."""
    library = Library(tmp_path)
    batch = make_batch(library, 1, line("a"), line("b"))
    job = Job(library, batch, 1000)
    job.open(0.0)
    found = job.next_line(0.0)
    assert found is not None
    job.note_reply(found, Reply(200, "r", {}))
    batch.become(status, 1.0)
    job.save()
    job._hand_out(2.0)
    job.close()
    again = Job(library, library.unfinished()[0], 1000)
    again.open(3.0)
    assert again.next_line(3.0) is None
    assert again.finish_if_done(3.0)
    assert again.batch.is_over and again.batch.completed == 1
    shelf = library.shelf(WHO)
    assert [file.purpose for file in shelf.list()] == ["batch", "batch_output"]
    assert shelf.get(again.batch.output_file_id or "").bytes > 0


def test_a_window_ends(tmp_path: Path) -> None:
    library = Library(tmp_path)
    batch = make_batch(library, 1, *(line(str(number)) for number in range(3)))
    job = Job(library, batch, 1000)
    job.open(0.0)
    found = job.next_line(0.0)
    assert found is not None
    job.note_reply(found, Reply(200, "r", {}))
    assert job.next_line(batch.expires_at - 1.0) is not None  # and is never answered
    assert job.next_line(float(batch.expires_at)) is None
    assert job.finish_if_done(float(batch.expires_at))
    assert batch.status is Status.EXPIRED and batch.times["expired"] == batch.expires_at
    shelf = library.shelf(WHO)
    late = map(json.loads, shelf.data(batch.error_file_id or "").read_bytes().splitlines())
    assert [each["error"]["code"] for each in late] == ["batch_expired"]


def test_states() -> None:
    assert set(TRANSITIONS) | TERMINAL == set(Status)
    reached = {after for later in TRANSITIONS.values() for after in later}
    assert reached == set(Status) - {Status.VALIDATING}


def test_lines_that_are_too_long_are_wrong(tmp_path: Path) -> None:
    library = Library(tmp_path)
    batch = make_batch(library, 1, line("a", prompt="x" * 2000), line("b"))
    job = Job(library, batch, 1000)
    job.open(0.0)
    found = job.next_line(0.0)
    assert found is not None and found.custom_id == "b" and batch.total == 2
    assert batch.failed == 1
    job.close()


def test_records_of_another_version_are_not_there(tmp_path: Path) -> None:
    library = Library(tmp_path)
    batch = make_batch(library, 1, line("a"))
    library.part(batch, "json").write_text('{"id": "batch_1", "mood": 1}')
    assert library.unfinished() == [] and library.batches(WHO) == []
    with pytest.raises(Problem):
        library.get(WHO, batch.id)


def test_written_lines() -> None:
    asked = read_line(7, json.dumps(line("a")).encode(), COMPLETIONS)
    assert asked == Line(7, "a", {"prompt": "x", "max_tokens": 3})
    assert number_of(written("batch_9", asked, Reply(200, "r", {}))) == 7
    assert number_of(b'{"id": "batch_req_9_') is None
