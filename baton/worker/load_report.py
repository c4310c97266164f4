"""Measures an engine's load, between two of its steps: then nothing is half done."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from baton.clock import Clock
from baton.core.answer_length_predictor import revised_prediction
from baton.core.cost import PrefillCost
from baton.core.ids import BlockKey
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.core.worker_load import MAX_QUEUED, QueuedWork, WorkerLoad
from baton.engine.engine import Engine
from baton.engine.sequence import Phase, Sequence

UNKNOWN_ANSWER_TOKENS = 256.0
"""What an answer is taken for before any has ended here."""


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request that this worker has, and its engine may not have yet: its prefix is being
    fetched, or its KV read. ``keys`` are those of its prompt's blocks, once they are known."""

    spec: RequestSpec
    task: Task
    keys: Seq[BlockKey] = ()


@dataclass(frozen=True, slots=True)
class _UnfinishedPrompt:
    """What is left of one; ``deadline_seconds`` from now on, infinite without one."""

    deadline_seconds: float
    num_tokens: int
    num_cached: int


def measure_load(
    engine: Engine, coming: Seq[IncomingRequest], clock: Clock, answer_tokens: float | None
) -> WorkerLoad:
    """All but what the engine does not know: answers, links."""
    here = {sequence.request_id for sequence in engine.sequences}
    coming = [each for each in coming if each.spec.request_id not in here]
    stats, cost = engine.stats(), engine.prefill_cost()
    load = WorkerLoad(
        running=stats.running,
        waiting=stats.waiting + stats.reserved,
        queued_tokens=stats.queued_tokens,
        free_blocks=stats.pool.free + stats.pool.idle,
        num_blocks=stats.pool.num_blocks,
        at_seconds=clock.wall_nanoseconds() / 1e9,
        prefill_cost=cost,
        prefill_error=engine.prefill_error(),
        decode_cost=engine.decode_cost(),
    )
    prompts = _prompts(engine, coming, clock.monotonic(), cost)
    load = replace(load, queued_tokens=sum(prompt.num_tokens for prompt in prompts))
    if cost is not None:
        load = replace(load, queue=_reported_queue(prompts, cost))
    return _with_answers(load, engine, coming, answer_tokens or UNKNOWN_ANSWER_TOKENS)


def _prompts(
    engine: Engine, coming: Seq[IncomingRequest], now: float, cost: PrefillCost | None
) -> list[_UnfinishedPrompt]:
    prompts = []
    for sequence in engine.sequences:
        if sequence.phase is Phase.WAITING:
            cached = sequence.waiting.cached_tokens
        elif sequence.phase is Phase.RUNNING and sequence.num_remaining > 1:
            cached = sequence.num_computed
        else:
            continue
        deadline = sequence.waiting.deadline_seconds - now
        prompts.append(_UnfinishedPrompt(deadline, sequence.num_known - cached, cached))
    for each in coming:
        if each.task is not Task.DECODE:
            prompts.append(_coming_prompt(engine, each, cost))
    return prompts


def _coming_prompt(
    engine: Engine, coming: IncomingRequest, cost: PrefillCost | None
) -> _UnfinishedPrompt:
    """As if it had arrived now; it will have what is cached now, at least."""
    spec, deadline = coming.spec, math.inf
    length = len(spec.token_ids)
    cached = engine.num_cached_blocks(coming.keys) * engine.keys.block_tokens
    cached = min(cached, length - 1)
    if spec.first_token_seconds and cost is not None:
        deadline = spec.first_token_seconds + cost.seconds(length)
    return _UnfinishedPrompt(deadline, length - cached, cached)


def _reported_queue(prompts: list[_UnfinishedPrompt], cost: PrefillCost) -> tuple[QueuedWork, ...]:
    prompts = sorted(prompts, key=lambda prompt: prompt.deadline_seconds)
    queue = [
        QueuedWork(
            prompt.deadline_seconds if prompt.deadline_seconds < math.inf else None,
            cost.seconds(prompt.num_tokens, prompt.num_cached),
        )
        for prompt in prompts
    ]
    if len(queue) > MAX_QUEUED:
        rest = sum(work.work_seconds for work in queue[MAX_QUEUED - 1 :])
        queue[MAX_QUEUED - 1 :] = [QueuedWork(None, rest)]
    return tuple(queue)


def _with_answers(
    load: WorkerLoad, engine: Engine, coming: Seq[IncomingRequest], answer_tokens: float
) -> WorkerLoad:
    requests = context = promised = 0
    for sequence in engine.sequences:
        if sequence.task is not Task.PREFILL:
            requests += 1
            context += sequence.num_known
            promised += _expected_length(sequence, answer_tokens)
    for each in coming:
        if each.task is not Task.PREFILL:
            requests += 1
            context += len(each.spec.token_ids)
            promised += len(each.spec.token_ids) + min(int(answer_tokens), each.spec.max_new_tokens)
    return replace(load, decode_requests=requests, context_tokens=context, promised_tokens=promised)


def _expected_length(sequence: Sequence, answer_tokens: float) -> int:
    """Its length in the end, if it gets as long as others do."""
    num_prompt = sequence.spec.num_prompt_tokens
    most = sequence.max_tokens - num_prompt
    expected = revised_prediction(
        min(int(answer_tokens), most), sequence.num_known - num_prompt, most
    )
    return max(sequence.num_known, num_prompt + expected)
