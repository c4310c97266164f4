"""Turns a :class:`~router.serving.request.GenerationRequest` into token ids and sampling
parameters, without I/O. :class:`~router.serving.offload_executor.OffloadExecutor` runs this in the
event loop or, for a body of more than 32 KiB, in a thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from baton.core.grammar import Grammar
from baton.core.ids import BlockKey, TokenId
from baton.core.request import MAX_PROMPT_LOGPROBS, SamplingParams
from baton.errors import CONTEXT_LENGTH_EXCEEDED, Invalid, context_length_message
from baton.text.grammar.to_lark import check_grammar_text
from baton.text.shared_token_ids import share_token_ids
from baton.text.tokenizer import Tokenizer
from router.errors import ApiError, PromptTooLong, invalid_field
from router.generation.block_key_hasher import BlockKeyHasher
from router.generation.prefix_pinner import PrefixPin
from router.http.json_limits import max_json_values
from router.serving.cache_breakpoints import find_prefix_pins
from router.serving.chat_renderer import ChatRenderer
from router.serving.grammar_validator import TOOLS_FIELD, grammar_error, grammar_rule_for
from router.serving.parsers.model_output_format import ModelOutputFormat
from router.serving.request import Chat, FieldNames, GenerationRequest, Texts
from router.serving.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from router.serving.schema.tool import ToolUse
from router.serving.token_rules import token_rules_grammar

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


TEMPLATE_PARAM = "messages"
"""The field that errors of the chat template name."""


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
    ``seed`` is used if the client sends no seed, and ``defaults`` if it sends no other sampling
    parameters."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        output_format: ModelOutputFormat,
        limits: ModelLimits,
        hasher: BlockKeyHasher | None,
        seed: int,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
    ) -> None:
        self._tokenizer = tokenizer
        self._output_format = output_format
        self._limits = limits
        self._hasher = hasher
        self._seed = seed
        self._defaults = defaults

    def prepare(self, request: GenerationRequest) -> list[Prompt]:
        """Build the prompts of a request. Raises ApiError or Invalid, which name the invalid
        field."""
        if isinstance(request.prompt, Chat):
            prompts = [self._prepare_chat(request, request.prompt)]
        else:
            prompts = self._prepare_texts(request, request.prompt)
        check_num_prompt_logprobs(prompts, request)
        check_repeated_prompts(prompts, request)
        return prompts

    def _prepare_chat(self, request: GenerationRequest, chat: Chat) -> Prompt:
        text = render_chat(chat, self._tokenizer, self._output_format, self._limits)
        all_ids = self._encode(text, request)
        ids = self._truncate(all_ids, request, request.max_tokens or 1)
        rest = self._limits.context_tokens - len(ids)
        max_tokens = request.max_tokens or rest
        if request.caps_max_tokens and rest > 0:
            max_tokens = min(max_tokens, rest)
        sampling = self._sampling_params(request, max_tokens)
        prompt = self._build_prompt(request, ids, sampling)
        pins = self._prefix_pins(chat, prompt) if len(ids) == len(all_ids) else ()
        prompt = replace(
            prompt,
            starts_in_reasoning=self._output_format.starts_in_reasoning(text),
            prefix_pins=pins,
        )
        dialect = self._output_format.for_prompt(text, reasoning_off=chat.disables_reasoning)
        may_call = bool(chat.tools.offered) and dialect.tools is not None
        if chat.tools.is_forced or (may_call and request.follows_strict_tools):
            return _with_tool_call_grammar(dialect, prompt, chat.tools)
        return _with_response_format(dialect, prompt, request, may_call=may_call)

    def _prefix_pins(self, chat: Chat, prompt: Prompt) -> tuple[PrefixPin, ...]:
        if self._hasher is None:
            return ()
        tokenizer, block_tokens = self._tokenizer, self._hasher.block_size_tokens
        return find_prefix_pins(
            chat,
            tokenizer,
            prompt.token_ids,
            prompt.block_keys,
            block_tokens,
            self._limits.max_chat_characters,
        )

    def _prepare_texts(self, request: GenerationRequest, texts: Texts) -> list[Prompt]:
        given_tokens = request.max_tokens
        wanted = DEFAULT_COMPLETION_TOKENS if given_tokens is None else max(given_tokens, 1)
        sampling = self._sampling_params(request, wanted)
        prompts: list[Prompt] = []
        num_tokens = 0
        for given in texts.prompts:
            all_ids = self._text_ids(given, request)
            num_tokens += len(all_ids)
            if num_tokens > self._limits.max_request_tokens:
                raise too_many_tokens(texts.names.prompt, self._limits.max_request_tokens)
            ids = self._truncate(all_ids, request, wanted)
            prompt = self._build_prompt(request, ids, sampling)
            if texts.echo:
                is_whole = isinstance(given, str) and len(ids) == len(all_ids)
                text = str(given) if is_whole else self._tokenizer.decode(ids)
                prompt = replace(prompt, echo_text=text)
            prompts.append(replace(prompt, prompt_only=texts.is_prompt_only))
        return prompts

    def _text_ids(self, given: str | list[int], request: GenerationRequest) -> list[int]:
        if isinstance(given, str):
            return self._encode(given, request)
        check_token_ids(given, self._limits.vocab_size, request.prompt.names.prompt)
        return given

    def _encode(self, text: str, request: GenerationRequest) -> list[int]:
        """Tokenise a text. Raises ApiError (400) for a text that is clearly too long, before all of
        it is tokenised. If the prompt will be truncated, it may be longer than the context."""
        context, limit = self._limits.context_tokens, self._limits.max_request_tokens
        param = request.prompt.names.prompt
        if request.truncate_prompt_tokens is not None:
            if self._tokenizer.exceeds_tokens(text, limit):
                raise too_many_tokens(param, limit)
        elif self._tokenizer.exceeds_tokens(text, context):
            raise PromptTooLong(
                f"{param} has more than {context} tokens",
                num_tokens=context + 1,
                context_tokens=context,
                param=param,
            )
        return self._tokenizer.encode(text, add_special_tokens=request.prompt.adds_special_tokens)

    def _truncate(
        self, ids: Sequence[int], request: GenerationRequest, max_tokens: int
    ) -> Sequence[int]:
        """Return the tokens at the end of a prompt that ``truncate_prompt_tokens`` keeps. If it is
        -1, as many tokens are kept as leave room for ``max_tokens`` in the model's context."""
        kept = request.truncate_prompt_tokens
        if kept is None:
            return ids
        if kept == -1:
            kept = max(self._limits.context_tokens - max_tokens, 1)
        return ids[-kept:]

    def _build_prompt(
        self, request: GenerationRequest, ids: Sequence[int], sampling: SamplingParams
    ) -> Prompt:
        names, max_tokens = request.prompt.names, sampling.max_tokens
        self._check_length(len(ids), names, max_tokens)
        if sampling.min_tokens > max_tokens:
            message = (
                f"min_tokens is {sampling.min_tokens}, above {names.max_tokens}, which is "
                f"{max_tokens}"
            )
            raise invalid_field("min_tokens", message)
        token_ids = share_token_ids(ids, self._limits.vocab_size)
        is_cacheable = self._hasher is not None and request.num_prompt_logprobs is None
        keys = (
            self._hasher.compute_keys(token_ids)
            if self._hasher is not None and is_cacheable
            else ()
        )
        return Prompt(token_ids, keys, sampling)

    def _check_length(self, num_tokens: int, names: FieldNames, max_tokens: int) -> None:
        context, param = self._limits.context_tokens, names.prompt
        if num_tokens == 0:
            raise invalid_field(param, f"{param} has no tokens")
        if num_tokens >= context:
            raise PromptTooLong(
                f"{param} has {num_tokens} tokens, which leaves none for the answer",
                num_tokens=num_tokens,
                context_tokens=context,
                param=param,
            )
        if num_tokens + max_tokens > context:
            problem = (
                f"you requested {num_tokens + max_tokens} tokens: {param} has {num_tokens}, and "
                f"{names.max_tokens} is {max_tokens}"
            )
            message = context_length_message(context, problem)
            raise invalid_field(names.max_tokens, message, CONTEXT_LENGTH_EXCEEDED)

    def _sampling_params(self, request: GenerationRequest, max_tokens: int) -> SamplingParams:
        vocab_size, given = self._limits.vocab_size, request.sampling
        stop_token_ids = given.stop_token_ids or []
        check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
        check_token_ids(request.allowed_token_ids or (), vocab_size, "allowed_token_ids")
        values = self._defaults.with_values_of(given)
        is_greedy = values.top_p == 0  # only the likeliest token has a part of this probability
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if is_greedy else values.temperature,
            top_k=max(values.top_k, 0),
            top_p=1.0 if is_greedy else values.top_p,
            min_p=values.min_p,
            repetition_penalty=values.repetition_penalty,
            presence_penalty=given.presence_penalty or 0.0,
            frequency_penalty=given.frequency_penalty or 0.0,
            logit_bias=_logit_biases(given.logit_bias or {}, vocab_size),
            seed=(self._seed if given.wants_random_seed else given.seed or 0) % 2**64,
            logprobs=_num_output_logprobs(request),
            stop_token_ids=cast(tuple[TokenId, ...], tuple(stop_token_ids)),
            ignore_eos=bool(given.ignore_eos),
            grammar=request.format[1]
            if request.format is not None
            else token_rules_grammar(request, self._tokenizer),
            min_tokens=given.min_tokens or 0,
            prompt_logprobs=request.num_prompt_logprobs,
        )


