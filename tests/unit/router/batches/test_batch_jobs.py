"""Tests that a batch's job resumes where it stopped, whenever its router was killed."""

import json
from pathlib import Path

import pytest

from router.batches.batch import TERMINAL_STATUSES, TRANSITIONS, BatchStatus
from router.batches.batch_job import BatchJob
from router.batches.batch_request import (
    BatchRequest,
    BatchResponse,
    InputLine,
    encode_output_line,
    parse_batch_request,
    parse_request_number,
)
from router.batches.batch_store import BatchStore
from router.errors import ApiError
from router.limits import MAX_VALUES
from tests.unit.router.batch_harness import COMPLETIONS, TENANT, batch_line, make_batch

# -- restarts -------------------------------------------------------------------------------------


def test_job_resumes_where_it_stopped(tmp_path: Path) -> None:
    """The router is killed after any number of lines, even in the middle of writing one."""
    store = BatchStore(tmp_path)
    lines = [batch_line(str(number)) for number in range(4)] + ["wrong"]
    batch = make_batch(store, 1, *lines)
    completed: list[int] = []
    for life in range(3):
        job = BatchJob(store, store.list_unfinished()[0], 1000)
        job.open(0.0)
        assert (job.batch.completed, job.batch.failed) == (life, 0)
        found = job.next_request(0.0)
        assert found is not None
        completed.append(found.number)
        job.record_response(found, BatchResponse(200, "r", b"{}"))
        job.close()
        with store.path(batch, "output").open("ab") as part:
            part.write(b'{"id": "batch_req_1_3", "custom')
    job = BatchJob(store, store.list_unfinished()[0], 1000)
    job.open(0.0)
    while (found := job.next_request(0.0)) is not None:
        completed.append(found.number)
        job.record_response(found, BatchResponse(400 if found.number == 3 else 200, "r", b"{}"))
    assert job.finish_if_done(5.0)
    assert completed == [0, 1, 2, 3]
    assert (job.batch.completed, job.batch.failed, job.batch.total) == (3, 2, 5)
    files = store.file_store(TENANT)
    output = files.data_path(job.batch.output_file_id or "").read_bytes().splitlines()
    assert [parse_request_number(each) for each in output] == [0, 1, 2]


@pytest.mark.parametrize("status", [BatchStatus.FINALIZING, BatchStatus.CANCELLING])
def test_interrupted_completion_is_finished_after_a_restart(
    tmp_path: Path, status: BatchStatus
) -> None:
    """The router is killed after it has published the output file and before it records the batch
    as completed."""
    store = BatchStore(tmp_path)
    batch = make_batch(store, 1, batch_line("a"), batch_line("b"))
    job = BatchJob(store, batch, 1000)
    job.open(0.0)
    found = job.next_request(0.0)
    assert found is not None
    job.record_response(found, BatchResponse(200, "r", b"{}"))
    batch.set_status(status, 1.0)
    job.save()
    job._publish_results(2.0)
    job.close()
    again = BatchJob(store, store.list_unfinished()[0], 1000)
    again.open(3.0)
    assert again.next_request(3.0) is None
    assert again.finish_if_done(3.0)
    assert again.batch.is_finished and again.batch.completed == 1
    files = store.file_store(TENANT)
    assert [file.purpose for file in files.list_files()] == ["batch", "batch_output"]
    assert files.get(again.batch.output_file_id or "").bytes > 0


