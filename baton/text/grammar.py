"""Answers held to their grammars: compiled and walked by llguidance, within bounds."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from baton.core.grammar import Grammar
from baton.core.ids import TokenId
from baton.errors import Invalid
from baton.text.grammar_compile import MAX_MESSAGE, compile_grammar
from baton.text.tokenizer import load_tokenizer

MASK_THREADS = 4
"""Masks take from 5 µs to some milliseconds each, and are made while the model runs."""

MAX_COMPILED = 16
"""Grammars that are kept compiled: about 1 MB each, 50 MB at worst."""


class Grammars:
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
        self.threads = ThreadPoolExecutor(MASK_THREADS, "mask")
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[TokenId]) -> "Grammars":
        """Of a model's directory. Raises Invalid."""
        text = load_tokenizer(model_dir / "tokenizer.json").to_str()
        return cls(text, vocab_size, eos_token_ids)

    def open(self, grammar: Grammar, answered: Sequence[TokenId] = ()) -> "Walk":
        """A place in ``grammar``, after the tokens that the answer has already. Takes up to half a
        second. Raises Invalid when it can't be compiled, or the answer isn't one of it."""
        walk = Walk(self, grammar, self._shared(grammar).deep_copy(), answered)
        walk.check()
        return walk

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher that shares nothing with others."""
        return compile_grammar(self._vocabulary, grammar)

    def forget(self, grammar: Grammar) -> None:
        """Its compiled form has grown too large to be shared any longer."""
        with self._lock:
            self._compiled.pop(grammar, None)

    def _shared(self, grammar: Grammar) -> LLMatcher:
        """Copies of it share what was found out about its states, which only grows."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        matcher = self.compile(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


class Walk:
    """One answer's way through its grammar. Implements ``baton.engine.constraint.Constraint``.

    What others have found out about the grammar's states counts against its bounds, so a walk that
    meets one is walked again with states of its own: whether it ends well depends on nothing but
    the answer.
    """

    def __init__(
        self,
        grammars: Grammars,
        grammar: Grammar,
        matcher: LLMatcher,
        answered: Sequence[TokenId] = (),
    ) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._matcher = matcher
        self._shares = True
        self._answered: list[int] = list(answered)
        self._coming: Future[bytes] | None = None
        self.error = ""
        matcher.consume_tokens(self._answered)

    def accept(self, token_id: TokenId) -> None:
        self._answered.append(token_id)
        self._settle()
        self._matcher.consume_token(token_id)
        self._coming = self._grammars.threads.submit(self._matcher.compute_bitmask)

    def mask(self) -> bytes:
        bits = self._bits()
        if not bits and self._shares:
            self._walk_again()
            bits = self._bits()
        if not bits:
            why = self._matcher.get_error().split("\n")[0] or "it allows no token"
            self.error = f"the grammar can't be followed any further: {why}"[:MAX_MESSAGE]
        return bits

    def check(self) -> None:
        """Raises Invalid when the answer has gone astray."""
        if self._matcher.is_error() and not self.mask():
            raise Invalid(self.error, param="response_format")

    def _bits(self) -> bytes:
        """Empty when none is set."""
        bits = self._settle() or self._matcher.compute_bitmask()
        return b"" if self._matcher.is_error() or not any(bits) else bits

    def _settle(self) -> bytes | None:
        """What a thread has made, once it has: one matcher is for one of them."""
        coming, self._coming = self._coming, None
        return None if coming is None else coming.result()

    def _walk_again(self) -> None:
        self._shares = False
        self._grammars.forget(self._grammar)
        self._matcher = self._grammars.compile(self._grammar)
        self._matcher.consume_tokens(self._answered)
