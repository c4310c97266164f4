"""One request inside the engine: what is known of it, what is computed, where that lies."""

from enum import StrEnum

from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.prefill_order import WaitingPrompt
from baton.core.request import FinishReason, RequestSpec, TokenLogprob
from baton.core.task import Task
from baton.engine.constraint import Constraint
from baton.engine.key_chain import BlockKeyChain
from baton.engine.plan import UNKNOWN_TOKEN, Row


class Phase(StrEnum):
    """HELD: the prompt (or an answer that is passed on) is computed, and its blocks wait for their
    reader. RESERVED: blocks
    wait to be filled by a hand-off."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    RESERVED = "reserved"
    FINISHED = "finished"


PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # admit | abort
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.FINISHED}),
    # preempt | prompt computed, passed on | answer complete, abort
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.HELD, Phase.FINISHED}),
    # release, abort
    Phase.HELD: frozenset({Phase.FINISHED}),
    # start | abort
    Phase.RESERVED: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class Sequence:
    """The one rule: ``num_computed`` catches up with ``num_known``, then a token is sampled.

    ``block_ids`` is the block table: its first ``num_sealed`` blocks are full and sealed under
    ``keys``, the others FILLING. It is empty while WAITING. ``arrival`` orders the requests
    of an engine and is unique; a preempted request keeps its own. ``chain`` holds the keys
    of ``spec.token_ids``, and is the sequence's own from its entry on.
    """

    __slots__ = (
        "_chain",
        "_needs_history",
        "_wants_scores",
        "arrival",
        "arrival_seconds",
        "block_ids",
        "constraint",
        "endings",
        "expected_tokens",
        "first_start",
        "is_leaving",
        "max_tokens",
        "num_adopted",
        "num_computed",
        "num_published",
        "num_sealed",
        "num_shared",
        "phase",
        "scores",
        "spec",
        "task",
        "token_ids",
        "waiting",
    )

    def __init__(
        self,
        spec: RequestSpec,
        task: Task,
        phase: Phase,
        *,
        chain: BlockKeyChain,
        arrival: int,
        arrival_seconds: float,
        max_model_tokens: int,
    ) -> None:
        self.spec = spec
        self.task = task
        self.phase = phase
        self.arrival = arrival
        self.arrival_seconds = arrival_seconds
        self.token_ids: list[TokenId] = list(spec.token_ids)
        self.max_tokens = min(spec.num_prompt_tokens + spec.sampling.max_tokens, max_model_tokens)
        """Length, prompt included, at which the answer ends."""
        self.block_ids: tuple[BlockId, ...] = ()
        self.num_computed = 0
        self.num_sealed = 0
        self.num_adopted = 0
        """Prompt tokens that were taken over after it was first admitted, not computed."""
        self.num_published = 0
        """Blocks that a SealedRun has named."""
        self.num_shared = 0
        """Cached blocks of the table that others used already."""
        self.expected_tokens = spec.sampling.max_tokens
        """Length of the answer, as predicted."""
        self.waiting = WaitingPrompt(arrival_seconds, tenant=spec.owner, priority=spec.priority)
        """What orders know of it."""
        self.first_start: int | None = None
        """Tokens that were cached when it was first admitted; None before."""
        self.constraint: Constraint | None = None
        """Where the answer is in its grammar, as long as it is written here."""
        self.endings: tuple[TokenId, ...] = ()
        """Tokens that may not be chosen before ``min_tokens``."""
        self.scores: list[TokenLogprob] = []
        """Logprobs of the prompt's tokens from the second on, as far as computed."""
        self.is_leaving = False
        """Somebody waits for it to be at rest, in no step that is being computed."""
        self._chain = chain
        # Asked at each token, and the same for all of them.
        self._needs_history = spec.sampling.needs_history
        self._wants_scores = spec.scores_prompt and task is not Task.DECODE

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def is_too_short(self) -> bool:
        """Whether the answer may not end yet."""
        return self.num_answered < self.spec.sampling.min_tokens

    @property
    def ends_next(self) -> bool:
        """Whether it leaves the batch with its next token, whatever that is."""
        return self.task is Task.PREFILL or len(self.token_ids) + 1 >= self.max_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were never computed for this request."""
        return min((self.first_start or 0) + self.num_adopted, self.spec.num_prompt_tokens)

    @property
    def keys(self) -> list[BlockKey]:
        """Chain keys of the full blocks of the known tokens, computed or not."""
        return self._chain.keys

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of the prompt are to be computed here, each with its token's KV."""
        return self._wants_scores and len(self.token_ids) == len(self.spec.token_ids)

    @property
    def preemptable(self) -> bool:
        """A prompt that is being handed over is not: its reader has a share in its blocks."""
        return self.phase is Phase.RUNNING and self.task is not Task.PREFILL

    def move(self, phase: Phase) -> None:
        assert phase in PHASE_TRANSITIONS[self.phase], f"{self.request_id}: {self.phase} → {phase}"
        self.phase = phase

    def append(self, token_id: TokenId) -> None:
        """One more known token, not computed yet."""
        self.token_ids.append(token_id)
        self._chain.extend(self.token_ids)

    def row(self, num_tokens: int) -> Row:
        """The next ``num_tokens`` tokens as a share of a step."""
        start, end = self.num_computed, self.num_computed + num_tokens
        sampling = self.spec.sampling
        sample = end == len(self.token_ids)
        with_history = sample and self._needs_history
        return Row(
            self.spec.request_id,
            tuple(self.token_ids[start:end]),
            start,
            self.block_ids,
            sample,
            sampling,
            tuple(self.token_ids) if with_history else (),
            self.spec.num_prompt_tokens if with_history else 0,
            self.constraint.mask if sample and self.constraint is not None else None,
            tuple(self.token_ids[start + 1 : end + 1]) if self.scores_prompt else (),
            self.endings if sample and self.endings and self.is_too_short else (),
        )

    def row_after(self, before: Row, place: int) -> Row:
        """The token that ``before`` will sample, as a share of the step after it; ``place`` is that
        row's in its plan."""
        with_history = self._needs_history
        too_short = self.num_answered + 1 < self.spec.sampling.min_tokens
        return Row(
            self.spec.request_id,
            (UNKNOWN_TOKEN,),
            before.context_tokens,
            self.block_ids,
            True,
            self.spec.sampling,
            tuple(self.token_ids) if with_history else (),
            self.spec.num_prompt_tokens if with_history else 0,
            too_early=self.endings if too_short else (),
            follows=place,
        )

    def finish_reason(self, eos_token_ids: frozenset[TokenId]) -> FinishReason | None:
        """Whether the last known token, a token of the answer, ends it."""
        token_id, sampling = self.token_ids[-1], self.spec.sampling
        ignored = sampling.ignore_eos and sampling.grammar is None
        if token_id in eos_token_ids and not ignored:
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_tokens else None

    def describe(self) -> str:
        return (
            f"{self.request_id} {self.task} {self.phase} arrival={self.arrival} "
            f"tokens={self.num_computed}/{self.num_known} blocks={list(self.block_ids)}"
        )
