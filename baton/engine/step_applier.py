"""Applies the output of a step to the requests that the step computed."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

from baton.core.answer_length_predictor import AnswerLengthPredictor
from baton.core.ids import TokenId
from baton.core.request import PROMPT_PREFILLED, FinishReason, RequestOutput, TokenLogprob
from baton.core.task import Task
from baton.core.tenant import tenant_tag
from baton.engine.inflight import InflightStep
from baton.engine.plan import Row, SampledToken, StepOutput
from baton.engine.result import PrefillProgress, SealedRun, StepResult
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase, Sequence
from baton.engine.speculation.speculator import Speculator

PUBLISH_INTERVAL_BLOCKS = 16
"""Number of newly sealed blocks after which a running request reports them, so that the store has
them even if the worker crashes before the answer ends."""


class StepApplier:
    """Advances sequences by what a step computed. If a request's answer is complete, ``finish`` is
    called for it, and the length of the answer is recorded in ``answer_lengths``. For
    ``num_first_tokens`` and ``num_late_first_tokens``, see
    :class:`baton.engine.result.EngineStats`."""

    def __init__(
        self,
        scheduler: Scheduler,
        answer_lengths: AnswerLengthPredictor,
        eos_token_ids: frozenset[TokenId],
        finish: Callable[[Sequence], None],
        speculator: Speculator | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._answer_lengths = answer_lengths
        self._eos_token_ids = eos_token_ids
        self._finish = finish
        self._speculator = speculator
        self.num_first_tokens = self.num_late_first_tokens = 0

    def apply(
        self, flight: InflightStep, output: StepOutput, result: StepResult, now_seconds: float
    ) -> StepResult:
        """Apply the output to the plan's requests, except those that have ended. Return ``result``
        with the requests' outputs, progress and sealed blocks added. ``now_seconds`` is the time of
        the output."""
        outputs: list[RequestOutput] = []
        progress: list[PrefillProgress] = []
        sealed: list[SealedRun] = []
        rows = flight.plan.rows
        scores = output.prompt_logprobs or ((),) * len(rows)
        row_results = zip(rows, flight.sequences, output.sampled, scores, strict=True)
        for index, (row, sequence, sampled, scored) in enumerate(row_results):
            if sequence.phase is Phase.FINISHED:
                continue
            following = output.following.get(index, ())
            sequence.num_computed_tokens = row.start + len(row.token_ids)
            if row.num_drafts:
                self._apply_accepted_drafts(sequence, row, len(following))
            assert len(scored) == len(row.prompt_logprob_targets), f"scores of {row.request_id}"
            if row.prompt_logprob_targets:
                sequence.prompt_logprobs[row.start :] = scored
            self._scheduler.seal_computed(sequence)
            num_sealed = sequence.num_sealed_blocks
            if sequence.task is Task.PREFILL:
                progress.append(_prefill_progress(sequence))
            assert (sampled is not None) == row.sample or row.mask, f"row of {row.request_id}"
            if sampled is not None:
                self._count_first_token(sequence, now_seconds)
                outputs.append(self._apply_sampled_tokens(sequence, (sampled, *following)))
            elif row.sample:
                outputs.append(self._fail_without_allowed_token(sequence))
            if num_sealed > sequence.num_published_blocks:
                sealed += collect_sealed_run(sequence, num_sealed)
        return StepResult(
            tuple(outputs),
            tuple(progress),
            tuple(sealed),
            result.work,
            result.admitted,
            result.preempted,
        )

    def _count_first_token(self, sequence: Sequence, now_seconds: float) -> None:
        """Count the token that was sampled for a sequence, if it is the first one of a request with
        a deadline."""
        deadline = sequence.waiting_prompt.deadline_seconds
        if sequence.num_known_tokens == len(sequence.spec.token_ids) and deadline < math.inf:
            self.num_first_tokens += 1
            self.num_late_first_tokens += now_seconds > deadline

    def _apply_accepted_drafts(self, sequence: Sequence, row: Row, num_accepted: int) -> None:
        """Append the row's first ``num_accepted`` drafts, which are right. The KV of the other
        drafts does not count as computed: later tokens overwrite it. None of the drafts ends the
        answer, and the runner has already advanced the grammar by the accepted ones."""
        first = len(row.token_ids) - row.num_drafts
        for token_id in row.token_ids[first : first + num_accepted]:
            sequence.append_token(token_id)
        sequence.num_computed_tokens -= row.num_drafts - num_accepted
        self._scheduler.charge_accepted(sequence, num_accepted)
        assert self._speculator is not None, "only a speculator drafts"
        self._speculator.record_verified(sequence, row.num_drafts, num_accepted)

    def _apply_sampled_tokens(self, sequence: Sequence, tokens: Seq[SampledToken]) -> RequestOutput:
        """Append the last of the sampled ``tokens``; those before it are accepted drafts, which are
        appended already. The request then continues, ends, or, if its task is PREFILL, waits for
        its KV to be read."""
        spec, sampled = sequence.spec, tokens[-1]
        num_known = sequence.num_known_tokens
        sequence.append_token(sampled.token_id)
        num_answered = sequence.num_answer_tokens
        finish_reason = sequence.finish_reason(self._eos_token_ids)
        if sequence.task is Task.PREFILL:
            sequence.constraint = None  # the decode worker replays the tokens into its own grammar
            self._scheduler.change_phase(sequence, Phase.EXPORTED)
        elif finish_reason is not None:
            is_truncated = finish_reason is FinishReason.LENGTH
            self._answer_lengths.record_length(spec.owner, num_answered, was_truncated=is_truncated)
            self._finish(sequence)
        elif sequence.constraint is not None:
            sequence.constraint.accept(sampled.token_id)
        output = RequestOutput(
            spec.request_id,
            spec.epoch,
            num_answered - len(tokens),
            tuple(token.token_id for token in tokens),
            logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
            finish_reason=finish_reason,
        )
        if num_known == len(spec.token_ids):
            output.cached_tokens = sequence.num_cached_tokens
            output.prompt_logprobs = _pop_prompt_logprobs(sequence)
        return output

    def _fail_without_allowed_token(self, sequence: Sequence) -> RequestOutput:
        """End a request whose grammar allows no next token, with an error. Other requests go on."""
        spec, constraint = sequence.spec, sequence.constraint
        assert constraint is not None, f"{spec.request_id} has no grammar"
        self._finish(sequence)
        return RequestOutput(
            spec.request_id,
            spec.epoch,
            sequence.num_known_tokens - spec.num_prompt_tokens,
            (),
            finish_reason=FinishReason.ERROR,
            error=constraint.error or "the grammar allows no token here",
            cached_tokens=sequence.num_cached_tokens,
            details={"error_status": "INVALID_ARGUMENT", PROMPT_PREFILLED: "true"},
        )


def _prefill_progress(sequence: Sequence) -> PrefillProgress:
    first_start = sequence.num_cached_at_admission
    assert first_start is not None, "the sequence was admitted"
    return PrefillProgress(
        sequence.request_id,
        sequence.num_computed_tokens,
        sequence.block_ids,
        sealed_keys=tuple(sequence.block_keys[: sequence.num_sealed_blocks]),
        num_cached_tokens=first_start,
    )


def _pop_prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob, ...]:
    """Return the prompt logprobs and clear them: they are reported with the first output only."""
    logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
    return logprobs


def collect_sealed_run(sequence: Sequence, num_sealed: int) -> list[SealedRun]:
    """Return the request's sealed blocks that have not been published yet, as a list with one
    :class:`SealedRun`. Return an empty list if there are none, or if it is too early to publish
    them.

    If the request has ended or is exported, all unpublished blocks are returned. If it is still
    running, they are returned once its prompt is computed and there are at least
    :data:`PUBLISH_INTERVAL_BLOCKS` of them. With an attention window, they are returned before the
    prompt is computed, too, because blocks may be dropped and reused until then. ``num_sealed`` is
    the number of the request's sealed blocks; it is passed in because a request that has ended has
    already released its blocks."""
    num_new = num_sealed - sequence.num_published_blocks
    has_ended = sequence.phase in (Phase.EXPORTED, Phase.FINISHED)
    is_growing = sequence.num_uncomputed_tokens == 1 or sequence.spec.attention_window is not None
    is_due = num_new >= PUBLISH_INTERVAL_BLOCKS and is_growing
    if num_new <= 0 or not (has_ended or is_due):
        return []
    tag = sequence.spec.tenant or tenant_tag(sequence.spec.tenant_salt)
    run = SealedRun(
        tuple(sequence.block_keys[:num_sealed]),
        sequence.num_published_blocks,
        tag,
        sequence.spec.exact_kv,
    )
    sequence.num_published_blocks = num_sealed
    return [run]
