"""Builds grammars over a vocabulary of bytes, and lets an engine with a fake model generate outputs
that follow them."""

import json
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from baton.clock import ManualClock
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.text.detokenizer import byte_level_alphabet
from baton.text.grammar.matcher import GrammarCompiler
from testkit.fakes.runner import FakeRunner

EOS = TokenId(255)
"""A byte that never occurs in UTF-8 text."""

VOCAB = 256
PROMPT = tuple(map(TokenId, b"Answer:"))
CONFIG = EngineConfig(block_tokens=4, max_model_tokens=512, max_batched_tokens=32, growth_tokens=8)


def byte_vocabulary() -> str:
    """Return a tokenizer.json in which token ids 0 to 254 are the bytes and 255 is EOS."""
    characters = {byte: character for character, byte in byte_level_alphabet().items()}
    vocabulary = {characters[byte]: byte for byte in range(255)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer.to_str()


def byte_grammars() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), VOCAB, [EOS])


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def choice(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def grammar_request(
    name: str, grammar: Grammar | None, seed: int, max_tokens: int = 200, generated: bytes = b""
) -> RequestSpec:
    """Return a request for an answer that follows ``grammar``, or for any answer if that is None.
    ``generated`` is the beginning of the answer, one token per byte, which another engine has
    already generated."""
    sampling = SamplingParams(max_tokens, seed=seed, grammar=grammar)
    tokens = PROMPT + tuple(map(TokenId, generated))
    return RequestSpec(RequestId(name), Epoch(1), tokens, len(PROMPT), sampling)


def generate_all(
    grammars: GrammarCompiler, specs: Sequence[RequestSpec], num_blocks: int = 512
) -> dict[str, tuple[bytes, FinishReason]]:
    """Run ``specs`` as one batch on a fresh engine; return each request's text (without EOS) and
    finish reason."""
    engine = Engine(
        FakeRunner(num_blocks, CONFIG.block_tokens, VOCAB),
        CONFIG,
        model_digest=b"model",
        kv_dtype="fake",
        eos_token_ids=frozenset({EOS}),
        clock=ManualClock(),
    )
    generated: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    reasons: dict[str, FinishReason] = {}
    for spec in specs:
        grammar = spec.sampling.grammar
        answered = spec.token_ids[spec.num_prompt_tokens :]
        engine.add(
            spec, Task.PREFILL_AND_DECODE, grammars.create(grammar, answered) if grammar else None
        )
    while engine.has_work():
        for output in engine.step().outputs:
            generated[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
    return {
        name: (bytes(token for token in tokens if token != EOS), reasons[name])
        for name, tokens in generated.items()
    }
