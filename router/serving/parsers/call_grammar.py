"""Builds grammars of answers with tool calls, in each format: one for answers that consist only of
calls, and one for answers with text, calls, or both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.grammar import Grammar, GrammarKind
from baton.text.grammar.to_lark import check_grammar_size
from router.serving.parsers.markup_tokens import NO_MARKUP_TOKENS, MarkupTokens, terminal_without
from router.serving.parsers.reasoning_formats import ReasoningFormat
from router.serving.parsers.tool_formats import ToolFormat
from router.serving.parsers.writing import Function

SCHEMAS = frozenset({"properties", "$defs", "definitions"})
"""Keywords whose values map names to schemas."""

ALTERNATIVES = frozenset({"anyOf", "oneOf"})

OPEN_KEYWORDS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
     "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"}
)  # fmt: skip
"""Keywords other than ``properties`` that may allow further properties."""


def forbid_extra_properties(schema: Any) -> Any:
    """Return the schema with ``additionalProperties: false`` added where an object's schema names
    properties and does not say whether others are allowed. Combined schemas (``allOf``, and
    definitions that may be parts of an ``allOf``) are not changed."""
    return _closed(schema, has_parts="allOf" in str(schema))


def _closed(schema: Any, has_parts: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    is_combined = "properties" in schema and not OPEN_KEYWORDS.isdisjoint(schema)
    for keyword, value in schema.items():
        if keyword in SCHEMAS and isinstance(value, dict):
            keeps_value = has_parts and keyword != "properties"
            inner = value if keeps_value else {k: _closed(v, has_parts) for k, v in value.items()}
            result[keyword] = inner
        elif keyword in ALTERNATIVES and isinstance(value, list) and not is_combined:
            result[keyword] = [_closed(each, has_parts) for each in value]
        elif keyword == "items":
            result[keyword] = _closed(value, has_parts)
        elif keyword == "prefixItems" and isinstance(value, list):
            result[keyword] = [_closed(each, has_parts) for each in value]
        else:
            result[keyword] = value
    if "properties" in schema and OPEN_KEYWORDS.isdisjoint(schema):
        result["additionalProperties"] = False
    return result


WHITESPACE_PATTERN = r"[\s\x1c-\x1f]"
"""White space as the parsers define it."""

ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolCallGrammar:
    """Builds grammars for one format. If ``in_reasoning`` is True, the prompt has opened a
    reasoning section; if ``reasoning`` is not None, the model may open one itself. If
    ``single_call`` is True, the answer may have at most one call."""

    tools: ToolFormat
    marks: MarkupTokens = NO_MARKUP_TOKENS
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool = False
    single_call: bool = False

    def forced(self, functions: Sequence[Function]) -> Grammar:
        """Return the grammar of an answer that consists only of calls. Arguments may have only the
        properties that the schemas name, unless a schema explicitly allows others: a model that is
        forced to call tends to invent extra properties. Raises Invalid for a malformed schema, and
        as soon as the rules are larger than a grammar may be, since they may be many times as large
        as the functions."""
        return self._grammar(
            self._calls(), [_forbid_extra_parameters(function) for function in functions]
        )

    def offered(self, functions: Sequence[Function]) -> Grammar:
        """Return the grammar of an answer with text, calls, or both, as the format allows. The
        arguments of ``strict`` functions follow the functions' schemas; the arguments of other
        functions may be any JSON object. Raises Invalid as :meth:`forced` does."""
        answer_rule, rules = self._text_or_calls()
        return self._grammar(answer_rule, _only_strict(functions), rules)

    def offered_beside(self, functions: Sequence[Function], rule: str) -> Grammar:
        """Return the grammar of an answer that consists of calls, as in :meth:`offered`, or follows
        ``rule``, the right-hand side of a rule."""
        opening = self.reasoning.answer_opening if self.reasoning is not None else ""
        begun = f"({self.marks.literal(opening)})? " if opening else ""
        body = f"({self._calls()} | {begun}answer)"
        return self._grammar(body, _only_strict(functions), [f"answer: {rule}"])

    def _grammar(
        self, body: str, functions: Sequence[Function], rules: Sequence[str] = ()
    ) -> Grammar:
        lines = [
            *reasoning_rules(self.marks, self.reasoning, in_reasoning=self.in_reasoning, body=body),
            *rules,
        ]
        size_bytes = 0
        for rule in self.tools.writing.rules(functions, self.marks):
            size_bytes += len(rule)
            check_grammar_size(size_bytes)
            lines.append(rule)
        return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")

    def _calls(self, begun: str = "") -> str:
        """Return the right-hand side of a rule for one or several calls, without ``begun``, with
        which they begin."""
        writing, literal = self.tools.writing, self.marks.literal
        first = f"{literal(writing.begins.removeprefix(begun))} call"
        more = f" ({literal(writing.between + writing.before_name)} call)*"
        closing = literal(writing.closing) if writing.closing else ""
        return f"{first}{'' if self.single_call else more} {closing}"

    def _text_or_calls(self) -> tuple[str, list[str]]:
        """Return the right-hand side of the rule for an answer with text, calls, or both, and the
        further rules that it needs."""
        reasoning, trigger = self.reasoning, self.tools.trigger
        if reasoning is not None and reasoning.answer_opening:
            return self._message_or_calls(reasoning)
        if self.tools.unannounced is not None:
            return self._text_or_unannounced_calls()
        rules = [
            *self.marks.rules_until("opening", trigger),
            f"TEXT: {terminal_without(trigger)}",
        ]
        times = "?" if self.single_call else "*"
        begun = self.tools.writing.begins.partition(trigger)[0] + trigger
        return f"(opening {self._calls(begun)}){times} TEXT?", rules

    def _message_or_calls(self, reasoning: ReasoningFormat) -> tuple[str, list[str]]:
        """As :meth:`_text_or_calls`, for formats whose text stands behind a mark of its own."""
        opening = self.marks.literal(reasoning.answer_opening)
        trigger = self.tools.trigger
        rules = [f"TEXT: {terminal_without(trigger) if trigger else '/(?s:.+)/'}"]
        if not reasoning.answer_closing:
            return f"({opening} TEXT? | {self._calls()})", rules
        closing = self.marks.literal(reasoning.answer_closing)
        return f"({opening})? (TEXT? | (TEXT? {closing})? {self._calls()})", rules

    def _text_or_unannounced_calls(self) -> tuple[str, list[str]]:
        mark, begins = self.tools.trigger, self.tools.writing.begins[0]
        plain = rf"{WHITESPACE_PATTERN}*([^\s\x1c-\x1f\{begins}](?s:.*))?"
        rules = [f"TEXT: {terminal_without(mark, plain)}"]
        if mark in self.marks.ids:
            return f"(TEXT? | (TEXT? {self.marks.literal(mark)})? {self._calls()})", rules
        return f"(TEXT? | {self._calls()})", rules


def _only_strict(functions: Sequence[Function]) -> list[Function]:
    return [
        function if function.get("strict") else {**function, "parameters": ANY_ARGUMENTS}
        for function in functions
    ]


def _forbid_extra_parameters(function: Function) -> Function:
    schema = function.get("parameters")
    return {**function, "parameters": forbid_extra_properties(schema)} if schema else function


def reasoning_rules(
    marks: MarkupTokens, reasoning: ReasoningFormat | None, *, in_reasoning: bool, body: str
) -> list[str]:
    """Return grammar rules that define ``start``: reasoning, if the prompt has opened it or the
    model may open it, followed by ``body``."""
    if reasoning is None:
        return [f"start: {body}"]
    before = r"thought /\n{0,2}/ "
    if not in_reasoning:
        before = rf"({marks.literal(reasoning.opens)} thought /\n{{0,2}}/)? "
    return [f"start: {before}{body}", *marks.rules_until("thought", reasoning.closes)]
