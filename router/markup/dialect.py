"""How a model writes its calls and its thoughts, by its chat template or by the settings."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.core.grammar import Grammar, GrammarKind
from baton.text.tokenizer import Tokenizer
from router.markup.call_form import CallForm
from router.markup.forced import CallGrammar, thought_rules
from router.markup.hermes import HermesParser
from router.markup.llama3 import Llama3Parser
from router.markup.marks import MARKS, NO_MARKS, Marks
from router.markup.mistral import MistralParser
from router.markup.parser import CallParser
from router.markup.pythonic import PythonicParser
from router.markup.reader import Reader
from router.markup.thinking import CLOSE, OPEN, Thinking

FORMS: dict[str, CallForm | None] = {
    "hermes": CallForm.HERMES,
    "llama3": CallForm.LLAMA3,
    "mistral": CallForm.MISTRAL,
    "pythonic": CallForm.PYTHONIC,
    "none": None,
}
"""By the names of the setting ``tool_parser``."""

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """``call_form`` is None where calls are not to be told from text, unless they are forced.
    ``thinks_first`` is for models whose prompts don't open the thought that their answers close.
    ``shown`` are tokens that are special and yet to be read."""

    call_form: CallForm | None = None
    knows_tools: bool = False
    thinks: bool = False
    thinks_first: bool = False
    marks: Marks = NO_MARKS
    shown: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "Dialect":
        template = tokenizer.chat_template_source
        form = _form_of(template) if tool_parser == "auto" else FORMS[tool_parser]
        thinks = OPEN in template if reasoning_parser == "auto" else reasoning_parser != "none"
        ids = map(tokenizer.token_id, MARKS)
        shown = tokenizer.special_ids.intersection(id_ for id_ in ids if id_ is not None)
        return cls(
            call_form=form,
            knows_tools="tools" in template,
            thinks=thinks,
            thinks_first=reasoning_parser == "deepseek_r1",
            marks=Marks.of(tokenizer),
            shown=shown,
        )

    def in_thought(self, prompt: str) -> bool:
        """Whether an answer to it begins with a thought that needs no opening."""
        end = prompt.rstrip()
        begins = self.thinks_first and not end.endswith(CLOSE)
        return self.thinks and (begins or end.endswith(OPEN))

    def after(self, prompt: str, *, switched_off: bool) -> "Dialect":
        """As answers to it are held to a grammar: without a thought before it where the prompt ends
        with one that is over (templates write an empty one where there is to be none), or where
        thinking was ``switched_off`` and the prompt opens none."""
        is_over = prompt.rstrip().endswith(CLOSE)
        if is_over or (switched_off and not self.in_thought(prompt)):
            return replace(self, thinks=False)
        return self

    def reader(
        self, tools: Sequence[Tool], *, forced: bool, in_thought: bool, max_calls: int | None
    ) -> Reader | None:
        """None when an answer is text and nothing else."""
        thinking = Thinking(inside=in_thought) if self.thinks else None
        calls = self._parser(tools) if tools and (forced or self.call_form is not None) else None
        if thinking is None and calls is None:
            return None
        return Reader(thinking, calls, max_calls)

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
        lines = thought_rules(self.marks, thinks=self.thinks, in_thought=in_thought, body="answer")
        return Grammar(GrammarKind.LARK, "\n".join([*lines, f"answer: {rule}"]) + "\n")

    def _call_grammar(self, in_thought: bool, max_calls: int | None) -> CallGrammar:
        form = self.call_form or CallForm.JSON
        return CallGrammar(form, self.marks, self.thinks, in_thought, max_calls == 1)

    def call_id(self, request_id: str, choice: int, call: int) -> str:
        """Mistral's templates refuse any but such short ones."""
        data = f"{request_id}/{choice}/{call}".encode()
        name = hashlib.blake2b(data, digest_size=12).hexdigest()
        return name[:9] if self.call_form is CallForm.MISTRAL else f"call_{name}"

    def _parser(self, tools: Sequence[Tool]) -> CallParser:
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        if self.call_form is CallForm.HERMES:
            return HermesParser({n: f.get("parameters") or {} for n, f in functions.items()})
        if self.call_form is CallForm.MISTRAL:
            return MistralParser()
        if self.call_form is CallForm.PYTHONIC:
            return PythonicParser(functions.keys())
        return Llama3Parser(functions.keys())


def _form_of(template: str) -> CallForm:
    if "<tool_call>" in template:
        return CallForm.HERMES
    if "[TOOL_CALLS]" in template:
        return CallForm.MISTRAL
    if "func_name1(" in template:
        return CallForm.PYTHONIC
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return CallForm.LLAMA3 if is_llama or "<|python_tag|>" in template else CallForm.JSON
