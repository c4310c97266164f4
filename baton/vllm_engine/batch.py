"""Translates plans to the messages with which vLLM's scheduler would drive vLLM's workers."""

from array import array
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from baton.core.ids import BlockId, RequestId, TokenId
from baton.engine.plan import Plan, Row
from baton.vllm_engine.worker import SampledStep

GREEDY = SamplingParams(temperature=0.0)
"""vLLM's workers are told that every request is greedy, since Baton's sampler chooses the token."""

UNUSED_TOKEN = 0
"""The token that is sent to vLLM's workers in place of tokens that are computed already. The
workers don't use it: they need only the KV of these tokens."""


@dataclass(frozen=True, slots=True)
class _KnownRequest:
    """A request in the batch of vLLM's workers. ``next_token`` is the token that was sampled last;
    its position is ``next_position``, and its KV is not computed yet. ``id`` is the id under which
    the workers know the request, and ``num_outputs`` is the number of tokens that were sampled
    under it."""

    id: str
    block_ids: tuple[BlockId, ...]
    next_position: int
    next_token: TokenId
    num_outputs: int

    def continues_with(self, row: Row) -> bool:
        """Whether the only input of ``row`` is the token that was sampled last, and its block table
        begins with the blocks that the request had before."""
        return (
            row.start == self.next_position
            and row.token_ids == (self.next_token,)
            and row.block_ids[: len(self.block_ids)] == self.block_ids
        )


class WorkerBatch:
    """Mirrors the persistent batch of vLLM's workers.

    A decode that continues the request's row of the previous step is sent as a cached request. Any
    other row (a chunk of a prompt, the first token after a KV transfer, a request that was paused
    or preempted) is sent as a new request with a new id. That costs vLLM's workers one copy of the
    token ids; the KV stays where it is."""

    def __init__(self) -> None:
        self._known: dict[RequestId, _KnownRequest] = {}
        self._ids: dict[RequestId, str] = {}
        self._num_ids = 0
        self._sent: set[str] = set()

    def messages(self, plan: Plan) -> SchedulerOutput:
        """Return the message that makes vLLM's workers run ``plan``. Call :meth:`record` with the
        plan's result before calling this again."""
        self._ids = {}
        new: list[NewRequestData] = []
        continued: list[tuple[_KnownRequest, Row]] = []
        for row in plan.rows:
            known = self._known.get(row.request_id)
            if known is not None and known.continues_with(row):
                continued.append((known, row))
                self._ids[row.request_id] = known.id
            else:
                new.append(self._new_request(row))
        counts = {self._ids[row.request_id]: len(row.token_ids) for row in plan.rows}
        finished, self._sent = self._sent - counts.keys(), set(counts)
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=_continue_requests(continued),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )

    def rows_by_id(self, plan: Plan) -> dict[str, Row]:
        """Return the rows of the latest plan that sample a token or need prompt logprobs, by the
        ids under which vLLM's workers know their requests."""
        return {
            self._ids[row.request_id]: row
            for row in plan.rows
            if row.sample or row.prompt_logprob_targets
        }

    def id_of(self, row: Row) -> str:
        """Return the id under which vLLM's workers know the request of ``row``, a row of the latest
        plan."""
        return self._ids[row.request_id]

    def record(self, plan: Plan, step: SampledStep) -> None:
        """Record what the workers have sampled for the plan."""
        before, self._known = self._known, {}
        for row in plan.rows:
            request_id = self._ids[row.request_id]
            sampled = step.sampled.get(request_id)
            if sampled is None:
                continue
            known = before.get(row.request_id)
            num_before = known.num_outputs if known is not None and known.id == request_id else 0
            self._known[row.request_id] = _KnownRequest(
                request_id, row.block_ids, row.context_tokens, sampled.token_id, num_before + 1
            )

    def _new_request(self, row: Row) -> NewRequestData:
        self._num_ids += 1
        request_id = self._ids[row.request_id] = str(self._num_ids)
        return NewRequestData(
            req_id=request_id,
            prompt_token_ids=_known_tokens(row),
            mm_features=[],
            sampling_params=GREEDY,
            pooling_params=None,
            block_ids=(list[int](row.block_ids),),
            num_computed_tokens=row.start,
            lora_request=None,
        )


def _known_tokens(row: Row) -> "array[int]":
    """Return the tokens up to the end of ``row``, as an array, which vLLM's workers copy a thousand
    times faster than a list."""
    tokens = array("i", [UNUSED_TOKEN]) * row.start
    tokens.extend(row.token_ids)
    return tokens


def _continue_requests(requests: list[tuple[_KnownRequest, Row]]) -> CachedRequestData:
    return CachedRequestData(
        req_ids=[known.id for known, _ in requests],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[_new_blocks(known, row) for known, row in requests],
        num_computed_tokens=[row.start for _, row in requests],
        num_output_tokens=[known.num_outputs for known, _ in requests],
    )


def _new_blocks(known: _KnownRequest, row: Row) -> tuple[list[int]] | None:
    added = row.block_ids[len(known.block_ids) :]
    return (list[int](added),) if added else None
