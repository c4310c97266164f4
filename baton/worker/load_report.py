"""Measures a worker's load between two engine steps, when the engine's state is consistent."""

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
from baton.worker.answer_lengths import UNKNOWN_ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request on this worker that may not be in the engine yet, because its prefix is being
    fetched or its KV is being imported. ``keys`` are the block keys of its prompt; it is empty
    until they have been computed."""

    spec: RequestSpec
    task: Task
    keys: Seq[BlockKey] = ()


@dataclass(frozen=True, slots=True)
class _UnfinishedPrompt:
    """A prompt that is not fully computed. ``num_tokens`` tokens are still to be computed; the
    ``num_cached`` tokens before them are computed or cached. ``deadline_seconds`` is relative to
    now; it is infinite if the prompt has no deadline."""

    deadline_seconds: float
    num_tokens: int
    num_cached: int


def measure_load(
    engine: Engine, incoming: Seq[IncomingRequest], clock: Clock, answer_tokens: float | None
) -> WorkerLoad:
    """Measure the load, except for the values that the engine does not know (answer lengths, link
    speeds). Call it in the engine's thread."""
    in_engine = {sequence.request_id for sequence in engine.sequences}
    incoming = [each for each in incoming if each.spec.request_id not in in_engine]
    stats, cost, config = engine.stats(), engine.prefill_cost(), engine.config
    now = clock.monotonic()
    num_overdue = sum(_is_overdue(sequence, now) for sequence in engine.sequences)
    load = WorkerLoad(
        running=stats.running,
        waiting=stats.waiting + stats.reserved,
        queued_tokens=stats.queued_tokens,
        free_blocks=(stats.pool.free + stats.pool.idle) // config.num_groups,
        num_blocks=stats.pool.num_blocks // config.num_groups,
        at_seconds=clock.wall_nanoseconds() / 1e9,
        prefill_cost=cost,
        prefill_error=engine.prefill_cost_relative_error(),
        num_first_tokens=stats.num_first_tokens + num_overdue,
        num_late_first_tokens=stats.num_late_first_tokens + num_overdue,
        decode_cost=engine.decode_cost(),
        window_tokens=config.window_tokens,
        windowed_share=config.windowed_share,
    )
    prompts = _prompts(engine, incoming, now, cost)
    load = replace(load, queued_tokens=sum(prompt.num_tokens for prompt in prompts))
    if cost is not None:
        load = replace(load, queue=_reported_queue(prompts, cost))
    load = _with_answers(load, engine, incoming, answer_tokens or UNKNOWN_ANSWER_TOKENS)
    return _with_shared_steps(load, engine)


def _is_overdue(sequence: Sequence, now: float) -> bool:
    """Return whether the first token has not come by its deadline."""
    has_first_token = sequence.num_known_tokens > len(sequence.spec.token_ids)
    return sequence.waiting_prompt.deadline_seconds < now and not has_first_token


def _prompts(
    engine: Engine, incoming: Seq[IncomingRequest], now: float, cost: PrefillCost | None
) -> list[_UnfinishedPrompt]:
    prompts = []
    for sequence in engine.sequences:
        if sequence.phase is Phase.WAITING:
            cached = sequence.waiting_prompt.cached_tokens
        elif sequence.phase is Phase.RUNNING and sequence.num_uncomputed_tokens > 1:
            cached = sequence.num_computed_tokens
        else:
            continue
        deadline = sequence.waiting_prompt.deadline_seconds - now
        prompts.append(_UnfinishedPrompt(deadline, sequence.num_known_tokens - cached, cached))
    for each in incoming:
        if each.task is not Task.DECODE:
            prompts.append(_incoming_prompt(engine, each, cost))
    return prompts


def _incoming_prompt(
    engine: Engine, incoming: IncomingRequest, cost: PrefillCost | None
) -> _UnfinishedPrompt:
    """Describe the prompt of a request that is not in the engine yet. Its deadline is counted from
    now, and its cached tokens are those that are now on the device."""
    spec, deadline = incoming.spec, math.inf
    length = len(spec.token_ids)
    cached = min(engine.count_cached_tokens(incoming.keys, spec.attention_window), length - 1)
    if spec.ttft_slo_seconds and cost is not None:
        deadline = spec.ttft_slo_seconds + cost.seconds(length)
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
    load: WorkerLoad, engine: Engine, incoming: Seq[IncomingRequest], answer_tokens: float
) -> WorkerLoad:
    requests = context = promised = 0
    for sequence in engine.sequences:
        if sequence.task is not Task.PREFILL:
            requests += 1
            context += load.held_tokens(sequence.num_known_tokens)
            promised += load.held_tokens(_expected_length(sequence, answer_tokens))
    for each in incoming:
        if each.task is not Task.PREFILL:
            requests += 1
            known = len(each.spec.token_ids)
            context += load.held_tokens(known)
            expected = known + min(int(answer_tokens), each.spec.max_new_tokens)
            promised += load.held_tokens(expected)
    return replace(load, decode_requests=requests, context_tokens=context, promised_tokens=promised)


def _with_shared_steps(load: WorkerLoad, engine: Engine) -> WorkerLoad:
    """Add how much prompts and the answers that run now delay each other. A step with both has the
    time ``shared_step_seconds``."""
    answers = [
        sequence.num_known_tokens
        for sequence in engine.sequences
        if sequence.phase is Phase.RUNNING and sequence.num_uncomputed_tokens <= 1
    ]
    return replace(
        load,
        shared_step_seconds=engine.max_shared_step_seconds(len(answers), sum(answers)),
        prompt_slowdown=engine.prompt_slowdown(len(answers), sum(answers)),
    )


def _expected_length(sequence: Sequence, answer_tokens: float) -> int:
    """Predict the sequence's final length, assuming an average answer."""
    num_prompt = sequence.spec.num_prompt_tokens
    most = sequence.max_total_tokens - num_prompt
    expected = revised_prediction(
        min(int(answer_tokens), most), sequence.num_known_tokens - num_prompt, most
    )
    return max(sequence.num_known_tokens, num_prompt + expected)
