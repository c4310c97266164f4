"""How a model writes its calls and its thoughts, by its chat template or by the settings."""

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
"""By the names of the setting ``tool_parser``."""

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelOutputFormat:
    """``call_form`` is None where calls are not to be told from text, unless they are forced.
    ``thinks_first`` is for models whose prompts don't open the thought that their answers close.
    ``shown`` are tokens that are special and yet to be read."""

    call_form: ToolCallFormat | None = None
    knows_tools: bool = False
    thinks: bool = False
    thinks_first: bool = False
    marks: MarkupTokens = NO_MARKUP_TOKENS
    shown: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "ModelOutputFormat":
        template = tokenizer.chat_template_source
        form = (
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
            call_form=form,
            knows_tools="tools" in template,
            thinks=thinks,
            thinks_first=reasoning_parser == "deepseek_r1",
            marks=MarkupTokens.of(tokenizer),
            shown=shown,
        )

    def in_thought(self, prompt: str) -> bool:
        """Whether an answer to it begins with a thought that needs no opening."""
        end = prompt.rstrip()
        begins = self.thinks_first and not end.endswith(THINK_END)
        return self.thinks and (begins or end.endswith(THINK_START))

    def after(self, prompt: str, *, switched_off: bool) -> "ModelOutputFormat":
        """As answers to it are held to a grammar: without a thought before it where the prompt ends
        with one that is over (templates write an empty one where there is to be none), or where
        thinking was ``switched_off`` and the prompt opens none."""
        is_over = prompt.rstrip().endswith(THINK_END)
        if is_over or (switched_off and not self.in_thought(prompt)):
            return replace(self, thinks=False)
        return self

    def reader(
        self, tools: Sequence[Tool], *, forced: bool, in_thought: bool, max_calls: int | None
    ) -> OutputParser | None:
        """None when an answer is text and nothing else."""
        thinking = ReasoningParser(inside=in_thought) if self.thinks else None
        calls = self._parser(tools) if tools and (forced or self.call_form is not None) else None
        if thinking is None and calls is None:
            return None
        return OutputParser(thinking, calls, max_calls)

    def forced(self, tools: Sequence[Tool], *, in_thought: bool, max_calls: int | None) -> Grammar:
        """An answer that calls some of ``tools``, and says nothing else."""
        calls = self._call_grammar(in_thought, max_calls)
        return calls.forced([tool["function"] for tool in tools])

    def offered(self, tools: Sequence[Tool], *, in_thought: bool, max_calls: int | None) -> Grammar:
        """An answer that may call some of ``tools``, those that are strict by their schemas."""
        calls = self._call_grammar(in_thought, max_calls)
        return calls.offered([tool["function"] for tool in tools])

    def after_thought(self, rule: str, *, in_thought: bool) -> Grammar:
        """An answer by a rule, for a model that may think aloud first, or has begun to."""
        lines = reasoning_rules(
            self.marks, thinks=self.thinks, in_thought=in_thought, body="answer"
        )
        return Grammar(GrammarKind.LARK, "\n".join([*lines, f"answer: {rule}"]) + "\n")

    def _call_grammar(self, in_thought: bool, max_calls: int | None) -> ToolCallGrammar:
        form = self.call_form or ToolCallFormat.JSON
        return ToolCallGrammar(form, self.marks, self.thinks, in_thought, max_calls == 1)

    def call_id(self, request_id: str, choice: int, call: int) -> str:
        """Mistral's templates refuse any but such short ones."""
        data = f"{request_id}/{choice}/{call}".encode()
        name = hashlib.blake2b(data, digest_size=12).hexdigest()
        return name[:9] if self.call_form is ToolCallFormat.MISTRAL else f"call_{name}"

    def _parser(self, tools: Sequence[Tool]) -> ToolCallParser:
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        if self.call_form is ToolCallFormat.HERMES:
            return HermesToolParser({n: f.get("parameters") or {} for n, f in functions.items()})
        if self.call_form is ToolCallFormat.MISTRAL:
            return MistralToolParser()
        if self.call_form is ToolCallFormat.PYTHONIC:
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
