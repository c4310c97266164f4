"""A grammar compiled by llguidance, within bounds; what is wrong with one, in words.

Compiling one can take a minute, or end the process by its stack (the library calls itself for each
link of a chain of rules): what came from outside is compiled in a helper process first, see
:mod:`baton.text.grammar.checker`.
"""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.core.grammar import Grammar, GrammarKind
from baton.errors import Invalid
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
"""What one grammar may take of what the library counts. Schemas in use take a thousandth of that.
It does not count everything: time, memory and depth are bounded by the helper process."""

_PLACE = re.compile(r"^at \d+\(\d+\): ")

MAX_MESSAGE = 500
"""Characters of a complaint, which repeats parts of the grammar."""


def validate_grammar(grammar: Grammar) -> None:
    """Whether a grammar can be read, as far as that is known without a vocabulary. Not for what
    comes from outside. Raises Invalid, saying what is wrong with it."""
    complaint = LLMatcher.validate_grammar(to_lark(grammar), None, limits=LIMITS)
    if complaint:
        raise invalid_grammar(grammar, complaint)


def compile_grammar(vocabulary: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher that shares nothing with others. Raises Invalid."""
    matcher = LLMatcher(vocabulary, to_lark(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise invalid_grammar(grammar, matcher.get_error())
    return matcher


def invalid_grammar(grammar: Grammar, complaint: str) -> Invalid:
    """The library's complaint, as the client may read it."""
    if grammar.kind is not GrammarKind.LARK:  # nobody but us knows the text that it quotes
        complaint = _PLACE.sub("", complaint.partition("\n   1 |")[0])
    if "coerce_one_of" in complaint:
        complaint = "oneOf needs alternatives that are plainly apart; anyOf takes any"
    message = f"the {grammar.kind.value} can't be followed: {complaint}"
    return Invalid(message[:MAX_MESSAGE], param="response_format")
