"""Drafts from a second, smaller model with the same tokenizer (Leviathan et al. 2023)."""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import replace

from baton.core.ids import BlockId, TokenId
from baton.core.request import SamplingParams
from baton.engine.block_pool import BlockPool
from baton.engine.plan import Plan, Row, Runner
from baton.engine.sequence import Sequence
from baton.engine.speculation.draft_source import DraftRequest
from baton.engine.speculation.draft_state import MAX_RATE, DraftState

MAX_CATCH_UP_TOKENS = 512
"""Maximum number of known tokens that the draft model computes in one step, for all sequences
together. A sequence with more gets its drafts some steps later."""

INITIAL_RATE = 0.6
"""Presumed share of right drafts, before any was verified."""

RATE_WEIGHT = 0.1
"""Weight of the latest draft in the moving average of a sequence's rate."""

MIN_RATE = 0.2
"""Below it, a sequence gets no drafts, except for a trial now and then."""

TRIAL_INTERVAL_TOKENS = 64
"""Number of tokens without a draft after which one token is drafted as a trial."""


class DraftModelState(DraftState):
    """What the draft model has of one sequence: the KV of ``num_computed`` tokens in ``block_ids``,
    the last of which may be ``drafts`` after the ``num_known`` tokens that were known then; and the
    share of its drafts that were right."""

    __slots__ = (
        *("block_ids", "call", "drafts", "num_computed", "num_known", "num_known_at_draft"),
        *("rate", "sampling"),
    )

    def __init__(self, sampling: SamplingParams) -> None:
        super().__init__()
        self.sampling = replace(sampling, logprobs=None, prompt_logprobs=None)
        self.block_ids: tuple[BlockId, ...] = ()
        self.num_computed = 0
        self.num_known = 0
        self.drafts: tuple[TokenId, ...] = ()
        self.rate = INITIAL_RATE
        self.num_known_at_draft = 0
        """Number of tokens that the sequence had when tokens were last drafted for it."""
        self.call = 0
        """Number of the last call of :meth:`DraftModelSource.draft` for this sequence."""

    def forget_wrong_drafts(self, token_ids: Seq[TokenId]) -> None:
        """Let KV of drafts that the sequence did not get be computed again."""
        known = token_ids[self.num_known : self.num_known + len(self.drafts)]
        pairs = zip(self.drafts, known, strict=False)
        right = next((n for n, (a, b) in enumerate(pairs) if a != b), len(known))
        # The last known token is always computed, since the first draft is sampled from it.
        self.num_computed = min(self.num_computed, self.num_known + right, len(token_ids) - 1)
        self.num_known, self.drafts = len(token_ids), ()


