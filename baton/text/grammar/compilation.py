"""Compiles grammars with llguidance, within :data:`LIMITS`, and turns its errors into
messages for clients.

Compiling a grammar can take a minute, or crash the process by a stack overflow (llguidance
recurses for each link of a chain of rules). So a client's grammar is compiled in a helper process
first, see :mod:`baton.text.grammar.checker`.
"""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
from baton.text.grammar.limits import MAX_MESSAGE_CHARACTERS
from baton.text.grammar.to_lark import to_lark

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=32_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Limits of one grammar that llguidance enforces. Typical schemas need a thousandth of them. Time,
memory and depth, which llguidance does not count, are limited by the helper process."""

_PLACE = re.compile(r"\bat \d+\(\d+\): |\bfailed to compile JSON schema: ")
_REGEX_QUOTE = re.compile(r"\bregex parse error:\n.*?\nerror: ", re.DOTALL)
_QUOTE = re.compile(r"\n *\d+ \| .*", re.DOTALL)


def validate_grammar(grammar: Grammar) -> None:
    """Parse a grammar without a vocabulary. Raises Invalid, saying what is wrong with the grammar.
    A client's grammar must be parsed in a helper process before it is parsed in any other
    process."""
    complaint = LLMatcher.validate_grammar(to_lark(grammar), None, limits=LIMITS)
    if complaint:
        raise invalid_grammar(grammar, complaint)


def compile_grammar(vocabulary: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar to a matcher that shares no state with others. Raises Invalid if the
    grammar is malformed or exceeds a limit."""
    matcher = LLMatcher(vocabulary, to_lark(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise invalid_grammar(grammar, matcher.get_error())
    return matcher


def invalid_grammar(grammar: Grammar, complaint: str) -> Invalid:
    """Return the error for the client. ``complaint`` is llguidance's message, which is edited to be
    understandable to the client."""
    if grammar.kind is not GrammarKind.LARK:
        complaint = without_quotes(complaint)
    if "coerce_one_of" in complaint:
        complaint = "the alternatives of oneOf must exclude each other; otherwise, use anyOf"
    message = refusal_prefix(grammar) + complaint
    return Invalid(message[:MAX_MESSAGE_CHARACTERS], param="response_format")


def refusal_prefix(grammar: Grammar) -> str:
    """Return the beginning of the errors of :func:`invalid_grammar`."""
    return f"the {grammar.kind.value} can't be enforced: "


def without_quotes(complaint: str) -> str:
    """Return the complaint without the lines that llguidance quotes, for a grammar that was not
    written by the client. What is wrong with a regular expression is kept without the
    expression."""
    return _PLACE.sub("", _REGEX_QUOTE.sub("", _QUOTE.sub("", complaint)))
