"""Grammars over a vocabulary of bytes, and engines without a model that answer by them."""

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
from baton.engine.fake_runner import FakeRunner
from baton.text.detokenizer import byte_level_alphabet
from baton.text.grammar.matcher import GrammarCompiler

EOS = TokenId(255)
"""A byte that no text has."""

VOCAB = 256
PROMPT = tuple(map(TokenId, b"Answer:"))
CONFIG = EngineConfig(block_tokens=4, max_model_tokens=512, max_step_tokens=32, growth_tokens=8)


def byte_vocabulary() -> str:
    """A tokenizer.json: ids 0 to 254 are the bytes, 255 ends an answer."""
    characters = {byte: character for character, byte in byte_level_alphabet().items()}
    made = tokenizers.Tokenizer(models.BPE({characters[byte]: byte for byte in range(255)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made.to_str()


def byte_grammars() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), VOCAB, [EOS])


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def choice(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def asking(
    name: str, grammar: Grammar | None, seed: int, max_tokens: int = 200, answered: bytes = b""
) -> RequestSpec:
    """``answered`` is what another engine has answered before."""
    sampling = SamplingParams(max_tokens, seed=seed, grammar=grammar)
    tokens = PROMPT + tuple(map(TokenId, answered))
    return RequestSpec(RequestId(name), Epoch(1), tokens, len(PROMPT), sampling)


def answers(
    grammars: GrammarCompiler, specs: Sequence[RequestSpec], num_blocks: int = 512
) -> dict[str, tuple[bytes, FinishReason]]:
    """What a fresh engine says to all of them at once, without the EOS."""
    engine = Engine(
        FakeRunner(num_blocks, CONFIG.block_tokens, VOCAB),
        CONFIG,
        model_digest=b"model",
        kv_dtype="fake",
        eos_token_ids=frozenset({EOS}),
        clock=ManualClock(),
    )
    said: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    ended: dict[str, FinishReason] = {}
    for spec in specs:
        grammar = spec.sampling.grammar
        answered = spec.token_ids[spec.num_prompt_tokens :]
        engine.add(spec, Task.WHOLE, grammars.open(grammar, answered) if grammar else None)
    while engine.has_work():
        for output in engine.step().outputs:
            said[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
        engine.check_integrity()
    return {
        name: (bytes(token for token in tokens if token != EOS), ended[name])
        for name, tokens in said.items()
    }
