"""Tests the table of a worker's jobs, which finds them by placement and by request."""

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.worker.job import Job, placement_id
from baton.worker.job_table import JobTable
from baton.worker.output_stream import OutputStream

STREAM = OutputStream(lambda *_: None, lambda *_: None, lambda _: None)


def job(epoch: int) -> Job:
    spec = RequestSpec(RequestId("r"), Epoch(epoch), (TokenId(1),), 1, SamplingParams(max_tokens=1))
    placed = RequestSpec(placement_id(spec), spec.epoch, spec.token_ids, 1, spec.sampling)
    return Job(spec.request_id, placed, Task.PREFILL, STREAM)


def test_the_latest_placement_stays_the_latest_when_an_older_one_ends() -> None:
    table, old, new = JobTable(), job(1), job(2)
    table.add(old)
    table.add(new)
    assert list(table) == [old, new]
    table.remove(old)
    assert (old in table, new in table, len(table)) == (False, True, 1)
    assert table.latest(RequestId("r")) is new
    assert table.get(RequestId("r/1")) is None and table.get(RequestId("r/2")) is new


def test_jobs_may_be_removed_while_iterating() -> None:
    table = JobTable()
    table.add(job(1))
    table.add(job(2))
    for each in table:
        table.remove(each)
    assert not table and table.latest(RequestId("r")) is None
