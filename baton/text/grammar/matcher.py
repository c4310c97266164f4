"""Enforces grammars on answers with llguidance, within limits of time and memory."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from baton.clock import Clock, SystemClock
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import TokenId
from baton.errors import Invalid
from baton.text.grammar.compilation import compile_grammar
from baton.text.grammar.large_stack import call_with_large_stack
from baton.text.grammar.limits import MAX_COMPILED, MAX_MESSAGE_CHARACTERS, MAX_REJECTED_GRAMMARS
from baton.text.grammar.mask_threads import MaskJob, MaskThreadPool, MaskTimeout
from baton.text.grammar.token_rules import TokenRuleMatcher, TokenRules
from baton.text.tokenizer import load_tokenizer

MASK_THREADS = 4
"""Number of threads that compute masks. A mask takes from 5 µs to some milliseconds, and is
computed while the model runs."""


@dataclass(slots=True)
class CompiledGrammar:
    """A cached matcher; ``last_used`` is a time on the compiler's clock."""

    matcher: LLMatcher
    last_used: float


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Thread-safe.

    ``vocab_size`` is the size of the model's vocabulary, which may exceed the tokenizer's: ids
    beyond the tokenizer's vocabulary are never allowed. EOS tokens are allowed where a grammar is
    complete. Raises Invalid for a tokenizer whose tokens can't be mapped to bytes: only byte-level
    BPE and BPE with byte fallback are supported.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[TokenId],
        clock: Clock | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        eos: list[int] = sorted(eos_token_ids)
        try:
            self._vocabulary = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=eos or None
            )
        except ValueError as error:
            raise Invalid(f"grammars can't be enforced with this tokenizer: {error}") from error
        self.threads = MaskThreadPool(MASK_THREADS)
        self._clock = clock or SystemClock()
        self._compiled: OrderedDict[tuple[bytes, Grammar], CompiledGrammar] = OrderedDict()
        self._too_slow: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[TokenId]
    ) -> "GrammarCompiler":
        """Return a compiler with the tokenizer from a model's directory. Raises Invalid if the
        tokenizer can't be read or is not supported."""
        text = load_tokenizer(model_dir / "tokenizer.json").to_str()
        return cls(text, vocab_size, eos_token_ids)

    def create(
        self, grammar: Grammar, token_ids: Sequence[TokenId] = (), owner: bytes = b""
    ) -> "GrammarMatcher | TokenRuleMatcher":
        """Return a matcher for ``grammar``, advanced over the tokens that the answer already has.
        Nothing is shared between different owners (tenants). For a grammar that was checked before
        (:mod:`baton.text.grammar.checker`), this takes up to a second. Raises Invalid when the
        grammar can't be compiled, or does not match the tokens."""
        if grammar.kind is GrammarKind.TOKEN_RULES:
            return TokenRuleMatcher(TokenRules.parse(grammar.text), self._vocab_size, token_ids)
        name = (owner, grammar)
        with self._lock:
            reason = self._too_slow.get(grammar.digest(owner.hex())) if self._too_slow else None
        if reason is not None:
            raise Invalid(reason, param="response_format")
        matcher = call_with_large_stack(
            lambda: GrammarMatcher(self, grammar, self._copy_compiled(name), token_ids, owner)
        )
        matcher.check()
        return matcher

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar to a matcher that shares no state with others. Raises Invalid if the
        grammar is malformed or exceeds a limit."""
        return compile_grammar(self._vocabulary, grammar)

    def drop_compiled(self, grammar: Grammar, owner: bytes = b"") -> None:
        """Drop a compiled grammar from the cache, because it has grown too large to be shared."""
        with self._lock:
            self._compiled.pop((owner, grammar), None)

    def reject_grammar(self, grammar: Grammar, owner: bytes, why: str) -> None:
        """From now on, reject requests of ``owner`` (a tenant) with this grammar, because computing
        a mask took too long. ``why`` is the text of their error."""
        self.drop_compiled(grammar, owner)
        with self._lock:
            self._too_slow[grammar.digest(owner.hex())] = why
            if len(self._too_slow) > MAX_REJECTED_GRAMMARS:
                self._too_slow.popitem(last=False)

    def drop_unused(self, idle_seconds: float) -> int:
        """Drop compiled grammars that no request has used for ``idle_seconds`` and return their
        number. Running answers keep their own copies."""
        oldest = self._clock.monotonic() - idle_seconds
        with self._lock:
            unused = [name for name, kept in self._compiled.items() if kept.last_used < oldest]
            for name in unused:
                del self._compiled[name]
        return len(unused)

    def _copy_compiled(self, name: tuple[bytes, Grammar]) -> LLMatcher:
        """Return a copy of the cached matcher; compile the grammar first if it is not cached. All
        copies share the set of lexer states computed so far, which only grows."""
        with self._lock:
            kept = self._compiled.get(name)
            if kept is not None:
                kept.last_used = self._clock.monotonic()
                self._compiled.move_to_end(name)
        if kept is not None:
            return kept.matcher.deep_copy()
        matcher = self.compile(name[1])
        self._cache_compiled(name, matcher)
        return matcher.deep_copy()

    def _cache_compiled(self, name: tuple[bytes, Grammar], matcher: LLMatcher) -> None:
        with self._lock:
            self._compiled[name] = CompiledGrammar(matcher, self._clock.monotonic())
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)


class GrammarMatcher:
    """The state of one answer with respect to its grammar. Implements
    ``baton.engine.constraint.Constraint``.

    Answers with the same grammar share the lexer states computed so far. All of these states count
    against the grammar's limits, including those that only other answers needed. So if a limit is
    hit, the grammar is compiled again to a matcher that shares nothing, and the answer's tokens are
    replayed with it: whether that succeeds depends only on this answer, and on the time that its
    masks take.
    """

    def __init__(
        self,
        grammars: GrammarCompiler,
        grammar: Grammar,
        matcher: LLMatcher,
        token_ids: Sequence[TokenId] = (),
        owner: bytes = b"",
    ) -> None:
        """Compute the first mask. This must be called in a thread with a large stack."""
        self._grammars = grammars
        self._grammar = grammar
        self._owner = owner
        self._matcher = matcher
        self._shares_states = True
        self._token_ids: list[int] = list(token_ids)
        self._pending_mask: MaskJob | None = None
        self.error = ""
        matcher.consume_tokens(self._token_ids)
        self._is_rejected = matcher.is_error()
        self._mask = self._compute_mask()

    def accept(self, token_id: TokenId) -> None:
        self._await_mask()
        if self.error:
            return
        self._token_ids.append(token_id)
        self._pending_mask = self._grammars.threads.submit(partial(self._advance, token_id))

    def mask(self) -> bytes:
        self._await_mask()
        if not self._mask and not self.error:
            reason = self._matcher.get_error().split("\n")[0] or "it allows no token"
            self.error = f"the grammar can't be enforced any further: {reason}"[
                :MAX_MESSAGE_CHARACTERS
            ]
        return self._mask

    def check(self) -> None:
        """Raise Invalid if the grammar does not accept the tokens that the answer already has."""
        if self._is_rejected and not self.mask():
            raise Invalid(self.error, param="response_format")

    def _await_mask(self) -> None:
        """Wait for the pending mask, if any: only one thread may use a matcher at a time."""
        coming, self._pending_mask = self._pending_mask, None
        if coming is None:
            return
        try:
            self._mask = coming.result()
        except MaskTimeout as timeout:
            self._mask = b""
            self.error = f"the grammar can't be enforced any further: one token's mask: {timeout}"
            self._grammars.reject_grammar(self._grammar, self._owner, self.error)

    def _advance(self, token_id: TokenId) -> bytes:
        """Advance by a token and return the next mask, which is empty when no token is allowed.
        This runs in a mask thread."""
        self._matcher.consume_token(token_id)
        return self._compute_mask()

    def _compute_mask(self) -> bytes:
        bits = self._matcher.compute_bitmask()
        if self._is_usable(bits) or not self._shares_states:
            return bits if self._is_usable(bits) else b""
        self._shares_states = False
        self._grammars.drop_compiled(self._grammar, self._owner)
        self._matcher = self._grammars.compile(self._grammar)
        self._matcher.consume_tokens(self._token_ids)
        return self._compute_mask()

    def _is_usable(self, bits: bytes) -> bool:
        return not self._matcher.is_error() and bits.count(0) < len(bits)
