"""What the conductor believes of its workers: their last reports, and what was sent since."""

from bisect import insort
from collections import deque
from dataclasses import dataclass

from baton.core.cost import DecodeCost
from baton.core.ids import WorkerId
from conductor.policy.decision import Decision
from conductor.policy.local_prefill import MAX_LOCAL_PREFILL_SHARE
from conductor.policy.snapshot import (
    DecodeView,
    PolicyQuery,
    PrefillView,
    QueuedPrefill,
    WorkerPool,
)

MAX_UNREPORTED = 4096
"""Requests to one worker between two of its reports; more are not counted twice, but late."""


ADVANCE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class PrefillLoadReport:
    """At ``at_seconds``: its step lasts ``busy_seconds`` more, and then ``queue`` waits, by
    deadline."""

    at_seconds: float
    busy_seconds: float
    queue: tuple[QueuedPrefill, ...]
    num_requests: int
    queued_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeLoadReport:
    """None is what has not changed."""

    at_seconds: float
    num_requests: int
    context_tokens: int
    promised_tokens: int
    cost: DecodeCost | None = None
    capacity_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _DispatchedPrompt:
    at_seconds: float
    due: QueuedPrefill
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _DispatchedAnswer:
    at_seconds: float
    context_tokens: int
    promised_tokens: int


class LoadTracker:
    """Both pools as the policies see them. Of ``num_conductors``, each sends as much, and has the
    same reports to judge by: until a worker reports, it is taken to get that many times the
    prompts that it was sent from here."""

    def __init__(self, num_conductors: int = 1) -> None:
        self.num_conductors = num_conductors
        self.prefills: WorkerPool[PrefillView] = WorkerPool()
        self.decodes: WorkerPool[DecodeView] = WorkerPool()
        self._prompts: dict[WorkerId, deque[_DispatchedPrompt]] = {}
        self._answers: dict[WorkerId, deque[_DispatchedAnswer]] = {}
        self._advanced_seconds = 0.0

    # -- who is there ----------------------------------------------------------------------

    def add_prefill(self, view: PrefillView) -> None:
        self.prefills.put(view)
        self._prompts[view.id] = deque(maxlen=MAX_UNREPORTED)

    def add_decode(self, view: DecodeView) -> None:
        self.decodes.put(view)
        self._answers[view.id] = deque(maxlen=MAX_UNREPORTED)

    def remove(self, worker: WorkerId) -> None:
        if worker in self.prefills:
            self.prefills.remove(worker)
            del self._prompts[worker]
        if worker in self.decodes:
            self.decodes.remove(worker)
            del self._answers[worker]

    # -- what they say ---------------------------------------------------------------------

    def report_prefill(self, worker: WorkerId, report: PrefillLoadReport) -> None:
        """Of whom nobody knows (yet, or any more), nothing is noted."""
        if worker not in self.prefills:
            return
        view, sent = self.prefills.take(worker), self._prompts[worker]
        while sent and sent[0].at_seconds <= report.at_seconds:
            sent.popleft()
        view.busy_until_seconds = report.at_seconds + report.busy_seconds
        view.queue = list(report.queue)
        view.free_at_seconds = view.busy_until_seconds + sum(d.work_seconds for d in view.queue)
        view.num_requests, view.queued_tokens = report.num_requests, report.queued_tokens
        for prompt in sent:
            _add_prompt(view, prompt)
        self.prefills.put(view)

    def report_decode(self, worker: WorkerId, report: DecodeLoadReport) -> None:
        if worker not in self.decodes:
            return
        view, sent = self.decodes.take(worker), self._answers[worker]
        while sent and sent[0].at_seconds <= report.at_seconds:
            sent.popleft()
        if report.cost is not None:
            view.cost, view.measured = report.cost, True
        if report.capacity_tokens is not None:
            view.capacity_tokens = report.capacity_tokens
        view.num_requests = report.num_requests
        view.context_tokens = report.context_tokens
        view.promised_tokens = report.promised_tokens
        view.as_of_seconds = report.at_seconds
        for answer in sent:
            _add_answer(view, answer)
        self.decodes.put(view)

    def advance(self, now_seconds: float, answer_tokens: float) -> None:
        """Since its last report a decode worker has ended answers, evenly: all that it has within
        one answer's time. Looks at every worker, but not more often than ten times a second."""
        if now_seconds - self._advanced_seconds < ADVANCE_SECONDS:
            return
        self._advanced_seconds = now_seconds
        for view in list(self.decodes):
            passed = now_seconds - view.as_of_seconds
            if passed <= 0 or not view.promised_tokens:
                continue
            share = min(passed / max(view.step_seconds() * answer_tokens, passed), 1.0)
            self.decodes.take(view.id)
            view.as_of_seconds = now_seconds
            view.promised_tokens -= int(view.promised_tokens * share)
            view.context_tokens -= int(view.context_tokens * share)
            self.decodes.put(view)

    # -- what was sent ---------------------------------------------------------------------

    def dispatched(
        self, now_seconds: float, query: PolicyQuery, decision: Decision, answer_tokens: float
    ) -> None:
        """The request goes there. One worker may do all of it: of a prefill worker the reading
        counts, of a decode worker the writing."""
        reader = decision.prefill or decision.decode
        if reader in self.prefills:
            view = self.prefills.take(reader)
            own = view.cost.seconds(query.num_tokens)
            work = decision.service_seconds * self.num_conductors
            due = QueuedPrefill(now_seconds + query.first_token_seconds + own, work)
            prompt = _DispatchedPrompt(now_seconds, due, query.num_tokens)
            self._prompts[view.id].append(prompt)
            _add_prompt(view, prompt)
            self.prefills.put(view)
        if decision.decode in self.decodes:
            decode = self.decodes.take(decision.decode)
            if decision.prefill is None:
                _record_local_prefill(
                    decode, now_seconds, decision.service_seconds * self.num_conductors
                )
            grown = query.num_tokens + int(min(answer_tokens, query.max_new_tokens))
            answer = _DispatchedAnswer(now_seconds, query.num_tokens, grown)
            self._answers[decode.id].append(answer)
            if not decode.promised_tokens:
                decode.as_of_seconds = now_seconds
            _add_answer(decode, answer)
            self.decodes.put(decode)


