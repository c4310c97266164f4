"""A batch's job: it goes on where it was, whenever its router ended."""

import json
from pathlib import Path

import pytest

from router.batches.batch import TERMINAL_STATUSES, TRANSITIONS, BatchStatus
from router.batches.batch_job import BatchJob
from router.batches.batch_request import (
    BatchRequest,
    BatchResponse,
    encode_output_line,
    parse_batch_request,
    parse_request_number,
)
from router.batches.batch_store import BatchStore
from router.errors import ApiError
from tests.unit.batch_office import COMPLETIONS, WHO, line, make_batch

# -- restarts -------------------------------------------------------------------------------------


def test_a_job_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed after any number of lines, even in the middle of writing one."""
    library = BatchStore(tmp_path)
    lines = [line(str(number)) for number in range(4)] + ["wrong"]
    batch = make_batch(library, 1, *lines)
    asked: list[int] = []
    for life in range(3):
        job = BatchJob(library, library.unfinished()[0], 1000)
        job.open(0.0)
        assert (job.batch.completed, job.batch.failed) == (life, 0)
        found = job.next_line(0.0)
        assert found is not None
        asked.append(found.number)
        job.note_reply(found, BatchResponse(200, "r", {}))
        job.close()
        with library.part(batch, "output").open("ab") as part:
            part.write(b'{"id": "batch_req_1_3", "custom')
    job = BatchJob(library, library.unfinished()[0], 1000)
    job.open(0.0)
    while (found := job.next_line(0.0)) is not None:
        asked.append(found.number)
        job.note_reply(found, BatchResponse(400 if found.number == 3 else 200, "r", {}))
    assert job.finish_if_done(5.0)
    assert asked == [0, 1, 2, 3]
    assert (job.batch.completed, job.batch.failed, job.batch.total) == (3, 2, 5)
    shelf = library.shelf(WHO)
    output = shelf.data(job.batch.output_file_id or "").read_bytes().splitlines()
    assert [parse_request_number(each) for each in output] == [0, 1, 2]


@pytest.mark.parametrize("status", [BatchStatus.FINALIZING, BatchStatus.CANCELLING])
def test_an_ending_is_ended(tmp_path: Path, status: BatchStatus) -> None:
    """Killed after the output was handed out, before the batch said so."""
    library = BatchStore(tmp_path)
    batch = make_batch(library, 1, line("a"), line("b"))
    job = BatchJob(library, batch, 1000)
    job.open(0.0)
    found = job.next_line(0.0)
    assert found is not None
    job.note_reply(found, BatchResponse(200, "r", {}))
    batch.become(status, 1.0)
    job.save()
    job._hand_out(2.0)
    job.close()
    again = BatchJob(library, library.unfinished()[0], 1000)
    again.open(3.0)
    assert again.next_line(3.0) is None
    assert again.finish_if_done(3.0)
    assert again.batch.is_over and again.batch.completed == 1
    shelf = library.shelf(WHO)
    assert [file.purpose for file in shelf.list()] == ["batch", "batch_output"]
    assert shelf.get(again.batch.output_file_id or "").bytes > 0


def test_a_window_ends(tmp_path: Path) -> None:
    library = BatchStore(tmp_path)
    batch = make_batch(library, 1, *(line(str(number)) for number in range(3)))
    job = BatchJob(library, batch, 1000)
    job.open(0.0)
    found = job.next_line(0.0)
    assert found is not None
    job.note_reply(found, BatchResponse(200, "r", {}))
    assert job.next_line(batch.expires_at - 1.0) is not None  # and is never answered
    assert job.next_line(float(batch.expires_at)) is None
    assert job.finish_if_done(float(batch.expires_at))
    assert batch.status is BatchStatus.EXPIRED and batch.times["expired"] == batch.expires_at
    shelf = library.shelf(WHO)
    late = map(json.loads, shelf.data(batch.error_file_id or "").read_bytes().splitlines())
    assert [each["error"]["code"] for each in late] == ["batch_expired"]


def test_states() -> None:
    assert set(TRANSITIONS) | TERMINAL_STATUSES == set(BatchStatus)
    reached = {after for later in TRANSITIONS.values() for after in later}
    assert reached == set(BatchStatus) - {BatchStatus.VALIDATING}


def test_lines_that_are_too_long_are_wrong(tmp_path: Path) -> None:
    library = BatchStore(tmp_path)
    batch = make_batch(library, 1, line("a", prompt="x" * 2000), line("b"))
    job = BatchJob(library, batch, 1000)
    job.open(0.0)
    found = job.next_line(0.0)
    assert found is not None and found.custom_id == "b" and batch.total == 2
    assert batch.failed == 1
    job.close()


def test_records_of_another_version_are_not_there(tmp_path: Path) -> None:
    library = BatchStore(tmp_path)
    batch = make_batch(library, 1, line("a"))
    library.part(batch, "json").write_text('{"id": "batch_1", "mood": 1}')
    assert library.unfinished() == [] and library.batches(WHO) == []
    with pytest.raises(ApiError):
        library.get(WHO, batch.id)


def test_written_lines() -> None:
    asked = parse_batch_request(7, json.dumps(line("a")).encode(), COMPLETIONS)
    assert asked == BatchRequest(7, "a", {"prompt": "x", "max_tokens": 3})
    assert (
        parse_request_number(encode_output_line("batch_9", asked, BatchResponse(200, "r", {}))) == 7
    )
    assert parse_request_number(b'{"id": "batch_req_9_') is None
