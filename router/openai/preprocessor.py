"""From a body to token ids and sampling parameters. Pure, and slow for long prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import orjson

from baton.core.grammar import Grammar
from baton.core.ids import BlockKey, TokenId
from baton.core.request import MAX_PROMPT_LOGPROBS, SamplingParams
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.generation.block_key_hasher import BlockKeyHasher
from router.generation.prefix_pinner import PrefixPin
from router.http.json_limits import max_json_values
from router.openai.cache_breakpoints import find_prefix_pins
from router.openai.chat_renderer import ChatRenderer
from router.openai.grammar_validator import grammar_rule_for
from router.openai.parsers.model_output_format import ModelOutputFormat
from router.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from router.openai.schema.tool import Tool

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat may use the rest of the context."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is what ``echo`` repeats; empty unless asked for. ``sampling.seed`` is the first
    answer's; those after count up from it. ``in_thought`` says that the prompt ends within one,
    ``silent`` that only the prompt matters: one token is computed, and not shown."""

    token_ids: tuple[TokenId, ...]
    keys: tuple[BlockKey, ...]
    sampling: SamplingParams
    text: str = ""
    in_thought: bool = False
    silent: bool = False
    pins: tuple[PrefixPin, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """``context`` is the most tokens of prompt and answer together."""

    context: int
    vocab_size: int

    @property
    def request_tokens(self) -> int:
        """Of all prompts of one request together, or of a text that is only counted."""
        return max_json_values(self.context)


class Preprocessor:
    """Everything about one request that takes the processor. ``chain`` may be None, when there
    are no workers; ``seed`` is used when the client gives none."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        dialect: ModelOutputFormat,
        limits: ModelLimits,
        chain: BlockKeyHasher | None,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._limits = limits
        self._chain = chain
        self._seed = seed

    def chat(self, body: ChatBody) -> list[Prompt]:
        """Raises Problem or Invalid, naming what is wrong."""
        tools = body.offered_tools
        if tools and not (self._dialect.knows_tools or body.must_call):
            message = (
                "the model's chat template knows no tools; a call can be forced, by tool_choice"
            )
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        text = ChatRenderer(self._tokenizer).text(body, tools)
        ids = self._encoded(text, "messages", special=bool(body.add_special_tokens))
        wanted = body.max_completion_tokens or body.max_tokens
        prompt = self._prompt(body, ids, "messages", wanted or self._limits.context - len(ids))
        check_num_prompt_logprobs([len(ids)], body)
        pins = self._pins(body, tools, prompt)
        prompt = replace(prompt, in_thought=self._dialect.in_thought(text), pins=pins)
        dialect = self._dialect.after(text, switched_off=body.switches_thinking_off)
        calls = body.must_call or (body.has_strict_tools and dialect.call_form is not None)
        return [
            _with_tool_call_grammar(dialect, prompt, body)
            if calls
            else _with_response_format(dialect, prompt, body)
        ]

    def _pins(self, body: ChatBody, tools: Sequence[Tool], prompt: Prompt) -> tuple[PrefixPin, ...]:
        if self._chain is None:
            return ()
        tokenizer, block_tokens = self._tokenizer, self._chain.block_tokens
        return find_prefix_pins(body, tools, tokenizer, prompt.token_ids, prompt.keys, block_tokens)

    def completion(self, body: CompletionBody) -> list[Prompt]:
        """Raises Problem or Invalid, naming what is wrong."""
        wanted = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        special = body.add_special_tokens is not False
        prompts: list[Prompt] = []
        num_tokens = 0
        for given in body.prompt:
            if isinstance(given, str):
                ids = self._encoded(given, "prompt", special=special)
            else:
                check_token_ids(given, self._limits.vocab_size, "prompt")
                ids = given
            num_tokens += len(ids)
            if num_tokens > self._limits.request_tokens:
                raise _too_many_tokens("prompt", self._limits.request_tokens)
            prompt = self._prompt(body, ids, "prompt", wanted)
            if body.echo:
                text = given if isinstance(given, str) else self._tokenizer.decode(given)
                prompt = replace(prompt, text=text)
            prompts.append(replace(prompt, silent=body.max_tokens == 0))
        check_num_prompt_logprobs([len(prompt.token_ids) for prompt in prompts], body)
        return prompts

    def _encoded(self, text: str, param: str, *, special: bool) -> list[int]:
        """Raises Problem (400) for a text that is plainly too long, before all of it is encoded."""
        context = self._limits.context
        if self._tokenizer.exceeds(text, context):
            message = (
                f"{param} has more than {context} tokens, and the model's context is {context} "
                "tokens, the answer included"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return self._tokenizer.encode(text, add_special_tokens=special)

    def _prompt(
        self, body: GenerationBody, ids: Sequence[int], param: str, max_tokens: int
    ) -> Prompt:
        self._check_length(len(ids), param, max_tokens)
        if (body.min_tokens or 0) > max_tokens:
            message = f"min_tokens is {body.min_tokens}, and max_tokens {max_tokens}"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        token_ids = cast(tuple[TokenId, ...], tuple(ids))
        reused = self._chain is not None and body.num_prompt_logprobs is None
        keys = self._chain.keys(token_ids) if self._chain is not None and reused else ()
        return Prompt(token_ids, keys, self._sampling(body, max_tokens))

    def _check_length(self, num_tokens: int, param: str, max_tokens: int) -> None:
        context = self._limits.context
        if num_tokens == 0:
            raise ApiError(400, f"{param} has no tokens", param=param, code="invalid_value")
        if num_tokens >= context:
            message = (
                f"{param} has {num_tokens} tokens, and the model's context is {context} tokens, "
                "the answer included"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if num_tokens + max_tokens > context:
            message = (
                f"{param} has {num_tokens} tokens, and with max_tokens {max_tokens} that is more "
                f"than the model's context of {context} tokens"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")

    def _sampling(self, body: GenerationBody, max_tokens: int) -> SamplingParams:
        vocab_size = self._limits.vocab_size
        stop_token_ids = body.stop_token_ids or []
        check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_biases(body.logit_bias or {}, vocab_size),
            seed=(self._seed if body.seed is None else body.seed) % 2**64,
            logprobs=_num_output_logprobs(body),
            stop_token_ids=cast(tuple[TokenId, ...], tuple(stop_token_ids)),
            ignore_eos=bool(body.ignore_eos),
            grammar=body.format[1] if body.format is not None else None,
            min_tokens=body.min_tokens or 0,
            prompt_logprobs=body.num_prompt_logprobs,
        )


def _with_response_format(dialect: ModelOutputFormat, prompt: Prompt, body: ChatBody) -> Prompt:
    """A model that thinks aloud may do so before it answers in a format."""
    if body.format is None or not (dialect.thinks or prompt.in_thought):
        return prompt
    field, grammar = body.format
    rule = grammar_rule_for(grammar, field)
    if rule is None:
        return prompt
    return _with_grammar(dialect.after_thought(rule, in_thought=prompt.in_thought), prompt)


def _with_tool_call_grammar(dialect: ModelOutputFormat, prompt: Prompt, body: ChatBody) -> Prompt:
    """One that must call, or may, and then by the schema."""
    grammar = dialect.forced if body.must_call else dialect.offered
    held = grammar(body.offered_tools, in_thought=prompt.in_thought, max_calls=body.max_calls)
    return _with_grammar(held, prompt)


def _with_grammar(grammar: Grammar, prompt: Prompt) -> Prompt:
    return replace(prompt, sampling=replace(prompt.sampling, grammar=grammar))


def encode_tokenize_response(
    body: TokenizeBody, tokenizer: Tokenizer, limits: ModelLimits
) -> bytes:
    """The JSON that ``/tokenize`` answers: the ids that the same body would be a prompt with.
    Raises Problem or Invalid."""
    if body.messages is None:
        text, param, special = body.prompt or "", "prompt", body.add_special_tokens is not False
    else:
        text, param = ChatRenderer(tokenizer).text(body, body.tools or ()), "messages"
        special = bool(body.add_special_tokens)
    most = limits.request_tokens
    if tokenizer.exceeds(text, most):
        raise _too_many_tokens(param, most)
    ids = tokenizer.encode(text, special)
    if len(ids) > most:
        raise _too_many_tokens(param, most)
    return orjson.dumps({"count": len(ids), "max_model_len": limits.context, "tokens": ids})


def encode_detokenize_response(
    body: DetokenizeBody, tokenizer: Tokenizer, limits: ModelLimits
) -> bytes:
    """The JSON that ``/detokenize`` answers. Raises Problem (400)."""
    check_token_ids(body.tokens, limits.vocab_size, "tokens")
    if len(body.tokens) > limits.request_tokens:
        raise _too_many_tokens("tokens", limits.request_tokens)
    text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    return orjson.dumps({"prompt": text})


def _too_many_tokens(param: str, most: int) -> ApiError:
    message = f"{param} has more than the {most} tokens that one request may have: send it in parts"
    return ApiError(400, message, param=param, code="too_many_tokens")


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises Problem (400)."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        message = f"{param}: token ids are between 0 and {vocab_size - 1}"
        raise ApiError(400, message, param=param, code="invalid_value")


def count_prompt_logprobs(num_tokens: Sequence[int], body: GenerationBody) -> int:
    """Logprobs of all prompts together, alternatives included."""
    if body.num_prompt_logprobs is None:
        return 0
    return sum(num_tokens) * (1 + body.num_prompt_logprobs) * body.candidates


def check_num_prompt_logprobs(num_tokens: Sequence[int], body: GenerationBody) -> None:
    """Raises Problem (400) for more logprobs of prompts than a message should have."""
    count = count_prompt_logprobs(num_tokens, body)
    if count > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        message = (
            f"{field}: {count} logprobs of prompts, alternatives included, are more than the "
            f"{MAX_PROMPT_LOGPROBS} that one request may ask for"
        )
        raise ApiError(400, message, param=field, code="invalid_value")


def _num_output_logprobs(body: GenerationBody) -> int | None:
    """The best of several answers is found by them."""
    ranked = body.candidates > body.choices
    return 0 if ranked and body.num_logprobs is None else body.num_logprobs


def _logit_biases(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[TokenId, float], ...]:
    biases = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            message = f"logit_bias: {key!r} is not a token id between 0 and {vocab_size - 1}"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
        biases.append((TokenId(int(key)), bias))
    return tuple(sorted(biases))