def _with_response_format(
    dialect: ModelOutputFormat, prompt: Prompt, request: GenerationRequest, *, may_call: bool
) -> Prompt:
    """Return the prompt with a grammar that lets a reasoning model reason freely before an answer
    that follows the response format or, if it ``may_call`` tools, consists of calls. The prompt
    stays unchanged if there is no response format, if the model neither reasons nor may call, or if
    the client wrote a whole Lark grammar."""
    reasons = dialect.reasoning is not None or prompt.starts_in_reasoning
    if request.format is None or not (reasons or may_call):
        return prompt
    field, grammar = request.format
    rule = grammar_rule_for(grammar, field)
    if rule is None:
        return prompt

    def build() -> Grammar:
        in_reasoning = prompt.starts_in_reasoning
        if may_call:
            return dialect.call_or_answer_grammar(
                request.tools.offered,
                rule,
                in_reasoning=in_reasoning,
                max_calls=request.tools.max_calls,
            )
        return dialect.answer_grammar(rule, in_reasoning=in_reasoning)

    return _with_grammar(prompt, field, build)


def _with_tool_call_grammar(dialect: ModelOutputFormat, prompt: Prompt, tools: ToolUse) -> Prompt:
    """Set the grammar of the answer. If tool calls are forced, the answer must consist of calls;
    otherwise it may contain calls, and calls of strict tools must follow the tools' schemas."""
    build = dialect.forced_call_grammar if tools.is_forced else dialect.offered_call_grammar
    in_reasoning, max_calls = prompt.starts_in_reasoning, tools.max_calls
    return _with_grammar(
        prompt,
        TOOLS_FIELD,
        lambda: build(tools.offered, in_reasoning=in_reasoning, max_calls=max_calls),
    )


