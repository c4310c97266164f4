"""The format of a model's tool calls and reasoning: detected from its chat template and vocabulary,
or chosen by settings."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from baton.core.grammar import Grammar, GrammarKind
from baton.text.tokenizer import Tokenizer
from router.serving.parsers.call_grammar import ToolCallGrammar, reasoning_rules
from router.serving.parsers.markup_tokens import NO_MARKUP_TOKENS, MarkupTokens
from router.serving.parsers.output_parser import OutputParser
from router.serving.parsers.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from router.serving.parsers.tool_formats import PLAIN_JSON, TOOL_FORMATS, ToolFormat

TOOL_PARSERS = {each.name: each for each in TOOL_FORMATS}
"""The formats by their names in the setting ``tool_parser``."""

REASONING_PARSERS = {each.name: each for each in REASONING_FORMATS}
REASONING_PARSERS |= dict.fromkeys(("qwen3", "deepseek_r1"), REASONING_PARSERS["think"])
"""The formats by their names in the setting ``reasoning_parser``."""

MARKUP_STRINGS = tuple(
    dict.fromkeys(
        [
            *(string for row in TOOL_FORMATS for string in row.special),
            *(string for row in REASONING_FORMATS for string in row.special),
        ]
    )
)
"""All strings of all formats that may be special tokens."""

TOOL_FORMAT_HEADER = "x-baton-tool-format"

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelOutputFormat:
    """A model's output format. If ``tools`` is None, only tool calls that the client forces are
    parsed; their format is :data:`PLAIN_JSON`. ``starts_with_reasoning`` is True for models that
    begin with reasoning even if the prompt does not open a reasoning section.
    ``visible_special_ids`` are special tokens that must not be removed from the text, because the
    parser needs them."""

    tools: ToolFormat | None = None
    supports_tools: bool = False
    reasoning: ReasoningFormat | None = None
    starts_with_reasoning: bool = False
    markup_tokens: MarkupTokens = NO_MARKUP_TOKENS
    visible_special_ids: frozenset[int] = frozenset()

    @classmethod
    def detect(
        cls, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "ModelOutputFormat":
        template = tokenizer.chat_template_source
        tools: ToolFormat | None = None
        if tool_parser == "auto":
            tools = _detect(TOOL_FORMATS, template, tokenizer) or PLAIN_JSON
        elif tool_parser != "none":
            tools = TOOL_PARSERS[tool_parser]
        reasoning: ReasoningFormat | None = None
        if reasoning_parser == "auto":
            reasoning = _detect(REASONING_FORMATS, template, tokenizer)
        elif reasoning_parser != "none":
            reasoning = REASONING_PARSERS[reasoning_parser]
        own = (tools or PLAIN_JSON).special + (reasoning.special if reasoning is not None else ())
        ids = map(tokenizer.token_id, own)
        shown = tokenizer.special_ids.intersection(id_ for id_ in ids if id_ is not None)
        return cls(
            tools=tools,
            supports_tools="tools" in template,
            reasoning=reasoning,
            starts_with_reasoning=reasoning_parser == "deepseek_r1",
            markup_tokens=MarkupTokens.of(tokenizer, MARKUP_STRINGS),
            visible_special_ids=shown,
        )

    @property
    def is_known(self) -> bool:
        """Whether the format of tool calls is one that the model's template shows. If not, calls in
        plain JSON are read."""
        return self.tools is not PLAIN_JSON

    @property
    def names(self) -> dict[str, str]:
        """The names of the formats, by the fields in which clients see them."""
        return {
            "tool_format": "none" if self.tools is None else self.tools.name,
            "reasoning_format": "none" if self.reasoning is None else self.reasoning.name,
        }

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether the answer to ``prompt`` begins inside a reasoning section, without an opening
        mark."""
        if self.reasoning is None:
            return False
        prompt_end = prompt.rstrip()
        begins = self.starts_with_reasoning and not prompt_end.endswith(
            self.reasoning.prompt_closes
        )
        return begins or prompt_end.endswith(self.reasoning.prompt_opens)

    def for_prompt(self, prompt: str, *, reasoning_off: bool) -> "ModelOutputFormat":
        """Return the format from which to build the grammar of the answer to ``prompt``. It has no
        reasoning if the prompt ends with a closed reasoning section (templates write an empty one
        to switch reasoning off), or if ``reasoning_off`` is True and the prompt does not open a
        reasoning section."""
        if self.reasoning is None or self.reasoning.starts_with_header:
            return self
        is_over = prompt.rstrip().endswith(self.reasoning.prompt_closes)
        if is_over or (reasoning_off and not self.starts_in_reasoning(prompt)):
            return replace(self, reasoning=None)
        return self

    def create_parser(
        self, tools: Sequence[Tool], *, forced: bool, in_reasoning: bool, max_calls: int | None
    ) -> OutputParser | None:
        """Create a parser for the answer, or return None if the answer is only text."""
        call_format = (self.tools or PLAIN_JSON) if tools and (forced or self.tools) else None
        if self.reasoning is None and call_format is None:
            return None
        functions = (tool["function"] for tool in tools)
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        return OutputParser(
            self.reasoning, call_format, schemas, in_reasoning=in_reasoning, max_calls=max_calls
        )

    def forced_call_grammar(
        self, tools: Sequence[Tool], *, in_reasoning: bool, max_calls: int | None
    ) -> Grammar:
        """Return the grammar of an answer that calls one or more of ``tools`` and, except for
        reasoning, contains nothing else."""
        grammar = self._call_grammar(in_reasoning, max_calls)
        return grammar.forced([tool["function"] for tool in tools])

    def offered_call_grammar(
        self, tools: Sequence[Tool], *, in_reasoning: bool, max_calls: int | None
    ) -> Grammar:
        """Return the grammar of an answer that may call some of ``tools``. The arguments of strict
        tools must follow the tools' schemas."""
        grammar = self._call_grammar(in_reasoning, max_calls)
        return grammar.offered([tool["function"] for tool in tools])

    def call_or_answer_grammar(
        self, tools: Sequence[Tool], rule: str, *, in_reasoning: bool, max_calls: int | None
    ) -> Grammar:
        """Return the grammar of an answer that either calls some of ``tools``, as in
        :meth:`offered_call_grammar`, or follows ``rule``."""
        grammar = self._call_grammar(in_reasoning, max_calls)
        return grammar.offered_beside([tool["function"] for tool in tools], rule)

    def answer_grammar(self, rule: str, *, in_reasoning: bool) -> Grammar:
        """Return the grammar of an answer that follows ``rule``, after optional reasoning."""
        body = "answer"
        if self.reasoning is not None and self.reasoning.starts_with_header:
            body = f"{self.markup_tokens.literal(self.reasoning.answer_opening)} answer"
        lines = reasoning_rules(
            self.markup_tokens, self.reasoning, in_reasoning=in_reasoning, body=body
        )
        return Grammar(GrammarKind.LARK, "\n".join([*lines, f"answer: {rule}"]) + "\n")

    def _call_grammar(self, in_reasoning: bool, max_calls: int | None) -> ToolCallGrammar:
        return ToolCallGrammar(
            self.tools or PLAIN_JSON,
            self.markup_tokens,
            self.reasoning,
            in_reasoning,
            max_calls == 1,
        )

    def call_id(self, request_id: str, choice: int, call: int, prefix: str = "call_") -> str:
        """Make a tool call's id, which begins with ``prefix``. The ids of a Mistral model's calls
        have no prefix, since its chat template accepts only ids of 9 characters."""
        data = f"{request_id}/{choice}/{call}".encode()
        digest = hashlib.blake2b(data, digest_size=12).hexdigest()
        is_mistral = self.tools is not None and self.tools.trigger == "[TOOL_CALLS]"
        return digest[:9] if is_mistral else prefix + digest


def tool_format_headers(form: ModelOutputFormat) -> dict[str, str]:
    """Return the header of an answer to a request with tools if the model's template does not show
    how it writes calls."""
    return {} if form.is_known else {TOOL_FORMAT_HEADER: f"{PLAIN_JSON.name}; template unknown"}


Format = TypeVar("Format", ToolFormat, ReasoningFormat)


def _detect(formats: Sequence[Format], template: str, tokenizer: Tokenizer) -> Format | None:
    """Return the first format one of whose groups of signs the template shows."""

    def is_in_template(sign: str) -> bool:
        return sign in template or sign.replace("\n", "\\n") in template

    def has(signs: tuple[str, ...]) -> bool:
        first, *others = signs
        known = (is_in_template(each) or tokenizer.token_id(each) is not None for each in others)
        return is_in_template(first) and all(known)

    return next((each for each in formats if any(map(has, each.signs))), None)
