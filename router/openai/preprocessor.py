"""Turns a request body into token ids and sampling parameters. This does no I/O, and takes so long
for long prompts that it runs in a thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import orjson

from baton.core.grammar import Grammar
from baton.core.ids import BlockKey, TokenId
from baton.core.request import MAX_PROMPT_LOGPROBS, SamplingParams
from baton.errors import Invalid
from baton.text.grammar.to_lark import check_grammar_text
from baton.text.shared_token_ids import share_token_ids
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.generation.block_key_hasher import BlockKeyHasher
from router.generation.prefix_pinner import PrefixPin
from router.http.json_limits import max_json_values
from router.openai.cache_breakpoints import find_prefix_pins
from router.openai.chat_renderer import ChatRenderer
from router.openai.grammar_validator import TOOLS_FIELD, grammar_error, grammar_rule_for
from router.openai.parsers.model_output_format import ModelOutputFormat
from router.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from router.openai.schema.tool import Tool
from router.openai.token_rules import token_rules_grammar

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default ``max_tokens`` of completions; a chat may use the rest of the context."""

MAX_REPEATED_PROMPT_BYTES = 16 * 2**20
"""The maximum size of a request's prompts in its answer, where ``echo`` and ``return_token_ids``
repeat a prompt in each of its choices. Without it, 128 choices would repeat 8 MB to 1 GiB."""

MAX_CHARACTERS_PER_TOKEN = 16
"""A chat's prompt may have this many characters per token that one request may have. Text has 4 on
average. Without this limit, a template that indents JSON would turn nested lists into many times
the size of the body."""

