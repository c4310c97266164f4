"""What an attached worker needs of a server."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from attached_worker.cached_blocks import CachedBlocks
from baton.clock import Clock
from baton.core.adapter import WorkerAdapter
from baton.core.ids import TokenId
from baton.core.kv_transfer import ServerKv
from baton.core.request import FinishReason, RequestSpec, TokenLogprob
from baton.core.server_api import COMPLETIONS, ForwardedHead, ForwardRequest, ServerApi
from baton.errors import BatonError


class Seeds(StrEnum):
    """How a server is given a request's seed."""

    NATIVE = "native-seeds"
    PROCESSOR = "processor-seeds"
    """By the logits processor in ``vllm_plugin``."""

    IGNORED = ""
    """Not at all. vLLM's V1 model runner draws a seeded answer from a generator of its own, which
    begins anew on another server; and on a CPU, an engine that computes a seeded prompt in chunks
    ends itself (0.32.0)."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server is, as it says itself. ``model`` is its name for the model, and ``weights`` is
    where it loaded the model from: a folder or a hub id. ``cache_dtype`` is its name for the data
    type of its KV. ``lends_kv`` says whether it can hand KV to another server, and read that of
    another. ``has_lark`` says whether its grammars can be in llguidance's dialect of Lark, as those
    of tool calls are. ``paths`` are those of its API that matter to Baton. A server whose facts
    have changed is another server."""

    software: str
    version: str
    model: str
    weights: str
    max_model_tokens: int
    block_tokens: int
    num_blocks: int
    cache_dtype: str
    lends_kv: bool = False
    has_lark: bool = True
    seeds: Seeds = Seeds.IGNORED
    paths: tuple[str, ...] = (COMPLETIONS,)

    @property
    def api(self) -> ServerApi:
        return ServerApi(self.model, self.paths)

    @property
    def samples_by_position(self) -> bool:
        """Whether a sampled token depends on the seed and its position alone, so that another
        server which gets the prompt and the first tokens of an answer goes on with the same
        ones."""
        return self.seeds is not Seeds.IGNORED


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """``kv_usage`` is the share of the KV cache that is in use, 0 to 1."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt whose KV the server lends to another one, and the token that it chose behind it.
    Whoever has ``parameters`` can read the KV. ``finish_reason`` is STOP if the token ends the
    answer. Unless ``can_follow``, the other server has to choose the token itself."""

    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    cached_tokens: int
    parameters: bytes = field(repr=False)
    can_follow: bool


class AnswerReceiver(Protocol):
    """Gets one answer. After ``finish`` or ``fail``, nothing more comes."""

    def receive(
        self,
        token_ids: Sequence[TokenId],
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob] = (),
        is_last: bool = False,
    ) -> None:
        """Receive the next tokens, one or several. If ``is_last``, only ``finish`` or ``fail``
        follows."""
        ...

    def finish(self, reason: FinishReason, cached_tokens: int) -> None: ...

    def fail(self, error: BatonError) -> None:
        """The answer has ended early. Invalid: the server refuses the request itself. Unavailable:
        another server may serve it."""
        ...


class RunningAnswer(Protocol):
    def abort(self) -> None:
        """Cancel the request at the server. The receiver gets nothing more."""
        ...


class RelayedAnswer(Protocol):
    """The answer to a forwarded request: :meth:`start`, then :meth:`body`; always :meth:`abort`."""

    async def start(self) -> ForwardedHead:
        """Send the request, and wait for the head of the answer. Raises Unavailable."""
        ...

    def body(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes; the server waits while it is not read. Raises Unavailable if
        the server breaks it off."""
        ...

    def fail(self, error: BatonError) -> None:
        """Cancel the request at the server, and raise ``error`` in the task that reads it."""
        ...

    def abort(self) -> None:
        """Cancel the request at the server, unless its answer is complete."""
        ...


class ModelServer(Protocol):
    async def describe(self) -> ServerFacts:
        """Ask what the server is. Raises Unavailable if it does not respond, and Invalid, naming
        the missing flag, if the worker can't use it as it was started."""
        ...

    async def advise(self, facts: ServerFacts) -> Sequence[str]:
        """Say what the server, which was described by ``facts``, lacks that would be useful, with
        the flag that adds it. Raises Unavailable, Invalid."""
        ...

    async def adapters(self) -> tuple[WorkerAdapter, ...]:
        """Return the LoRA adapters that the server has loaded, by name. Raises Unavailable,
        Invalid."""
        ...

    async def load(self) -> ServerLoad:
        """Raises Unavailable, Invalid."""
        ...

    def start(
        self, spec: RequestSpec, receiver: AnswerReceiver, kv: ServerKv | None = None
    ) -> RunningAnswer:
        """Send a request. With ``kv``, the server reads the KV of the prompt from another server,
        and keeps it for this request alone. Errors go to the receiver."""
        ...

    async def prefill(self, spec: RequestSpec, *, samples: bool) -> ComputedPrompt:
        """Have the server compute a prompt, and lend its KV. Unless it ``samples`` as the request
        says, the token does not matter. Raises Unavailable, and Invalid for a request that the
        server refuses."""
        ...

    def relay(self, request: ForwardRequest) -> RelayedAnswer:
        """Pass on a request to the server's own API, unchanged. Nothing is sent before
        :meth:`RelayedAnswer.start`."""
        ...

    async def probe(self, seconds: float) -> None:
        """Have the server generate one token or, if it generates none, compute the least that it
        can. Raises Unavailable unless that comes within ``seconds``: a server may report that it is
        healthy while its engine is frozen."""
        ...

    async def follow_cache(self, cached: CachedBlocks, clock: Clock) -> None:
        """Keep ``cached`` equal to the prefix cache of the server, until cancelled. Return if it
        does not report what it has cached."""
        ...
