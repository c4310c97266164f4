"""The request and its outputs as Baton's programs send them to each other: with token ids instead
of text."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from baton.core.adapter import AdapterRef
from baton.core.attention_window import AttentionWindow
from baton.core.grammar import Grammar
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.priority import Priority
from baton.core.store import StoreHint

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 65_536
"""Limit for the logprobs of all prompts of one request, alternatives included. Each logprob takes
up to 11 bytes of a message, some 100 bytes of a router's memory, and 3 µs of its time."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are sampling (not greedy) without any filter.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 filter nothing. ``logprobs`` is the
    number of alternatives to report besides the chosen token, or None for no logprobs.
    ``prompt_logprobs`` is the same number for the tokens of the prompt; the first token has no
    logprob. ``stop_token_ids`` end the answer like an EOS. With a ``grammar``, only tokens that it
    allows can be chosen; it allows an EOS only where it is complete. Without a grammar, neither an
    EOS nor a stop token is chosen before the answer has ``min_tokens``. The router validates the
    parameters.
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
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether sampling a token requires the earlier tokens, because penalties are set."""
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
    the random generator's position are the same on every worker. ``tenant_salt`` is part of the
    block keys' root. ``store_hint`` says where the prefix is believed to be stored.
    ``ttft_slo_seconds`` is the TTFT objective: the time from the arrival at a worker to the first
    token, not counting the time that it takes to compute this prompt alone; 0 if there is none.
    ``tenant`` identifies the tenant, which may have several salts, or share one with others.
    ``weight`` is the tenant's share relative to other tenants. ``trace`` is the span that this
    placement belongs to (:mod:`baton.core.trace_context`), empty if the request is not traced.
    ``adapter`` is the LoRA adapter that the request uses; None means the base model. ``kv_codec``
    is the codec in which its KV should travel from the prefill to the decode worker. If
    ``exact_kv`` is set, no lossy codec may be applied to its KV, on any link and in any tier.
    ``attention_window`` limits which tokens attend to which; None means that each attends to all
    tokens before it. ``variant`` is the id of the variant of the model for which the request was
    placed: workers of another variant refuse it. It may be empty.
    """

    request_id: RequestId
    epoch: Epoch
    token_ids: tuple[TokenId, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    tenant_salt: bytes = b""
    store_hint: StoreHint | None = None
    ttft_slo_seconds: float = 0.0
    tenant: bytes = b""
    priority: Priority = Priority.NORMAL
    weight: float = 1.0
    trace: str = ""
    adapter: AdapterRef | None = None
    kv_codec: KvCodecName = KvCodecName.NONE
    exact_kv: bool = False
    attention_window: AttentionWindow | None = None
    variant: str = ""

    @property
    def adapter_digest(self) -> bytes:
        """The adapter's digest; empty for the base model."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def owner(self) -> bytes:
        """The tenant to which fair scheduling (:mod:`baton.core.fairness`) charges the request's
        tokens, and towards whose quota its blocks count."""
        return self.tenant or self.tenant_salt

    @property
    def num_emitted_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are wanted and not reported yet. If so, every token of
        the prompt is computed, even if it is cached."""
        return self.sampling.prompt_logprobs is not None and self.num_emitted_tokens == 0

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens that may still be generated after ``token_ids``."""
        return self.sampling.max_tokens - self.num_emitted_tokens


PROMPT_PREFILLED = "prompt_read"
"""Key in the details of a failure. It says that the worker had already computed the prompt (except
for cached tokens), so that the tenant is charged for the prompt."""

CONTINUATION = "continuation"
"""Key in the details of the first output after a failover. Its value is :data:`NUMERIC` if the
worker may continue with other tokens than the one before it would have generated: because it
rounds differently, or has another seed. Without the key, the tokens are those that would have
come."""

NUMERIC = "numeric"


class FinishReason(StrEnum):
    """Why an answer ended. STOP: at an EOS, a stop token or a stop string. LENGTH: at the maximum
    number of tokens. MIGRATED and REROUTED end only one placement of the request, because its
    worker drains. MIGRATED: that worker keeps the KV of all tokens except the last, until the
    worker of the next placement has read it. REROUTED: the worker has no KV of the request; place
    it again."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    MIGRATED = "migrated"
    REROUTED = "rerouted"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's logprob. ``top`` has the most likely tokens, best first; the chosen token need not
    be among them."""

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


def count_logprobs(scores: Iterable[TokenLogprob]) -> int:
    """Return the number of logprobs of these tokens, alternatives included."""
    return sum([1 + len(score.top) for score in scores])


@dataclass(slots=True)
class RequestOutput:
    """The output of one step for one request.

    ``first_index`` is the position of ``token_ids[0]`` in the answer, counted from 0 over all
    placements. With it, the router drops duplicate tokens and notices missing ones.
    ``cached_tokens`` counts prompt tokens that were not computed for this request; it is set in the
    first output or, by a worker that learns it only at the end, in the last. If they are requested,
    ``prompt_logprobs`` are also in the first output: those of the prompt tokens
    [1, num_prompt_tokens). A worker may replace the request id that its engine has set; after that,
    an output is never changed. The class is not frozen because an output is made for nearly every
    token, and creating a frozen instance takes five times as long.
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
