"""Grammars of answers with calls, each in the markup of its family: calls alone, or free text with
calls whose arguments follow their schemas."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.grammar import Grammar, GrammarKind
from router.openai.parsers.markup_tokens import NO_MARKUP_TOKENS, MarkupTokens, terminal_without
from router.openai.parsers.strict_schema import forbid_extra_properties
from router.openai.parsers.tool_call_format import (
    Function,
    ToolCallFormat,
    tool_call_rules,
    writes_name_first,
)

WHITESPACE_PATTERN = r"[\s\x1c-\x1f]"
"""What parsers take for blanks."""

ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """With ``in_thought`` the prompt has opened a thought; a model that ``thinks`` may open one.
    ``one``: no second call."""

    form: ToolCallFormat
    marks: MarkupTokens = NO_MARKUP_TOKENS
    thinks: bool = False
    in_thought: bool = False
    one: bool = False

    def forced(self, functions: Sequence[Function]) -> Grammar:
        """Calls, and nothing else. Their arguments have no properties but those that the schemas
        name, unless a schema says so itself: a model that must call would go on inventing some."""
        return self._grammar(
            self._calls(), [_forbid_extra_parameters(function) for function in functions]
        )

    def offered(self, functions: Sequence[Function]) -> Grammar:
        """Text, or calls, or both as the family writes them. Arguments are those of their schemas
        for functions that are ``strict``, and any for others."""
        held = [
            function if function.get("strict") else {**function, "parameters": ANY_ARGUMENTS}
            for function in functions
        ]
        body, rules = self._text_or_calls()
        return self._grammar(body, held, rules)

    def _grammar(
        self, body: str, functions: Sequence[Function], rules: Sequence[str] = ()
    ) -> Grammar:
        lines = [
            *reasoning_rules(self.marks, thinks=self.thinks, in_thought=self.in_thought, body=body),
            *rules,
            *tool_call_rules(self.form, functions, self.marks),
        ]
        return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")

    def _calls(self) -> str:
        if self.form is ToolCallFormat.HERMES:
            return self._several(f"{self.marks.rule('<tool_call>')} {self._hermes_rest()}", r"\n")
        if self.form is ToolCallFormat.MISTRAL:
            return f"{self.marks.rule('[TOOL_CALLS]')} {self._mistral_rest()}"
        if self.form is ToolCallFormat.PYTHONIC:
            return self._list()
        return self._several("call", "; ")

    def _several(self, call: str, between: str) -> str:
        return call if self.one else f'{call} ("{between}" {call})*'

    def _list(self) -> str:
        return f'"[" {self._several("call", ", ")} "]"'

    def _hermes_rest(self) -> str:
        return rf'"\n" call "\n" {self.marks.rule("</tool_call>")}'

    def _mistral_rest(self) -> str:
        """After the first mark."""
        if not writes_name_first(self.marks):
            return f'" "? {self._list()}'
        more = "" if self.one else f" ({self.marks.rule('[TOOL_CALLS]')} call)*"
        return f"call{more}"

    def _text_or_calls(self) -> tuple[str, list[str]]:
        """The body of the answer, and further rules."""
        if self.form is ToolCallFormat.HERMES:
            mark, times = "<tool_call>", "?" if self.one else "*"
            rules = [*self.marks.until("opening", mark), f"TEXT: {terminal_without(mark)}"]
            return f"(opening {self._hermes_rest()}){times} TEXT?", rules
        if self.form is ToolCallFormat.MISTRAL:
            mark = "[TOOL_CALLS]"
            rules = [*self.marks.until("opening", mark), f"TEXT: {terminal_without(mark)}"]
            return f"(TEXT? | opening {self._mistral_rest()})", rules
        mark = "<|python_tag|>"
        begins = "[" if self.form is ToolCallFormat.PYTHONIC else "{"
        plain = rf"{WHITESPACE_PATTERN}*([^\s\x1c-\x1f\{begins}](?s:.*))?"
        rules = [f"TEXT: {terminal_without(mark, plain)}"]
        if self.form is ToolCallFormat.LLAMA3 and mark in self.marks.ids:
            return f"(TEXT? | (TEXT? {self.marks.rule(mark)})? {self._calls()})", rules
        return f"(TEXT? | {self._calls()})", rules


def _forbid_extra_parameters(function: Function) -> Function:
    schema = function.get("parameters")
    return {**function, "parameters": forbid_extra_properties(schema)} if schema else function


def reasoning_rules(marks: MarkupTokens, *, thinks: bool, in_thought: bool, body: str) -> list[str]:
    """``start``: the body, after a thought if there may be one."""
    if in_thought:
        before = r"thought /\n{0,2}/ "
    elif thinks:
        before = rf"({marks.rule('<think>')} thought /\n{{0,2}}/)? "
    else:
        return [f"start: {body}"]
    return [f"start: {before}{body}", *marks.until("thought", "</think>")]
