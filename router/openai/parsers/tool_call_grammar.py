"""Builds grammars of answers with tool calls, in each format: one for answers that consist only of
calls, and one for answers with text, calls, or both."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.grammar import Grammar, GrammarKind
from router.openai.parsers.markup_tokens import NO_MARKUP_TOKENS, MarkupTokens, terminal_without
from router.openai.parsers.strict_schema import forbid_extra_properties
from router.openai.parsers.tool_call_format import (
    Function,
    ToolCallFormat,
    has_name_first_calls,
    tool_call_rules,
)

WHITESPACE_PATTERN = r"[\s\x1c-\x1f]"
"""White space as the parsers define it."""

ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """Builds grammars for one format. If ``in_reasoning`` is True, the prompt has opened a
    reasoning section; if ``has_reasoning`` is True, the model may open one itself. If
    ``single_call`` is True, the answer may have at most one call."""

    call_format: ToolCallFormat
    markup_tokens: MarkupTokens = NO_MARKUP_TOKENS
    has_reasoning: bool = False
    in_reasoning: bool = False
    single_call: bool = False

    def forced(self, functions: Sequence[Function]) -> Grammar:
        """Return the grammar of an answer that consists only of calls. Arguments may have only the
        properties that the schemas name, unless a schema explicitly allows others: a model that is
        forced to call tends to invent extra properties."""
        return self._grammar(
            self._calls(), [_forbid_extra_parameters(function) for function in functions]
        )

    def offered(self, functions: Sequence[Function]) -> Grammar:
        """Return the grammar of an answer with text, calls, or both, as the format allows. The
        arguments of ``strict`` functions follow the functions' schemas; the arguments of other
        functions may be any JSON object."""
        constrained = [
            function if function.get("strict") else {**function, "parameters": ANY_ARGUMENTS}
            for function in functions
        ]
        answer_rule, rules = self._text_or_calls()
        return self._grammar(answer_rule, constrained, rules)

    def _grammar(
        self, body: str, functions: Sequence[Function], rules: Sequence[str] = ()
    ) -> Grammar:
        lines = [
            *reasoning_rules(
                self.markup_tokens,
                has_reasoning=self.has_reasoning,
                in_reasoning=self.in_reasoning,
                answer_rule=body,
            ),
            *rules,
            *tool_call_rules(self.call_format, functions, self.markup_tokens),
        ]
        return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")

    def _calls(self) -> str:
        if self.call_format is ToolCallFormat.HERMES:
            return self._repeat(
                f"{self.markup_tokens.rule('<tool_call>')} {self._hermes_rest()}", r"\n"
            )
        if self.call_format is ToolCallFormat.MISTRAL:
            return f"{self.markup_tokens.rule('[TOOL_CALLS]')} {self._mistral_rest()}"
        if self.call_format is ToolCallFormat.PYTHONIC:
            return self._list()
        return self._repeat("call", "; ")

    def _repeat(self, call: str, between: str) -> str:
        return call if self.single_call else f'{call} ("{between}" {call})*'

    def _list(self) -> str:
        return f'"[" {self._repeat("call", ", ")} "]"'

    def _hermes_rest(self) -> str:
        return rf'"\n" call "\n" {self.markup_tokens.rule("</tool_call>")}'

    def _mistral_rest(self) -> str:
        """Return the part of the grammar rule for calls that follows the first
        ``[TOOL_CALLS]``."""
        if not has_name_first_calls(self.markup_tokens):
            return f'" "? {self._list()}'
        more = "" if self.single_call else f" ({self.markup_tokens.rule('[TOOL_CALLS]')} call)*"
        return f"call{more}"

    def _text_or_calls(self) -> tuple[str, list[str]]:
        """Return the right-hand side of the rule for an answer with text, calls, or both, and the
        further rules that it needs."""
        if self.call_format is ToolCallFormat.HERMES:
            mark, times = "<tool_call>", "?" if self.single_call else "*"
            rules = [
                *self.markup_tokens.rules_until("opening", mark),
                f"TEXT: {terminal_without(mark)}",
            ]
            return f"(opening {self._hermes_rest()}){times} TEXT?", rules
        if self.call_format is ToolCallFormat.MISTRAL:
            mark = "[TOOL_CALLS]"
            rules = [
                *self.markup_tokens.rules_until("opening", mark),
                f"TEXT: {terminal_without(mark)}",
            ]
            return f"(TEXT? | opening {self._mistral_rest()})", rules
        mark = "<|python_tag|>"
        begins = "[" if self.call_format is ToolCallFormat.PYTHONIC else "{"
        plain = rf"{WHITESPACE_PATTERN}*([^\s\x1c-\x1f\{begins}](?s:.*))?"
        rules = [f"TEXT: {terminal_without(mark, plain)}"]
        if self.call_format is ToolCallFormat.LLAMA3 and mark in self.markup_tokens.ids:
            return f"(TEXT? | (TEXT? {self.markup_tokens.rule(mark)})? {self._calls()})", rules
        return f"(TEXT? | {self._calls()})", rules


def _forbid_extra_parameters(function: Function) -> Function:
    schema = function.get("parameters")
    return {**function, "parameters": forbid_extra_properties(schema)} if schema else function


def reasoning_rules(
    marks: MarkupTokens, *, has_reasoning: bool, in_reasoning: bool, answer_rule: str
) -> list[str]:
    """Return grammar rules that define ``start``: reasoning, if the prompt has opened it or the
    model may open it, followed by ``answer_rule``."""
    if in_reasoning:
        before = r"thought /\n{0,2}/ "
    elif has_reasoning:
        before = rf"({marks.rule('<think>')} thought /\n{{0,2}}/)? "
    else:
        return [f"start: {answer_rule}"]
    return [f"start: {before}{answer_rule}", *marks.rules_until("thought", "</think>")]