def _record_local_prefill(view: DecodeView, now_seconds: float, seconds: float) -> None:
    began = max(view.reads_until_seconds, now_seconds)
    view.reads_until_seconds = began + seconds / MAX_LOCAL_PREFILL_SHARE


def _add_prompt(view: PrefillView, prompt: _DispatchedPrompt) -> None:
    _advance_queue(view, prompt.at_seconds)
    view.busy_until_seconds = max(view.busy_until_seconds, prompt.at_seconds)
    insort(view.queue, prompt.due)
    view.free_at_seconds = max(view.free_at_seconds, prompt.at_seconds) + prompt.due.work_seconds
    view.num_requests += 1
    view.queued_tokens += prompt.num_tokens


def _advance_queue(view: PrefillView, now_seconds: float) -> None:
    """What must have been computed by now leaves the queue, and of the next one that part."""
    done = 0
    for due in view.queue:
        if view.busy_until_seconds + due.work_seconds > now_seconds:
            break
        view.busy_until_seconds += due.work_seconds
        done += 1
    del view.queue[:done]
    if view.queue and view.busy_until_seconds < now_seconds:
        first = view.queue[0]
        left = first.work_seconds - (now_seconds - view.busy_until_seconds)
        view.queue[0] = QueuedPrefill(first.deadline_seconds, left)


def _add_answer(view: DecodeView, answer: _DispatchedAnswer) -> None:
    view.num_requests += 1
    view.context_tokens += answer.context_tokens
    view.promised_tokens += answer.promised_tokens