class DraftModelSource:
    """Implements :class:`baton.engine.speculation.draft_source.DraftSource` with ``runner``, which
    has a pool of its own.

    A draft is sampled with the request's own parameters and random draws, so that the two models
    choose the same token wherever their distributions are alike. The KV of sequences that got no
    draft for the longest time, or have ended, is dropped when blocks are needed."""

    def __init__(self, runner: Runner, max_model_tokens: int) -> None:
        self._runner = runner
        self._pool = BlockPool(runner.num_blocks)
        self._max_model_tokens = max_model_tokens
        self._num_calls = 0
        self._states: OrderedDict[int, DraftModelState] = OrderedDict()
        """The states that have blocks, by ``id()``, those that were used last at the end."""

    def observe(self, sequence: Sequence) -> bool:
        if sequence.draft_state is None:
            sequence.draft_state = DraftModelState(sequence.spec.sampling)
        return True

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        state: DraftModelState = sequence.draft_state
        for index in range(min(num_accepted + 1, num_drafted)):
            state.rate += RATE_WEIGHT * ((index < num_accepted) - state.rate)

    def chances(self, sequence: Sequence, num_tokens: int, num_coming: int) -> Seq[float]:
        """The draft is made when the coming tokens are known, so these need no prediction."""
        state: DraftModelState = sequence.draft_state
        if state.rate < MIN_RATE:
            num_idle = sequence.num_known_tokens - state.num_known_at_draft
            return [MAX_RATE] if num_idle > TRIAL_INTERVAL_TOKENS else ()
        rate = min(state.rate, MAX_RATE)
        return [rate**depth for depth in range(1, num_tokens + 1)]

    def draft(self, requests: Seq[DraftRequest]) -> list[tuple[TokenId, ...]]:
        """Propose tokens: first compute the known tokens that the draft model lacks, then draft
        token by token, for all requests at once. A request for which it lacks too many tokens or
        blocks gets none."""
        self._num_calls += 1
        rows, drafting = self._catch_up(requests)
        while rows:
            sampled = self._run(rows)
            for each in drafting:
                each.sequence.draft_state.drafts += (sampled[each.sequence.request_id],)
            drafting = [
                each for each in drafting if len(each.sequence.draft_state.drafts) < each.num_tokens
            ]
            rows = [_next_row(each.sequence, 1) for each in drafting]
        return [each.sequence.draft_state.drafts for each in requests]

    def _catch_up(self, requests: Seq[DraftRequest]) -> tuple[list[Row], list[DraftRequest]]:
        """Return rows that compute the requests' known tokens, and the requests whose next token
        these rows sample."""
        budget = MAX_CATCH_UP_TOKENS
        rows: list[Row] = []
        drafting: list[DraftRequest] = []
        for request in requests:
            sequence = request.sequence
            state: DraftModelState = sequence.draft_state
            state.forget_wrong_drafts(sequence.token_ids)
            state.num_known_at_draft, state.call = sequence.num_known_tokens, self._num_calls
            end = sequence.num_known_tokens + request.num_tokens
            if budget < 1 or end > self._max_model_tokens or not self._allocate(state, end):
                continue
            row = _next_row(sequence, budget)
            budget -= len(row.token_ids)
            rows.append(row)
            if row.sample:
                drafting.append(request)
        return rows, drafting

    def _run(self, rows: list[Row]) -> dict[str, TokenId]:
        """Run the rows; return the sampled tokens by request."""
        if not rows:
            return {}
        rows.sort(key=lambda row: len(row.token_ids) > 1)
        output = self._runner.run(Plan(0, tuple(rows)))
        return {
            row.request_id: token.token_id
            for row, token in zip(rows, output.sampled, strict=True)
            if token is not None
        }

    def _allocate(self, state: DraftModelState, num_tokens: int) -> bool:
        """Make sure that there are blocks for ``num_tokens`` tokens. Return False if there are not
        enough, even without the KV of sequences that take no part in this call."""
        self._states[id(state)] = state
        self._states.move_to_end(id(state))
        num_spans = -(-num_tokens // self._runner.block_tokens)
        num_new = num_spans * self._runner.num_groups - len(state.block_ids)
        if num_new <= 0:
            return True
        while not self._pool.can_allocate(num_new):
            oldest = next(iter(self._states.values()))
            if oldest.call == self._num_calls:
                return False
            self._drop(oldest)
        state.block_ids += tuple(self._pool.allocate(num_new))
        return True

    def _drop(self, state: DraftModelState) -> None:
        del self._states[id(state)]
        self._pool.release(state.block_ids)
        state.block_ids, state.num_computed = (), 0


def _next_row(sequence: Sequence, max_tokens: int) -> Row:
    """Return a row that computes the next of the sequence's known tokens and drafts, and count them
    as computed."""
    state: DraftModelState = sequence.draft_state
    start = state.num_computed
    if start < state.num_known:
        tokens = tuple(sequence.token_ids[start : start + max_tokens])
    else:
        tokens = state.drafts[start - state.num_known :]
    state.num_computed += len(tokens)
    history = (*sequence.token_ids, *state.drafts) if state.sampling.needs_history else ()
    return Row(
        sequence.request_id,
        tokens,
        start,
        state.block_ids,
        state.num_computed == state.num_known + len(state.drafts),
        state.sampling,
        history,
        sequence.spec.num_prompt_tokens if history else 0,
        attention_window=sequence.spec.attention_window,
    )
