"""The format of a model's tool calls and reasoning: detected from its chat template, or chosen by
settings."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.core.grammar import Grammar, GrammarKind
from baton.text.tokenizer import Tokenizer
from router.openai.parsers.hermes import HermesToolParser
from router.openai.parsers.llama3 import Llama3ToolParser
from router.openai.parsers.markup_tokens import MARKUP_STRINGS, NO_MARKUP_TOKENS, MarkupTokens
from router.openai.parsers.mistral import MistralToolParser
from router.openai.parsers.output_parser import OutputParser
from router.openai.parsers.pythonic import PythonicToolParser
from router.openai.parsers.reasoning_parser import THINK_END, THINK_START, ReasoningParser
from router.openai.parsers.tool_call_format import ToolCallFormat
from router.openai.parsers.tool_call_grammar import ToolCallGrammar, reasoning_rules
from router.openai.parsers.tool_call_parser import ToolCallParser

TOOL_CALL_FORMATS: dict[str, ToolCallFormat | None] = {
    "hermes": ToolCallFormat.HERMES,
    "llama3": ToolCallFormat.LLAMA3,
    "mistral": ToolCallFormat.MISTRAL,
    "pythonic": ToolCallFormat.PYTHONIC,
    "none": None,
}
"""The formats by their names in the setting ``tool_parser``."""

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelOutputFormat:
    """A model's output format. If ``tool_call_format`` is None, only tool calls that the client
    forces are parsed; their format is :attr:`ToolCallFormat.JSON`. ``starts_with_reasoning`` is
    True for models that begin with reasoning even if the prompt does not open a reasoning section.
    ``visible_special_ids`` are special tokens that must not be removed from the text, because the
    parsers need them."""

    tool_call_format: ToolCallFormat | None = None
    supports_tools: bool = False
    has_reasoning: bool = False
    starts_with_reasoning: bool = False
    markup_tokens: MarkupTokens = NO_MARKUP_TOKENS
    visible_special_ids: frozenset[int] = frozenset()

    @classmethod
    def detect(
        cls, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "ModelOutputFormat":
        template = tokenizer.chat_template_source
        call_form = (
            _detect_tool_call_format(template)
            if tool_parser == "auto"
            else TOOL_CALL_FORMATS[tool_parser]
        )
        thinks = (
            THINK_START in template if reasoning_parser == "auto" else reasoning_parser != "none"
        )
        ids = map(tokenizer.token_id, MARKUP_STRINGS)
        shown = tokenizer.special_ids.intersection(id_ for id_ in ids if id_ is not None)
        return cls(
            tool_call_format=call_form,
            supports_tools="tools" in template,
            has_reasoning=thinks,
            starts_with_reasoning=reasoning_parser == "deepseek_r1",
            markup_tokens=MarkupTokens.of(tokenizer),
            visible_special_ids=shown,
        )

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether the answer to ``prompt`` begins inside a reasoning section, without an opening
        tag."""
        prompt_end = prompt.rstrip()
        begins = self.starts_with_reasoning and not prompt_end.endswith(THINK_END)
        return self.has_reasoning and (begins or prompt_end.endswith(THINK_START))

    def for_prompt(self, prompt: str, *, reasoning_off: bool) -> "ModelOutputFormat":
        """Return the format from which to build the grammar of the answer to ``prompt``. It has no
        reasoning if the prompt ends with a closed reasoning section (templates write an empty one
        to switch reasoning off), or if ``reasoning_off`` is True and the prompt does not open a
        reasoning section."""
        is_over = prompt.rstrip().endswith(THINK_END)
        if is_over or (reasoning_off and not self.starts_in_reasoning(prompt)):
            return replace(self, has_reasoning=False)
        return self

    def create_parser(
        self, tools: Sequence[Tool], *, forced: bool, in_reasoning: bool, max_calls: int | None
    ) -> OutputParser | None:
        """Create a parser for the answer, or return None if the answer is only text."""
        thinking = ReasoningParser(in_reasoning=in_reasoning) if self.has_reasoning else None
        grammar = (
            self._parser(tools) if tools and (forced or self.tool_call_format is not None) else None
        )
        if thinking is None and grammar is None:
            return None
        return OutputParser(thinking, grammar, max_calls)

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

    def answer_grammar(self, rule: str, *, in_reasoning: bool) -> Grammar:
        """Return the grammar of an answer that follows ``rule``, after optional reasoning."""
        lines = reasoning_rules(
            self.markup_tokens,
            has_reasoning=self.has_reasoning,
            in_reasoning=in_reasoning,
            answer_rule="answer",
        )
        return Grammar(GrammarKind.LARK, "\n".join([*lines, f"answer: {rule}"]) + "\n")

    def _call_grammar(self, in_thought: bool, max_calls: int | None) -> ToolCallGrammar:
        form = self.tool_call_format or ToolCallFormat.JSON
        return ToolCallGrammar(
            form, self.markup_tokens, self.has_reasoning, in_thought, max_calls == 1
        )

    def call_id(self, request_id: str, choice: int, call: int, prefix: str = "call_") -> str:
        """Make a tool call's id, which begins with ``prefix``. The ids of a Mistral model's calls
        have no prefix, since its chat template accepts only ids of 9 characters."""
        data = f"{request_id}/{choice}/{call}".encode()
        digest = hashlib.blake2b(data, digest_size=12).hexdigest()
        return digest[:9] if self.tool_call_format is ToolCallFormat.MISTRAL else prefix + digest

    def _parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        if self.tool_call_format is ToolCallFormat.HERMES:
            return HermesToolParser({n: f.get("parameters") or {} for n, f in functions.items()})
        if self.tool_call_format is ToolCallFormat.MISTRAL:
            return MistralToolParser()
        if self.tool_call_format is ToolCallFormat.PYTHONIC:
            return PythonicToolParser(functions.keys())
        return Llama3ToolParser(functions.keys())


def _detect_tool_call_format(template: str) -> ToolCallFormat:
    if "<tool_call>" in template:
        return ToolCallFormat.HERMES
    if "[TOOL_CALLS]" in template:
        return ToolCallFormat.MISTRAL
    if "func_name1(" in template:
        return ToolCallFormat.PYTHONIC
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return (
        ToolCallFormat.LLAMA3 if is_llama or "<|python_tag|>" in template else ToolCallFormat.JSON
    )