BYTES_PER_TOKEN_ID = 8
"""The approximate size of a token id in JSON."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is ready for generation.

    ``echo_text`` is the prompt if it is echoed, else empty. ``sampling.seed`` is the first answer's
    seed; the seed of each further answer is one higher. ``starts_in_reasoning`` is True if the
    prompt ends inside a reasoning section. ``prompt_only`` is True if the client wants only the
    prompt or its logprobs: one token is generated and not shown."""

    token_ids: tuple[TokenId, ...]
    block_keys: tuple[BlockKey, ...]
    sampling: SamplingParams
    echo_text: str = ""
    starts_in_reasoning: bool = False
    prompt_only: bool = False
    prefix_pins: tuple[PrefixPin, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The model's limits. ``context_tokens`` is the maximum number of tokens in the prompt and the
    answer together."""

    context_tokens: int
    vocab_size: int

    @property
    def max_request_tokens(self) -> int:
        """The maximum number of tokens in all prompts of a request together, or in a text to
        tokenise."""
        return max_json_values(self.context_tokens)

    @property
    def max_chat_characters(self) -> int:
        """The maximum number of characters in the prompt of a chat."""
        return MAX_CHARACTERS_PER_TOKEN * self.max_request_tokens


class Preprocessor:
    """The CPU-bound part of handling one request. ``hasher`` is None while there are no workers;
    ``seed`` is used if the client sends no seed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        output_format: ModelOutputFormat,
        limits: ModelLimits,
        hasher: BlockKeyHasher | None,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._output_format = output_format
        self._limits = limits
        self._hasher = hasher
        self._seed = seed

    def prepare_chat(self, body: ChatBody, *, caps_max_tokens: bool = False) -> list[Prompt]:
        """Build the prompt of a chat. If ``caps_max_tokens`` is True, a ``max_tokens`` beyond the
        model's context is reduced to the rest of the context instead of being refused. Raises
        ApiError or Invalid, which name the invalid field."""
        tools = body.offered_tools
        text = render_chat(body, tools, self._tokenizer, self._output_format, self._limits)
        all_ids = self._encode(
            text,
            "messages",
            special=bool(body.add_special_tokens),
            is_truncated=body.truncate_prompt_tokens is not None,
        )
        wanted = body.max_completion_tokens or body.max_tokens
        ids = self._truncate(all_ids, body, wanted or 1)
        rest = self._limits.context_tokens - len(ids)
        max_tokens = wanted or rest
        if caps_max_tokens and rest > 0:
            max_tokens = min(max_tokens, rest)
        sampling = self._sampling_params(body, max_tokens)
        prompt = self._build_prompt(body, ids, "messages", sampling)
        check_num_prompt_logprobs([len(ids)], body)
        check_repeated_prompts([prompt], body)
        pins = self._prefix_pins(body, tools, prompt) if len(ids) == len(all_ids) else ()
        prompt = replace(
            prompt,
            starts_in_reasoning=self._output_format.starts_in_reasoning(text),
            prefix_pins=pins,
        )
        dialect = self._output_format.for_prompt(text, reasoning_off=body.disables_reasoning)
        may_call = bool(tools) and dialect.tools is not None
        if body.forces_tool_call or (may_call and body.has_strict_tools):
            return [_with_tool_call_grammar(dialect, prompt, body)]
        return [_with_response_format(dialect, prompt, body, may_call=may_call)]

    def _prefix_pins(
        self, body: ChatBody, tools: Sequence[Tool], prompt: Prompt
    ) -> tuple[PrefixPin, ...]:
        if self._hasher is None:
            return ()
        tokenizer, block_tokens = self._tokenizer, self._hasher.block_size_tokens
        return find_prefix_pins(
            body,
            tools,
            tokenizer,
            prompt.token_ids,
            prompt.block_keys,
            block_tokens,
            self._limits.max_chat_characters,
        )

    def prepare_completion(self, body: CompletionBody) -> list[Prompt]:
        """Build the prompts of a completion. Raises ApiError or Invalid, which name the invalid
        field."""
        wanted = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        sampling = self._sampling_params(body, wanted)
        prompts: list[Prompt] = []
        num_tokens = 0
        for given in body.prompt:
            all_ids = self._completion_ids(given, body)
            num_tokens += len(all_ids)
            if num_tokens > self._limits.max_request_tokens:
                raise _too_many_tokens("prompt", self._limits.max_request_tokens)
            ids = self._truncate(all_ids, body, wanted)
            prompt = self._build_prompt(body, ids, "prompt", sampling)
            if body.echo:
                is_whole = isinstance(given, str) and len(ids) == len(all_ids)
                text = str(given) if is_whole else self._tokenizer.decode(ids)
                prompt = replace(prompt, echo_text=text)
            prompts.append(replace(prompt, prompt_only=body.max_tokens == 0))
        check_num_prompt_logprobs([len(prompt.token_ids) for prompt in prompts], body)
        check_repeated_prompts(prompts, body)
        return prompts

    def _completion_ids(self, given: str | list[int], body: CompletionBody) -> list[int]:
        if isinstance(given, str):
            return self._encode(
                given,
                "prompt",
                special=body.add_special_tokens is not False,
                is_truncated=body.truncate_prompt_tokens is not None,
            )
        check_token_ids(given, self._limits.vocab_size, "prompt")
        return given

    def _encode(
        self, text: str, param: str, *, special: bool, is_truncated: bool = False
    ) -> list[int]:
        """Tokenise a text. Raises ApiError (400) for a text that is clearly too long, before all of
        it is tokenised. If the prompt will be truncated, it may be longer than the context."""
        context, limit = self._limits.context_tokens, self._limits.max_request_tokens
        if is_truncated:
            if self._tokenizer.exceeds_tokens(text, limit):
                raise _too_many_tokens(param, limit)
        elif self._tokenizer.exceeds_tokens(text, context):
            message = (
                f"{param} has more than {context} tokens, and the model's context is {context} "
                "tokens, the answer included"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return self._tokenizer.encode(text, add_special_tokens=special)

    def _truncate(self, ids: Sequence[int], body: GenerationBody, max_tokens: int) -> Sequence[int]:
        """Return the tokens at the end of a prompt that ``truncate_prompt_tokens`` keeps. If it is
        -1, as many tokens are kept as leave room for ``max_tokens`` in the model's context."""
        kept = body.truncate_prompt_tokens
        if kept is None:
            return ids
        if kept == -1:
            kept = max(self._limits.context_tokens - max_tokens, 1)
        return ids[-kept:]

    def _build_prompt(
        self, body: GenerationBody, ids: Sequence[int], param: str, sampling: SamplingParams
    ) -> Prompt:
        max_tokens = sampling.max_tokens
        self._check_length(len(ids), param, max_tokens)
        if (body.min_tokens or 0) > max_tokens:
            message = f"min_tokens is {body.min_tokens}, above max_tokens, which is {max_tokens}"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        token_ids = share_token_ids(ids, self._limits.vocab_size)
        is_cacheable = self._hasher is not None and body.num_prompt_logprobs is None
        keys = (
            self._hasher.compute_keys(token_ids)
            if self._hasher is not None and is_cacheable
            else ()
        )
        return Prompt(token_ids, keys, sampling)

    def _check_length(self, num_tokens: int, param: str, max_tokens: int) -> None:
        context = self._limits.context_tokens
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

    def _sampling_params(self, body: GenerationBody, max_tokens: int) -> SamplingParams:
        vocab_size = self._limits.vocab_size
        stop_token_ids = body.stop_token_ids or []
        check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
        check_token_ids(body.allowed_token_ids or (), vocab_size, "allowed_token_ids")
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
            grammar=body.format[1]
            if body.format is not None
            else token_rules_grammar(body, self._tokenizer),
            min_tokens=body.min_tokens or 0,
            prompt_logprobs=body.num_prompt_logprobs,
        )


def _with_response_format(
    dialect: ModelOutputFormat, prompt: Prompt, body: ChatBody, *, may_call: bool
) -> Prompt:
    """Return the prompt with a grammar that lets a reasoning model reason freely before an answer
    that follows the response format or, if it ``may_call`` tools, consists of calls. The prompt
    stays unchanged if there is no response format, if the model neither reasons nor may call, or if
    the client wrote a whole Lark grammar."""
    reasons = dialect.reasoning is not None or prompt.starts_in_reasoning
    if body.format is None or not (reasons or may_call):
        return prompt
    field, grammar = body.format
    rule = grammar_rule_for(grammar, field)
    if rule is None:
        return prompt

    def build() -> Grammar:
        in_reasoning = prompt.starts_in_reasoning
        if may_call:
            return dialect.call_or_answer_grammar(
                body.offered_tools, rule, in_reasoning=in_reasoning, max_calls=body.max_tool_calls
            )
        return dialect.answer_grammar(rule, in_reasoning=in_reasoning)

    return _with_grammar(prompt, field, build)


def _with_tool_call_grammar(dialect: ModelOutputFormat, prompt: Prompt, body: ChatBody) -> Prompt:
    """Set the grammar of the answer. If tool calls are forced, the answer must consist of calls;
    otherwise it may contain calls, and calls of strict tools must follow the tools' schemas."""
    build = dialect.forced_call_grammar if body.forces_tool_call else dialect.offered_call_grammar
    return _with_grammar(
        prompt,
        TOOLS_FIELD,
        lambda: build(
            body.offered_tools,
            in_reasoning=prompt.starts_in_reasoning,
            max_calls=body.max_tool_calls,
        ),
    )


def _with_grammar(prompt: Prompt, field: str, build: Callable[[], Grammar]) -> Prompt:
    """Set the grammar of the answer. Raises ApiError (400), which names ``field``, if it can't be
    built or is too large: :class:`~router.openai.grammar_validator.GrammarValidator`, which hashes
    grammars in the event loop, gets only small ones."""
    try:
        grammar = build()
        check_grammar_text(grammar.text)
    except Invalid as error:
        raise grammar_error(field, str(error)) from error
    return replace(prompt, sampling=replace(prompt.sampling, grammar=grammar))


def render_chat(
    body: ChatBody,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    output_format: ModelOutputFormat,
    limits: ModelLimits,
) -> str:
    """Return the text of a chat's prompt. Raises ApiError or Invalid, which name the invalid
    field."""
    if tools and not (output_format.supports_tools or body.forces_tool_call):
        message = (
            "the model's chat template does not support tools; use tool_choice to force a call"
        )
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    return ChatRenderer(tokenizer).render(body, tools, limits.max_chat_characters)


def count_prompt_tokens(
    body: ChatBody, tokenizer: Tokenizer, output_format: ModelOutputFormat, limits: ModelLimits
) -> int:
    """Return the number of tokens in a chat's prompt. Raises ApiError or Invalid, which name the
    invalid field."""
    text = render_chat(body, body.offered_tools, tokenizer, output_format, limits)
    special = bool(body.add_special_tokens)
    return len(_encode_within_limit(text, "messages", special, tokenizer, limits))


def encode_tokenize_response(
    body: TokenizeBody, tokenizer: Tokenizer, limits: ModelLimits
) -> bytes:
    """Return the JSON response of ``/tokenize``: the token ids of the prompt that a completion or
    chat with the same body would have. Raises ApiError or Invalid."""
    if body.messages is None:
        text, param, special = body.prompt or "", "prompt", body.add_special_tokens is not False
    else:
        renderer, param = ChatRenderer(tokenizer), "messages"
        text = renderer.render(body, body.tools or (), limits.max_chat_characters)
        special = bool(body.add_special_tokens)
    ids = _encode_within_limit(text, param, special, tokenizer, limits)
    return orjson.dumps({"count": len(ids), "max_model_len": limits.context_tokens, "tokens": ids})


def _encode_within_limit(
    text: str, param: str, special: bool, tokenizer: Tokenizer, limits: ModelLimits
) -> list[int]:
    """Tokenise a text that need not fit into the context. Raises ApiError (400) for a text with
    more tokens than one request may have."""
    limit = limits.max_request_tokens
    if tokenizer.exceeds_tokens(text, limit):
        raise _too_many_tokens(param, limit)
    ids = tokenizer.encode(text, special)
    if len(ids) > limit:
        raise _too_many_tokens(param, limit)
    return ids


def encode_detokenize_response(
    body: DetokenizeBody, tokenizer: Tokenizer, limits: ModelLimits
) -> bytes:
    """Return the JSON response of ``/detokenize``. Raises ApiError (400)."""
    check_token_ids(body.tokens, limits.vocab_size, "tokens")
    if len(body.tokens) > limits.max_request_tokens:
        raise _too_many_tokens("tokens", limits.max_request_tokens)
    text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    return orjson.dumps({"prompt": text})


def _too_many_tokens(param: str, limit: int) -> ApiError:
    message = f"{param} has more than {limit} tokens, the limit of one request; send it in parts"
    return ApiError(400, message, param=param, code="too_many_tokens")


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Check that all ids are in the vocabulary. Raises ApiError (400)."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        message = f"{param}: token ids must be between 0 and {vocab_size - 1}"
        raise ApiError(400, message, param=param, code="invalid_value")


def count_prompt_logprobs(num_tokens: Sequence[int], body: GenerationBody) -> int:
    """Return the number of logprobs of all prompts in total, alternatives included. ``num_tokens``
    has the number of tokens of each prompt."""
    if body.num_prompt_logprobs is None:
        return 0
    return sum(num_tokens) * (1 + body.num_prompt_logprobs) * body.num_candidates


def check_num_prompt_logprobs(num_tokens: Sequence[int], body: GenerationBody) -> None:
    """Check that the request has no more prompt logprobs than one message from a worker may have.
    Raises ApiError (400)."""
    count = count_prompt_logprobs(num_tokens, body)
    if count > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        message = (
            f"{field}: {count} logprobs of prompts, alternatives included, are more than the "
            f"{MAX_PROMPT_LOGPROBS} that one request may have"
        )
        raise ApiError(400, message, param=field, code="invalid_value")


def repeated_prompt_bytes(prompt: Prompt, body: GenerationBody) -> int:
    """Return the approximate size of a prompt in one choice of the answer."""
    num_ids = len(prompt.token_ids) if body.return_token_ids else 0
    return len(prompt.echo_text) + num_ids * BYTES_PER_TOKEN_ID


def check_repeated_prompts(prompts: Sequence[Prompt], body: GenerationBody) -> None:
    """Check the size of the prompts that the answer's choices repeat. Raises ApiError (400)."""
    size = sum(repeated_prompt_bytes(prompt, body) for prompt in prompts) * body.num_choices
    if size > MAX_REPEATED_PROMPT_BYTES:
        field = "return_token_ids" if body.return_token_ids else "echo"
        message = (
            f"{field}: the {body.num_choices} choices of each prompt would repeat {size} bytes of "
            f"prompts; at most {MAX_REPEATED_PROMPT_BYTES} are allowed, so use a smaller n or send "
            f"the request without {field}"
        )
        raise ApiError(400, message, param=field, code="invalid_value")


def _num_output_logprobs(body: GenerationBody) -> int | None:
    """Return the number of logprobs per token to request from workers, or None for no logprobs.
    ``best_of`` ranks answers by their logprobs, so it needs them even if the client did not request
    any."""
    is_ranked = body.num_candidates > body.num_choices
    return 0 if is_ranked and body.num_logprobs is None else body.num_logprobs


def _logit_biases(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[TokenId, float], ...]:
    biases = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            message = f"logit_bias: {key!r} is not a token id between 0 and {vocab_size - 1}"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
        biases.append((TokenId(int(key)), bias))
    return tuple(sorted(biases))
