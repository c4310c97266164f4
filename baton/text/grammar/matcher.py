"""Answers held to their grammars: compiled and walked by llguidance, within bounds."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from baton.core.grammar import Grammar
from baton.core.ids import TokenId
from baton.errors import Invalid
from baton.text.grammar.compilation import MAX_MESSAGE, compile_grammar
from baton.text.grammar.large_stack import call_with_large_stack
from baton.text.grammar.mask_threads import MaskJob, MaskThreadPool, MaskTimeout
from baton.text.tokenizer import load_tokenizer

MAX_TOO_SLOW = 1024
"""Grammars that are remembered for a mask that took too long."""

MASK_THREADS = 4
"""Masks take from 5 µs to some milliseconds each, and are made while the model runs."""

MAX_COMPILED = 16
"""Grammars that are kept compiled: about 1 MB each, 50 MB at worst."""


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Thread-safe.

    ``vocab_size`` is the model's, which may be more than the tokenizer has: ids beyond are never
    allowed. An EOS is allowed where a grammar is complete. Raises Invalid for a tokenizer whose
    tokens aren't known as bytes: only byte-level BPE, and BPE with bytes to fall back on, are.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[TokenId]
    ) -> None:
        eos: list[int] = sorted(eos_token_ids)
        try:
            self._vocabulary = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=eos or None
            )
        except ValueError as error:
            raise Invalid(f"grammars can't be followed with this tokenizer: {error}") from error
        self.threads = MaskThreadPool(MASK_THREADS)
        self._compiled: OrderedDict[tuple[bytes, Grammar], LLMatcher] = OrderedDict()
        self._too_slow: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[TokenId]
    ) -> "GrammarCompiler":
        """Of a model's directory. Raises Invalid."""
        text = load_tokenizer(model_dir / "tokenizer.json").to_str()
        return cls(text, vocab_size, eos_token_ids)

    def open(
        self, grammar: Grammar, answered: Sequence[TokenId] = (), owner: bytes = b""
    ) -> "GrammarMatcher":
        """A place in ``grammar``, after the tokens that the answer has already. Owners share
        nothing. Takes up to a second for what was tried before (:mod:`baton.text.grammar.checker`).
        Raises Invalid when it can't be compiled, or the answer isn't one of it."""
        name = (owner, grammar)
        with self._lock:
            why = self._too_slow.get(grammar.digest(owner.hex())) if self._too_slow else None
        if why is not None:
            raise Invalid(why, param="response_format")
        walk = call_with_large_stack(
            lambda: GrammarMatcher(self, grammar, self._copy(name), answered, owner)
        )
        walk.check()
        return walk

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher that shares nothing with others. Raises Invalid."""
        return compile_grammar(self._vocabulary, grammar)

    def forget(self, grammar: Grammar, owner: bytes = b"") -> None:
        """Its compiled form has grown too large to be shared any longer."""
        with self._lock:
            self._compiled.pop((owner, grammar), None)

    def refuse(self, grammar: Grammar, owner: bytes, why: str) -> None:
        """A mask took too long: the owner's next answers are not held to it."""
        self.forget(grammar, owner)
        with self._lock:
            self._too_slow[grammar.digest(owner.hex())] = why
            if len(self._too_slow) > MAX_TOO_SLOW:
                self._too_slow.popitem(last=False)

    def _copy(self, name: tuple[bytes, Grammar]) -> LLMatcher:
        """Copies share what was found out about the grammar's states, which only grows."""
        with self._lock:
            matcher = self._compiled.get(name)
            if matcher is not None:
                self._compiled.move_to_end(name)
        if matcher is None:
            matcher = self.compile(name[1])
            self._keep(name, matcher)
        return matcher.deep_copy()

    def _keep(self, name: tuple[bytes, Grammar], matcher: LLMatcher) -> None:
        with self._lock:
            self._compiled[name] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)


class GrammarMatcher:
    """One answer's way through its grammar. Implements ``baton.engine.constraint.Constraint``.

    What others have found out about the grammar's states counts against its bounds, so a walk that
    meets one is walked again with states of its own: whether it ends well depends on nothing but
    the answer, and on a mask's time.
    """

    def __init__(
        self,
        grammars: GrammarCompiler,
        grammar: Grammar,
        matcher: LLMatcher,
        answered: Sequence[TokenId] = (),
        owner: bytes = b"",
    ) -> None:
        """In a thread with a large stack."""
        self._grammars = grammars
        self._grammar = grammar
        self._owner = owner
        self._matcher = matcher
        self._shares = True
        self._answered: list[int] = list(answered)
        self._coming: MaskJob | None = None
        self.error = ""
        matcher.consume_tokens(self._answered)
        self._astray = matcher.is_error()
        self._bits = self._next_bits()

    def accept(self, token_id: TokenId) -> None:
        self._settle()
        if self.error:
            return
        self._answered.append(token_id)
        self._coming = self._grammars.threads.submit(partial(self._advance, token_id))

    def mask(self) -> bytes:
        self._settle()
        if not self._bits and not self.error:
            why = self._matcher.get_error().split("\n")[0] or "it allows no token"
            self.error = f"the grammar can't be followed any further: {why}"[:MAX_MESSAGE]
        return self._bits

    def check(self) -> None:
        """Raises Invalid when the answer has gone astray."""
        if self._astray and not self.mask():
            raise Invalid(self.error, param="response_format")

    def _settle(self) -> None:
        """Takes what a thread has made, once it has: one matcher is for one of them."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        try:
            self._bits = coming.result()
        except MaskTimeout as slow:
            self._bits = b""
            self.error = f"the grammar can't be followed any further: for one token {slow}"
            self._grammars.refuse(self._grammar, self._owner, self.error)

    def _advance(self, token_id: TokenId) -> bytes:
        """In a thread. Empty when no token may come next."""
        self._matcher.consume_token(token_id)
        return self._next_bits()

    def _next_bits(self) -> bytes:
        bits = self._matcher.compute_bitmask()
        if self._is_good(bits) or not self._shares:
            return bits if self._is_good(bits) else b""
        self._shares = False
        self._grammars.forget(self._grammar, self._owner)
        self._matcher = self._grammars.compile(self._grammar)
        self._matcher.consume_tokens(self._answered)
        return self._next_bits()

    def _is_good(self, bits: bytes) -> bool:
        return not self._matcher.is_error() and bits.count(0) < len(bits)
