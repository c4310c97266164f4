"""Measures a mock worker's load."""

from collections.abc import Iterable
from dataclasses import replace

from baton.core.answer_length_predictor import revised_prediction
from baton.core.cost import DecodeCost
from baton.core.task import Task
from baton.core.worker_load import WorkerLoad
from baton.worker.answer_lengths import UNKNOWN_ANSWER_TOKENS, AnswerLengthStats
from baton.worker.mock.job import MockJob
from baton.worker.mock.prefill_queue import MockPrefillQueue


def measure_mock_load(
    prefill_queue: MockPrefillQueue,
    decode_cost: DecodeCost,
    jobs: Iterable[MockJob],
    answers: AnswerLengthStats,
    now: float,
) -> WorkerLoad:
    """Measure the load, except for the numbers of blocks and the wall-clock time."""
    num_overdue = prefill_queue.num_overdue(now)
    load = WorkerLoad(
        running=prefill_queue.num_running,
        waiting=len(prefill_queue.waiting),
        queued_tokens=prefill_queue.queued_tokens,
        queue=prefill_queue.queue(now),
        prefill_cost=prefill_queue.cost,
        prefill_error=0.0,
        num_first_tokens=prefill_queue.num_first_tokens + num_overdue,
        num_late_first_tokens=prefill_queue.num_late_first_tokens + num_overdue,
        decode_cost=decode_cost,
        answer_tokens=answers.mean,
        short_answer_tokens=answers.short,
    )
    expected = int(answers.mean or UNKNOWN_ANSWER_TOKENS)
    decode_jobs = [job for job in jobs if job.task is not Task.PREFILL]
    return replace(
        load,
        running=load.running + len(decode_jobs),
        decode_requests=len(decode_jobs),
        context_tokens=sum(job.num_known for job in decode_jobs),
        promised_tokens=sum(_expected_length(job, expected) for job in decode_jobs),
    )


def _expected_length(job: MockJob, expected: int) -> int:
    """Predict the job's final length, assuming an average answer."""
    most = job.spec.sampling.max_tokens
    length = revised_prediction(min(expected, most), job.next_index, most)
    return max(job.num_known, job.spec.num_prompt_tokens + length)