def _with_grammar(prompt: Prompt, field: str, build: Callable[[], Grammar]) -> Prompt:
    """Set the grammar of the answer. Raises ApiError (400), which names ``field``, if it can't be
    built or is too large: :class:`~router.serving.grammar_validator.GrammarValidator`, which hashes
    grammars in the event loop, gets only small ones."""
    try:
        grammar = build()
        check_grammar_text(grammar.text)
    except Invalid as error:
        raise grammar_error(field, str(error)) from error
    return replace(prompt, sampling=replace(prompt.sampling, grammar=grammar))


def render_chat(
    chat: Chat, tokenizer: Tokenizer, output_format: ModelOutputFormat, limits: ModelLimits
) -> str:
    """Return the text of a chat's prompt. Raises ApiError or Invalid, which name the invalid
    field."""
    if chat.tools.offered and not (output_format.supports_tools or chat.tools.is_forced):
        message = (
            "the model's chat template does not support tools; use tool_choice to force a call"
        )
        raise invalid_field("tools", message, "unsupported_parameter")
    names = chat.names
    try:
        return ChatRenderer(tokenizer).render(chat, limits.max_chat_characters)
    except Invalid as error:
        message, param = str(error), error.param
        if error.code == CONTEXT_LENGTH_EXCEEDED:
            problem = (
                f"the chat template makes a text of more than {limits.max_chat_characters} "
                f"characters from the {names.prompt} and tools, the limit of one request; send "
                "fewer or shorter ones"
            )
            message = context_length_message(limits.context_tokens, problem)
        if param == TEMPLATE_PARAM:
            param = names.prompt
        raise Invalid(message, param=param, code=error.code) from error


