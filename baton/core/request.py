"""A request as every room sees it: token ids in, token ids out."""

from dataclasses import dataclass, field
from enum import StrEnum

from baton.core.grammar import Grammar
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.priority import Priority
from baton.core.store import StoreHint

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 65_536
"""Of the prompts of one request, alternatives included: each takes up to 11 bytes of a message,
some 100 bytes of a router's memory, and 3 µs of its time."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Defaults mean: greedy is off, nothing is filtered.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 filter nothing. ``logprobs`` is
    the number of alternatives to report beside the chosen token, or None for no logprobs.
    ``prompt_logprobs`` is the same for every token of the prompt but the first.
    ``stop_token_ids`` end the answer like an EOS. With a ``grammar``, only tokens that it allows
    are chosen from, and an EOS is one only where it is complete. Without one, neither an EOS nor a
    stop token is chosen before ``min_tokens`` of the answer are there. Validated where the request
    enters.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on which tokens were seen before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One placement of one request.

    ``token_ids`` are the prompt and, after a failover, the tokens emitted so far;
    ``num_prompt_tokens`` says where the prompt ends, so that penalties, ``max_tokens`` and
    the generator's position count the same on every worker. ``tenant_salt`` enters the
    block keys' root. ``store_hint`` says where the placement believes the prefix to be stored.
    ``first_token_seconds`` is what the first token may take from the arrival at a worker, beside
    what the prompt takes by itself; 0 when there is no such wish. ``tenant`` names whose it is: a
    tenant may have several salts, or share one. ``weight`` is the tenant's share beside others.
    ``trace`` names the span that this placement belongs to (:mod:`baton.core.trace_context`), and
    is empty where none is wanted.
    """

    request_id: RequestId
    epoch: Epoch
    token_ids: tuple[TokenId, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    tenant_salt: bytes = b""
    store_hint: StoreHint | None = None
    first_token_seconds: float = 0.0
    tenant: bytes = b""
    priority: Priority = Priority.NORMAL
    weight: float = 1.0
    trace: str = ""

    @property
    def owner(self) -> bytes:
        """Who is charged in queues, and whose quota its blocks count to."""
        return self.tenant or self.tenant_salt

    @property
    def num_emitted_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of the prompt are wanted and not told yet. Then every token of it is
        computed, whatever is cached."""
        return self.sampling.prompt_logprobs is not None and self.num_emitted_tokens == 0

    @property
    def max_new_tokens(self) -> int:
        """Tokens that may still be generated, counted from the end of ``token_ids``."""
        return self.sampling.max_tokens - self.num_emitted_tokens


PROMPT_PREFILLED = "prompt_read"
"""A detail of a failure: the prompt was computed before, but for its cached tokens."""


class FinishReason(StrEnum):
    """The last two end a placement, not the answer: its worker drains. MOVED: the KV of all tokens
    but the last waits there for whoever decodes the request's next epoch. TURNED_AWAY: nothing
    does; place it anew."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    MOVED = "moved"
    TURNED_AWAY = "turned_away"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """``top`` holds the most likely tokens, best first; the chosen one need not be in it."""

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


@dataclass(slots=True)
class RequestOutput:
    """What one step gave one request.

    ``first_index`` is the position of ``token_ids[0]`` in the answer, counted from 0 over all
    placements: the router drops what it has and notices what is missing. ``cached_tokens``
    counts prompt tokens that were not computed for this request, and is set with the first
    output; so are ``prompt_logprobs``, of prompt tokens [1, num_prompt_tokens), where asked for.
    The worker that its engine gives one to may name it anew; nobody changes one after that. It is
    not frozen only because one is made for nearly each token, and a frozen one takes five times as
    long to make.
    """

    request_id: RequestId
    epoch: Epoch
    first_index: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0
    details: dict[str, str] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
