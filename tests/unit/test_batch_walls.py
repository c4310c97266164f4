"""What goes wrong in one line, or in one batch's files, ends that and nothing else."""

import asyncio
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
from router.http.nesting import MAX_NESTING, is_nested_deeper
from tests.unit import test_router_http
from tests.unit.batch_office import (
    COMPLETIONS,
    WHO,
    Office,
    finished,
    jsonl,
    line,
    lines_of,
    make_batch,
    start,
)
from tests.unit.test_router_http import eventually

tokenizer = test_router_http.tokenizer


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def test_a_nested_line_is_wrong_and_the_batch_goes_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Encoders of JSON give up at 254 levels, parsers at 1024."""
    async with Office(tokenizer, tmp_path).open() as client:
        lines = [
            line("deep", prompt="x", logit_bias=nested(260)),
            line("good"),
            line("deeper", prompt="x", logit_bias=nested(700)),
        ]
        deepest = b'{"custom_id": "deepest", "body": ' + b"[" * 1500 + b"]" * 1500 + b"}\n"
        batch = await finished(client, await start(client, jsonl(*lines) + deepest))
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
        wrong = await lines_of(client, batch["error_file_id"])
        assert [each["custom_id"] for each in wrong] == ["deep", "deeper", None]
        assert f"nested deeper than {MAX_NESTING}" in wrong[0]["error"]["message"]


def test_nesting() -> None:
    assert not is_nested_deeper(1, 0)
    assert is_nested_deeper([], 0)
    assert not is_nested_deeper({"a": [1, "text"]}, 2)
    assert is_nested_deeper({"a": [1, "text"]}, 1)
    assert not is_nested_deeper(nested(MAX_NESTING))
    assert is_nested_deeper(nested(MAX_NESTING + 1))
    assert is_nested_deeper(nested(5_000))


class Asked:
    """Answers all but ``crash``, and waits in ``slow`` for ever."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def __call__(self, tenant: TenantId, endpoint: str, data: bytes) -> BatchResponse:
        prompt = "slow" if b"slow" in data else "crash" if b"crash" in data else "good"
        self.prompts.append(prompt)
        if prompt == "crash":
            raise KeyError("nobody foresaw it")
        if prompt == "slow":
            await asyncio.Event().wait()
        return BatchResponse(200, "r", {})


def make_runner(library: BatchStore, asked: Asked) -> BatchRunner:
    return BatchRunner(library, asked, lambda _: 4, ManualClock(1_000_000.0), 10_000, 10**6)


async def until(condition: Any, runner: BatchRunner) -> None:
    running = asyncio.create_task(runner.run())
    await eventually(lambda: condition() or running.done())
    assert not running.done(), running.exception()
    running.cancel()
    await asyncio.wait([running])


async def test_a_line_that_crashes_ends_alone(tmp_path: Path) -> None:
    library = BatchStore(tmp_path)
    batch = make_batch(library, 1, line("a", prompt="crash"), line("b"))
    await until(lambda: not library.unfinished(), make_runner(library, Asked()))
    seen = library.get(WHO, batch.id)
    assert (seen.status, seen.completed, seen.failed) == (BatchStatus.COMPLETED, 1, 1)


@pytest.mark.parametrize("spoilt", ["input", "output"])
async def test_a_batch_whose_files_are_spoilt_fails_alone(tmp_path: Path, spoilt: str) -> None:
    library = BatchStore(tmp_path)
    bad, good = (
        make_batch(library, number, line("a"), tenant=TenantId(who))
        for number, who in ((1, "alice"), (2, "bob"))
    )
    path = library.shelf(WHO).data(bad.input_file_id)
    if spoilt == "output":
        path = library.part(bad, "output")
    path.unlink(missing_ok=True)
    path.mkdir()
    runner = make_runner(library, Asked())
    await until(lambda: library.get(TenantId("bob"), good.id).is_over, runner)
    assert library.get(TenantId("bob"), good.id).status is BatchStatus.COMPLETED
    if spoilt == "input":
        seen = library.get(WHO, bad.id)
        assert seen.status is BatchStatus.FAILED and "directory" in seen.errors[0]["message"]


# -- lines that routers die of --------------------------------------------------------------------


def die(library: BatchStore, num_lines: int) -> list[BatchRequest]:
    """A router that begins so many lines, and ends without a word."""
    job = BatchJob(library, library.unfinished()[0], 1000)
    job.open(0.0)
    found = [job.next_line(0.0) for _ in range(num_lines)]
    job.close()
    return [each for each in found if each is not None]


async def test_a_line_that_two_routers_died_of_is_not_tried_again(tmp_path: Path) -> None:
    library, asked = BatchStore(tmp_path), Asked()
    batch = make_batch(library, 1, line("a", prompt="slow"), line("b"))
    assert [each.number for each in die(library, 1)] == [0]
    assert [each.number for each in die(library, 2)] == [1, 0]
    die(library, 0)  # whoever dies of something else changes nothing
    await until(lambda: not library.unfinished(), make_runner(library, asked))
    seen = library.get(WHO, batch.id)
    assert asked.prompts == ["good"] and (seen.completed, seen.failed) == (1, 1)
    wrong = library.shelf(WHO).data(seen.error_file_id or "").read_text()
    assert "the router ended 2 times while this line was under way" in wrong
    assert "router_died" in wrong and not library.part(batch, "attempts").exists()


async def test_suspects_are_tried_one_at_a_time(tmp_path: Path) -> None:
    """So that one that ends routers has no other with it at two deaths."""
    library, asked = BatchStore(tmp_path), Asked()
    make_batch(library, 1, *(line(str(number), prompt="slow") for number in range(3)))
    assert len(die(library, 3)) == 3
    await until(lambda: asked.prompts == ["slow"], make_runner(library, asked))
    assert asked.prompts == ["slow"]


async def test_routers_that_end_in_order_are_no_deaths(tmp_path: Path) -> None:
    library = BatchStore(tmp_path)
    batch = make_batch(library, 1, line("a", prompt="slow"))
    for _ in range(4):
        asked = Asked()
        await until(lambda asked=asked: bool(asked.prompts), make_runner(library, asked))
    assert library.get(WHO, batch.id).failed == 0
    job = BatchJob(library, library.unfinished()[0], 1000)
    job.open(0.0)
    found = job.next_line(0.0)
    assert found is not None and not job.is_suspect(found)
    job.put_back(found)  # refused for now
    assert job.next_line(0.0) == found
    job.close()
    assert [each.number for each in die(library, 2)] == [0]  # it has died once


def test_what_was_written_of_a_batch_that_fails_is_handed_out(tmp_path: Path) -> None:
    library = BatchStore(tmp_path)
    batch = make_batch(library, 1, line("a"), line("b"))
    job = BatchJob(library, batch, 1000)
    job.open(0.0)
    found, other = job.next_line(0.0), job.next_line(0.0)
    assert found is not None and other is not None
    job.note_reply(found, BatchResponse(200, "r", {}))
    job.fail("the disk is gone", 1.0)
    job.note_reply(other, BatchResponse(200, "r", {}))  # it was under way, and changes nothing
    seen = library.get(WHO, batch.id)
    assert seen.status is BatchStatus.FAILED and seen.endpoint == COMPLETIONS
    assert library.shelf(WHO).get(seen.output_file_id or "").bytes > 0