def count_prompt_tokens(
    chat: Chat, tokenizer: Tokenizer, output_format: ModelOutputFormat, limits: ModelLimits
) -> int:
    """Return the number of tokens in a chat's prompt. Raises ApiError or Invalid, which name the
    invalid field."""
    text = render_chat(chat, tokenizer, output_format, limits)
    special = chat.adds_special_tokens
    return len(encode_within_limit(text, chat.names.prompt, special, tokenizer, limits))


def encode_within_limit(
    text: str, param: str, special: bool, tokenizer: Tokenizer, limits: ModelLimits
) -> list[int]:
    """Tokenise a text that need not fit into the context. Raises ApiError (400) for a text with
    more tokens than one request may have."""
    limit = limits.max_request_tokens
    if tokenizer.exceeds_tokens(text, limit):
        raise too_many_tokens(param, limit)
    ids = tokenizer.encode(text, special)
    if len(ids) > limit:
        raise too_many_tokens(param, limit)
    return ids


def too_many_tokens(param: str, limit: int) -> ApiError:
    message = f"{param} has more than {limit} tokens, the limit of one request; send it in parts"
    return invalid_field(param, message, "too_many_tokens")


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Check that all ids are in the vocabulary. Raises ApiError (400)."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        message = f"{param}: token ids must be between 0 and {vocab_size - 1}"
        raise invalid_field(param, message)


def count_prompt_logprobs(prompts: Sequence[Prompt], request: GenerationRequest) -> int:
    """Return the number of logprobs of all prompts in total, alternatives included."""
    if request.num_prompt_logprobs is None:
        return 0
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return num_tokens * (1 + request.num_prompt_logprobs) * request.num_candidates


def check_num_prompt_logprobs(prompts: Sequence[Prompt], request: GenerationRequest) -> None:
    """Check that the request has no more prompt logprobs than one message from a worker may have.
    Raises ApiError (400)."""
    count = count_prompt_logprobs(prompts, request)
    if count > MAX_PROMPT_LOGPROBS:
        field = request.prompt_logprobs_field
        message = (
            f"{field}: {count} logprobs of prompts, alternatives included, are more than the "
            f"{MAX_PROMPT_LOGPROBS} that one request may have"
        )
        raise invalid_field(field, message)


def repeated_prompt_bytes(prompt: Prompt, request: GenerationRequest) -> int:
    """Return the approximate size of a prompt in one choice of the answer."""
    num_ids = len(prompt.token_ids) if request.return_token_ids else 0
    return len(prompt.echo_text) + num_ids * BYTES_PER_TOKEN_ID


def check_repeated_prompts(prompts: Sequence[Prompt], request: GenerationRequest) -> None:
    """Check the size of the prompts that the answer's choices repeat. Raises ApiError (400)."""
    num_choices = request.num_choices
    size = sum(repeated_prompt_bytes(prompt, request) for prompt in prompts) * num_choices
    if size > MAX_REPEATED_PROMPT_BYTES:
        field = "return_token_ids" if request.return_token_ids else "echo"
        message = (
            f"{field}: the {num_choices} choices of each prompt would repeat {size} bytes of "
            f"prompts; at most {MAX_REPEATED_PROMPT_BYTES} are allowed, so use a smaller n or send "
            f"the request without {field}"
        )
        raise invalid_field(field, message)


def _num_output_logprobs(request: GenerationRequest) -> int | None:
    """Return the number of logprobs per token to request from workers, or None for no logprobs.
    ``best_of`` ranks answers by their logprobs, so it needs them even if the client did not request
    any."""
    is_ranked = request.num_candidates > request.num_choices
    return 0 if is_ranked and request.num_logprobs is None else request.num_logprobs


def _logit_biases(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[TokenId, float], ...]:
    biases = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            message = f"logit_bias: {key!r} is not a token id between 0 and {vocab_size - 1}"
            raise invalid_field("logit_bias", message)
        biases.append((TokenId(int(key)), bias))
    return tuple(sorted(biases))
