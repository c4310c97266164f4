"""The engine's settings: the limits of steps, queues and requests."""

from dataclasses import dataclass

from baton.core.attention_window import AttentionWindow
from baton.core.prefill_order import PREFILL_ORDERS
from baton.engine.kv_window import KvWindow
from baton.errors import Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine. Fields with ``tokens`` or ``blocks`` in their names are counts. Invalid
    values raise Invalid.

    ``max_batched_tokens`` is the token budget of a step, which bounds the inter-token latency. One
    prompt gets at most ``chunk_tokens`` of it (default: all). ``max_sequences`` bounds the number
    of requests in the batch, reservations included. The effective bound is never above the token
    budget, so that every running request advances in every step.

    ``target_inter_token_latency_seconds`` is the target inter-token latency. In a step with
    decodes, prefill gets only as much of the budget as keeps the predicted duration of the step
    below this target (:mod:`baton.engine.prefill_budget`). If it is None, there is no such limit.

    ``watermark_blocks`` blocks must remain allocatable when a request is admitted while others run,
    so that the new request isn't preempted at once. If ``forecasts_memory`` is set, a request is
    admitted while others run only if memory is predicted to suffice until all of them have ended;
    ``growth_tokens`` is the predicted length of an answer before any answer was observed.

    Prompts are computed in the ``order`` (a name in ``baton.core.prefill_order.PREFILL_ORDERS``);
    ``admission_window`` bounds how many waiting prompts are ranked with fresh estimates in one step
    (each estimate costs a walk along the prompt's cached prefix). If ``fairness`` is set, the order
    applies only within a tenant, and tenants get equal service (:mod:`baton.core.fairness`).

    If ``speculation`` is set, tokens of answers are drafted where that is measured to pay, at most
    ``speculation_tokens`` for an answer and step (:mod:`baton.engine.speculation`). The runner's
    logits must not depend on the number of a row's tokens.

    ``window_tokens`` is the longest sliding window of the model's layers. Blocks that no later
    token reads are then freed (:mod:`baton.engine.kv_window`): those of ``num_windowed_groups``
    groups of layers, beside ``num_full_groups`` groups that have no window.
    ``supports_attention_window`` says whether requests may have an attention window of their own
    (:class:`baton.core.attention_window.AttentionWindow`).

    Token ids of requests must be below ``vocab_size``; if it is None, they are not checked.
    """

    block_tokens: int
    max_model_tokens: int
    max_batched_tokens: int = 512
    chunk_tokens: int | None = None
    target_inter_token_latency_seconds: float | None = None
    max_sequences: int = 64
    max_waiting: int = 1024
    watermark_blocks: int = 2
    forecasts_memory: bool = True
    growth_tokens: int = 256
    order: str = "deadline"
    fairness: bool = True
    admission_window: int = 32
    speculation: bool = False
    speculation_tokens: int = 16
    vocab_size: int | None = None
    window_tokens: int | None = None
    num_full_groups: int = 0
    num_windowed_groups: int = 1
    supports_attention_window: bool = True

    def __post_init__(self) -> None:
        for name, least in _MINIMUMS.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise Invalid(f"{name} is {value}, and must be at least {least}", param=name)
        if self.chunk_tokens is not None and self.chunk_tokens > self.max_batched_tokens:
            raise Invalid(
                f"chunk_tokens is {self.chunk_tokens}, and must be at most max_batched_tokens "
                f"({self.max_batched_tokens})",
                param="chunk_tokens",
            )
        if (
            self.target_inter_token_latency_seconds is not None
            and not self.target_inter_token_latency_seconds > 0
        ):
            message = (
                "target_inter_token_latency_seconds is "
                f"{self.target_inter_token_latency_seconds}, and must be above 0"
            )
            raise Invalid(message, param="target_inter_token_latency_seconds")
        if self.order not in PREFILL_ORDERS:
            known = ", ".join(PREFILL_ORDERS)
            raise Invalid(f"order is {self.order!r}, and must be one of {known}", param="order")

    @property
    def max_chunk_tokens(self) -> int:
        """Maximum number of tokens of one prompt in one step."""
        return self.max_batched_tokens if self.chunk_tokens is None else self.chunk_tokens

    @property
    def max_batch_requests(self) -> int:
        """Maximum number of requests in a batch: each needs at least one token of the budget."""
        return min(self.max_sequences, self.max_batched_tokens)

    @property
    def num_groups(self) -> int:
        """Number of blocks for each ``block_tokens`` tokens: one for each group of layers."""
        if self.window_tokens is None:
            return 1
        return self.num_full_groups + self.num_windowed_groups

    @property
    def windowed_share(self) -> float:
        """The share of a token's KV that is freed once no later token reads it."""
        return 0.0 if self.window_tokens is None else self.num_windowed_groups / self.num_groups

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the length of a block table for ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_tokens) * self.num_groups

    def num_tokens_in(self, num_blocks: int) -> int:
        """Return how many tokens ``num_blocks`` blocks of a block table have room for."""
        return num_blocks // self.num_groups * self.block_tokens

    @property
    def window(self) -> KvWindow:
        return KvWindow(
            self.block_tokens, self.window_tokens, self.num_full_groups, self.num_windowed_groups
        )

    def window_of(self, attention_window: AttentionWindow | None) -> KvWindow:
        """Return the window of a request's block table. If layers of the model have sliding
        windows, it is theirs: requests with an attention window are then refused."""
        if attention_window is None or self.window_tokens is not None:
            return self.window
        return KvWindow(
            self.block_tokens,
            attention_window.recent_tokens,
            sink_tokens=attention_window.sink_tokens,
        )

    def table_end(self, num_known_tokens: int, num_computed_blocks: int, window: KvWindow) -> int:
        """Return the length of the block table of a sequence that is to compute its tokens, of
        which ``num_computed_blocks`` blocks are computed: all its known tokens, but no more than it
        may hold at a time in groups with a window."""
        known = self.num_blocks_for(num_known_tokens)
        most = window.max_spans(self.max_chunk_tokens)
        if most is None:
            return known
        first = window.first_span(self.num_tokens_in(num_computed_blocks))
        first = max(first, window.num_sink_spans)
        return min(known, (first + most) * self.num_groups)

    def max_blocks_for(self, num_tokens: int, window: KvWindow | None = None) -> int:
        """Return the maximum number of blocks that a sequence holds at a time until the KV of
        ``num_tokens`` tokens is computed. Without a ``window``, it is the model's."""
        window = window or self.window
        spans = window.num_spans(num_tokens)
        most = window.max_spans(self.max_chunk_tokens)
        return window.num_read(spans, 0 if most is None else max(0, spans - most))


_MINIMUMS: dict[str, float] = {
    "block_tokens": 1,
    "max_model_tokens": 2,
    "max_batched_tokens": 1,
    "chunk_tokens": 1,
    "max_sequences": 1,
    "max_waiting": 0,
    "watermark_blocks": 0,
    "growth_tokens": 0,
    "admission_window": 1,
    "speculation_tokens": 1,
    "vocab_size": 1,
    "window_tokens": 1,
    "num_full_groups": 0,
    "num_windowed_groups": 0,
}
