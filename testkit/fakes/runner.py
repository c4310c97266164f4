"""A fake runner without a model. Every token that it samples depends on the KV of all tokens before
it.

The KV of the token at position p is 8 bytes: a hash of p, of the token, and of the KV of all tokens
before p *as read through the block table*. The next token is a hash of all KV up to the last token.
So a wrong block table, a stale block, or a block lost in a transfer changes the answer.

With a ``window``, only the KV of the last tokens counts, as in a model all of whose layers have
sliding windows; and a row with an attention window sees only what is in it. With several groups of
layers (:mod:`baton.engine.layer_groups`), each group has KV of its own, which depends on the group,
and the next token is a hash of what it sees of all groups. All KV depends on the ``weights``.
"""

import hashlib
from collections.abc import Sequence

from baton.core.attention_window import AttentionWindow
from baton.core.ids import BlockId, TokenId
from baton.core.request import FinishReason, RequestSpec, SamplingParams, TokenLogprob
from baton.engine.kv_window import NO_BLOCK
from baton.engine.plan import Plan, Row, SampledToken, StepOutput

SLOT_BYTES = 8

ONE_WINDOWED_GROUP = (0, 1)
"""Numbers of groups without and with a window."""


class FakeRunner:
    """Implements :class:`baton.engine.plan.Runner` over a bytearray of blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        vocab_size: int = 256,
        window: int | None = None,
        groups: tuple[int, int] = ONE_WINDOWED_GROUP,
        weights: bytes = b"",
    ) -> None:
        self._weights = weights
        self._windows = group_windows(window, groups)
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self.memory = bytearray(num_blocks * self.block_size_bytes)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def num_groups(self) -> int:
        return len(self._windows)

    @property
    def block_size_bytes(self) -> int:
        return self._block_tokens * SLOT_BYTES

    def run(self, plan: Plan) -> StepOutput:
        """Run a plan: all rows read their context, then all write their KV, then some sample."""
        self._check(plan)
        for source, target in plan.copies:
            self.import_block(target, self.export_block(source))
        groups = range(len(self._windows))
        contexts = [
            [self._read(row.block_ids, row.start, group) for group in groups] for row in plan.rows
        ]
        for row, by_group in zip(plan.rows, contexts, strict=True):
            windows = self._windows_of(row)
            for group, (context, window) in enumerate(zip(by_group, windows, strict=True)):
                self._write(
                    row,
                    group,
                    compute_slots(
                        context,
                        row.token_ids,
                        row.start,
                        row.adapter + self._weights,
                        window,
                        group,
                    ),
                )
        tokens = [self._sample_and_verify(row) if row.sample else [] for row in plan.rows]
        sampled = tuple(each[0] if each else None for each in tokens)
        following = {index: tuple(each[1:]) for index, each in enumerate(tokens) if each[1:]}
        if not any(row.prompt_logprob_targets for row in plan.rows):
            return StepOutput(sampled, following=following)
        return StepOutput(sampled, tuple(map(self._score, plan.rows)), following)

    def export_block(self, block_id: BlockId) -> bytes:
        """Return a block's content, as a transfer reads it."""
        start = block_id * self.block_size_bytes
        return bytes(self.memory[start : start + self.block_size_bytes])

    def import_block(self, block_id: BlockId, data: bytes) -> None:
        """Overwrite a block, as a transfer does."""
        assert len(data) == self.block_size_bytes, f"{len(data)} bytes are not one block"
        start = block_id * self.block_size_bytes
        self.memory[start : start + self.block_size_bytes] = data

    def _read(self, block_ids: Sequence[BlockId], num_tokens: int, group: int) -> bytes:
        num_spans = -(-num_tokens // self._block_tokens)
        blocks = b"".join(
            bytes(self.block_size_bytes) if block_id == NO_BLOCK else self.export_block(block_id)
            for block_id in block_ids[group :: len(self._windows)][:num_spans]
        )
        return blocks[: num_tokens * SLOT_BYTES]

    def _windows_of(self, row: Row) -> list[AttentionWindow | None]:
        if row.attention_window is None:
            return self._windows
        assert self._windows == [None], "the model has sliding windows"
        return [row.attention_window]

    def _seen(self, row: Row, num_tokens: int) -> bytes:
        """Return what the token after the first ``num_tokens`` sees of the KV of all groups."""
        return b"".join(
            hide_outside(self._read(row.block_ids, num_tokens, group), window)
            for group, window in enumerate(self._windows_of(row))
        )

    def _write(self, row: Row, group: int, slots: Sequence[bytes]) -> None:
        block_ids = row.block_ids[group :: len(self._windows)]
        for position, slot in enumerate(slots, row.start):
            block_id = block_ids[position // self._block_tokens]
            index = block_id * self._block_tokens + position % self._block_tokens
            self.memory[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = slot

    def _sample_and_verify(self, row: Row) -> list[SampledToken]:
        """Sample the next token, and one more for each draft that is right."""
        tokens: list[SampledToken] = []
        for draft in (*row.token_ids[len(row.token_ids) - row.num_drafts :], None):
            sampled = self._sample(row.with_accepted(len(tokens)))
            if sampled is None:
                break
            tokens.append(sampled)
            if sampled.token_id != draft:
                break
            if row.accept is not None:
                row.accept(sampled.token_id)
        return tokens

    def _sample(self, row: Row) -> SampledToken | None:
        sampled = fake_sample(
            self._seen(row, row.context_tokens),
            row.sampling,
            row.history,
            row.num_prompt_tokens,
            self._vocab_size,
        )
        if row.mask is None:
            return sampled
        allowed = allowed_tokens(row.mask(), self._vocab_size)
        return SampledToken(allowed[sampled.token_id % len(allowed)]) if allowed else None

    def _score(self, row: Row) -> tuple[TokenLogprob, ...]:
        """Make up each target's logprob from a hash of the KV of all tokens before it."""
        scores = []
        for position, target in enumerate(row.prompt_logprob_targets, row.start + 1):
            before = self._seen(row, position)
            seen = hashlib.blake2b(before, digest_size=2).digest()
            scores.append(TokenLogprob(target, -1.0 - int.from_bytes(seen, "little") / 1024))
        return tuple(scores)

    def _check(self, plan: Plan) -> None:
        """Raise AssertionError for plans that a real runner would crash on or silently compute
        wrongly."""
        written: set[BlockId] = set()
        for row in plan.rows:
            assert row.token_ids and row.start >= 0, row
            assert not row.num_drafts or (row.sample and row.num_tokens == row.num_drafts + 1), row
            num_groups = len(self._windows)
            num_spans, rest = divmod(len(row.block_ids), num_groups)
            assert row.context_tokens <= num_spans * self._block_tokens and rest == 0, row
            held = [block_id for block_id in row.block_ids if block_id != NO_BLOCK]
            assert len(set(held)) == len(held), row
            assert all(0 <= block_id < self._num_blocks for block_id in held), row
            first = row.start // self._block_tokens
            last = (row.context_tokens - 1) // self._block_tokens
            targets = set(row.block_ids[first * num_groups : (last + 1) * num_groups])
            assert NO_BLOCK not in targets, row
            assert not targets & written, f"two rows write to {targets & written}"
            written |= targets
        lengths = [row.num_tokens > 1 for row in plan.rows]
        assert lengths == sorted(lengths), "decodes come first"


def allowed_tokens(mask: bytes, vocab_size: int) -> list[TokenId]:
    """Return the ids whose bits are set."""
    bits = int.from_bytes(mask, "little")
    return [TokenId(token_id) for token_id in range(vocab_size) if bits >> token_id & 1]


def group_windows(window: int | None, groups: tuple[int, int]) -> list[AttentionWindow | None]:
    """Return the window of each group of layers; without a ``window``, there is one group."""
    if window is None:
        return [None]
    num_full, num_windowed = groups
    return [*[None] * num_full, *[AttentionWindow(0, window)] * num_windowed]


def hide_outside(context: bytes, window: AttentionWindow | None, num_new: int = 0) -> bytes:
    """Return the KV of a context, with zeros for all tokens outside of ``window``. ``num_new`` of
    the window's last tokens are still missing in ``context``."""
    if window is None:
        return context
    first = max(0, len(context) - (window.recent_tokens - num_new) * SLOT_BYTES)
    end = min(first, window.sink_tokens * SLOT_BYTES)
    return context[:end] + bytes(first - end) + context[first:]


def compute_slots(
    context: bytes,
    token_ids: Sequence[TokenId],
    start: int,
    adapter: bytes = b"",
    window: AttentionWindow | None = None,
    group: int = 0,
) -> list[bytes]:
    """Compute the KV of ``token_ids``, which begin at position ``start``, in one group of layers.
    ``context`` is the KV of all tokens before them, and ``adapter`` the digest of the request's
    adapter, followed by the model's weights."""
    if window is not None and len(token_ids) > 1:  # each token sees another part of the context
        slots: list[bytes] = []
        for position, token_id in enumerate(token_ids, start):
            slots += compute_slots(context, [token_id], position, adapter, window, group)
            context += slots[-1]
        return slots
    context = hide_outside(context, window, num_new=1)
    person = bytes([group]) if group else b""
    context_hash = hashlib.blake2b(context, digest_size=SLOT_BYTES, key=adapter, person=person)
    slots = []
    for position, token_id in enumerate(token_ids, start):
        slot_hash = context_hash.copy()
        slot_hash.update(token_id.to_bytes(4, "little") + position.to_bytes(4, "little"))
        slots.append(slot_hash.digest())
        context_hash.update(slots[-1])
    return slots


def fake_sample(
    context: bytes,
    sampling: SamplingParams,
    history: Sequence[TokenId],
    num_prompt_tokens: int,
    vocab_size: int,
) -> SampledToken:
    """Return the token after ``context``: a hash of ``context`` and of everything else that
    sampling depends on."""
    position = len(context) // SLOT_BYTES
    seed = 0 if sampling.is_greedy else sampling.seed
    context_hash = hashlib.blake2b(context, digest_size=8)
    context_hash.update(repr((position, seed, tuple(history), num_prompt_tokens)).encode())
    number = int.from_bytes(context_hash.digest(), "little")
    token_id = TokenId(number % vocab_size)
    if sampling.logprobs is None:
        return SampledToken(token_id)
    logprob = -1.0 - (number >> 32) % 1000 / 1000
    return SampledToken(token_id, _logprob(token_id, logprob, sampling.logprobs, vocab_size))


def _logprob(token_id: TokenId, logprob: float, num_top: int, vocab_size: int) -> TokenLogprob:
    """Make up logprobs: the chosen token is the likeliest, followed by the tokens with the next
    ids."""
    top = tuple(
        (TokenId((token_id + rank) % vocab_size), logprob - rank)
        for rank in range(min(num_top, vocab_size))
    )
    return TokenLogprob(token_id, logprob, top)


def reference_answer(
    spec: RequestSpec,
    *,
    vocab_size: int = 256,
    eos_token_ids: frozenset[TokenId] = frozenset(),
    window: int | None = None,
    groups: tuple[int, int] = ONE_WINDOWED_GROUP,
    weights: bytes = b"",
) -> tuple[tuple[TokenId, ...], FinishReason]:
    """Return what any engine with a :class:`FakeRunner` must generate after ``spec.token_ids``,
    computed token by token without blocks. The rules for ending an answer are implemented here a
    second time, on purpose: tests compare the two implementations."""
    sampling, known = spec.sampling, list(spec.token_ids)
    adapter, windows = spec.adapter_digest + weights, group_windows(window, groups)
    if spec.attention_window is not None:
        assert windows == [None], "the model has sliding windows"
        windows = [spec.attention_window]
    contexts = [
        b"".join(compute_slots(b"", known, 0, adapter, each, group))
        for group, each in enumerate(windows)
    ]
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
    while True:
        history = known if sampling.needs_history else ()
        num_prompt_tokens = spec.num_prompt_tokens if sampling.needs_history else 0
        seen = b"".join(map(hide_outside, contexts, windows))
        token_id = fake_sample(seen, sampling, history, num_prompt_tokens, vocab_size).token_id
        known.append(token_id)
        answer = tuple(known[len(spec.token_ids) :])
        if token_id in stops:
            return answer, FinishReason.STOP
        if len(answer) == spec.max_new_tokens:
            return answer, FinishReason.LENGTH
        for group, each in enumerate(windows):
            added = compute_slots(contexts[group], [token_id], len(known) - 1, adapter, each, group)
            contexts[group] += added[0]