def test_unanswered_lines_expire_with_the_completion_window(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    batch = make_batch(store, 1, *(batch_line(str(number)) for number in range(3)))
    job = BatchJob(store, batch, 1000)
    job.open(0.0)
    found = job.next_request(0.0)
    assert found is not None
    job.record_response(found, BatchResponse(200, "r", b"{}"))
    assert job.next_request(batch.expires_at - 1.0) is not None  # this request is never answered
    assert job.next_request(float(batch.expires_at)) is None
    assert job.finish_if_done(float(batch.expires_at))
    assert batch.status is BatchStatus.EXPIRED and batch.times["expired"] == batch.expires_at
    files = store.file_store(TENANT)
    late = map(json.loads, files.data_path(batch.error_file_id or "").read_bytes().splitlines())
    assert [each["error"]["code"] for each in late] == ["batch_expired"]


def test_batch_state_transitions_are_complete() -> None:
    assert set(TRANSITIONS) | TERMINAL_STATUSES == set(BatchStatus)
    reached = {after for later in TRANSITIONS.values() for after in later}
    assert reached == set(BatchStatus) - {BatchStatus.VALIDATING}


def test_line_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    batch = make_batch(store, 1, batch_line("a", prompt="x" * 2000), batch_line("b"))
    job = BatchJob(store, batch, 1000)
    job.open(0.0)
    found = job.next_request(0.0)
    assert found is not None and found.custom_id == "b" and batch.total == 2
    assert batch.failed == 1
    job.close()


def test_requests_that_are_put_back_are_read_again(tmp_path: Path) -> None:
    """Requests that wait for a retry keep no body. Reading their lines again does not disturb the
    reading of further lines, and empty lines are not counted."""
    store = BatchStore(tmp_path)
    bodies = [f'{{"prompt":"{name}","priority":3}}'.encode() for name in ("aa", "b" * 300, "c")]
    first, second, third = (
        json.dumps(batch_line(name[0], prompt=name)).encode() for name in ("aa", "b" * 300, "c")
    )
    batch = make_batch(store, 1, batch_line("x"))
    data = b"\n \n" + first + b"\r\n\n" + second + b"\n\n\n" + third
    store.file_store(TENANT).data_path(batch.input_file_id).write_bytes(data)
    job = BatchJob(store, batch, 1000)
    job.open(0.0)
    requests = [job.next_request(0.0) for _ in range(2)]
    for number, request in enumerate(requests):
        assert request is not None and request.number == number
        assert request.take_body() == bodies[number] and request.body == b""
        job.put_back(request)
    assert [request.body for request in job._retries] == [b"", b""]
    again = [job.next_request(0.0) for _ in range(3)]
    assert [(each.number, each.custom_id, each.body) for each in again if each is not None] == [
        (0, "a", bodies[0]), (1, "b", bodies[1]), (2, "c", bodies[2]),
    ]  # fmt: skip
    assert job.next_request(0.0) is None
    job.close()


def test_suspects_keep_no_body(tmp_path: Path) -> None:
    """Lines that were in flight when a router died wait behind all others."""
    store = BatchStore(tmp_path)
    make_batch(store, 1, *(batch_line(name, prompt=name) for name in "abc"))
    job = BatchJob(store, store.list_unfinished()[0], 1000)
    job.open(0.0)
    assert [job.next_request(0.0) is not None for _ in range(2)] == [True, True]
    job.close()  # the router dies with two lines in flight
    job = BatchJob(store, store.list_unfinished()[0], 1000)
    job.open(0.0)
    other = job.next_request(0.0, suspects=False)
    assert other is not None and other.custom_id == "c"
    assert job.next_request(0.0, suspects=False) is None
    assert [(each.number, each.body) for each in job._suspects] == [(0, b""), (1, b"")]
    suspect = job.next_request(0.0)
    assert suspect is not None and suspect.body == b'{"prompt":"a","priority":3}'
    job.close()


def test_batch_records_of_another_version_are_ignored(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    batch = make_batch(store, 1, batch_line("a"))
    store.path(batch, "json").write_text('{"id": "batch_1", "mood": 1}')
    assert store.list_unfinished() == [] and store.list_batches(TENANT) == []
    with pytest.raises(ApiError):
        store.get(TENANT, batch.id)


def test_request_number_is_recovered_from_an_output_line() -> None:
    line, data = InputLine(7, 0, 1), json.dumps(batch_line("a")).encode()
    request = parse_batch_request(line, data, COMPLETIONS, MAX_VALUES)
    assert request == BatchRequest(line, "a", b'{"prompt":"x","max_tokens":3,"priority":3}')
    assert (
        parse_request_number(encode_output_line("batch_9", request, BatchResponse(200, "r", b"{}")))
        == 7
    )
    assert parse_request_number(b'{"id": "batch_req_9_') is None
