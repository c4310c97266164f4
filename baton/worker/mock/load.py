"""What a mock worker reports of itself."""

from collections.abc import Iterable
from dataclasses import replace

from baton.core.answer_length_predictor import revised_prediction
from baton.core.cost import DecodeCost
from baton.core.task import Task
from baton.core.worker_load import WorkerLoad
from baton.worker.answer_lengths import AnswerLengthStats
from baton.worker.mock.job import MockJob
from baton.worker.mock.prefill_queue import MockPrefillQueue

UNKNOWN_ANSWER_TOKENS = 256.0
"""As for a real worker, before any has ended here."""


def measure_mock_load(
    reading: MockPrefillQueue,
    decode_cost: DecodeCost,
    jobs: Iterable[MockJob],
    answers: AnswerLengthStats,
    now: float,
) -> WorkerLoad:
    """All but blocks, and the moment by the wall's clock."""
    load = WorkerLoad(
        running=reading.num_running,
        waiting=len(reading.waiting),
        queued_tokens=reading.queued_tokens,
        queue=reading.queue(now),
        prefill_cost=reading.cost,
        prefill_error=0.0,
        decode_cost=decode_cost,
        answer_tokens=answers.mean,
        short_answer_tokens=answers.short,
    )
    expected = int(answers.mean or UNKNOWN_ANSWER_TOKENS)
    writing = [job for job in jobs if job.task is not Task.PREFILL]
    return replace(
        load,
        running=load.running + len(writing),
        decode_requests=len(writing),
        context_tokens=sum(job.num_known for job in writing),
        promised_tokens=sum(_expected_length(job, expected) for job in writing),
    )


def _expected_length(job: MockJob, expected: int) -> int:
    """Its length in the end, if it gets as long as others do."""
    most = job.spec.sampling.max_tokens
    length = revised_prediction(min(expected, most), job.next_index, most)
    return max(job.num_known, job.spec.num_prompt_tokens + length)
