"""Groups the objects that convert between text and the model's tokens, and that check clients'
text."""

from dataclasses import dataclass, field

from baton.text.tokenizer import Tokenizer
from router.openai.grammar_validator import GrammarValidator
from router.openai.offload_executor import MIN_OFFLOAD_BYTES
from router.openai.parsers.model_output_format import ModelOutputFormat
from router.openai.special_tokens import SpecialTokenFilter

MAX_INDENTED_INLINE_BYTES = MIN_OFFLOAD_BYTES // 8
"""If the chat template indents JSON, larger bodies are rendered and tokenised in a thread. JSON
that is nested as deeply as it may be becomes some 60 times as long then: a body of 4 KiB takes up
to 9 ms, one of 32 KiB 70 ms."""


@dataclass(slots=True)
class ModelText:
    """The served model's tokenizer and output format, and the checks of clients' grammars and of
    special tokens in messages."""

    tokenizer: Tokenizer
    output_format: ModelOutputFormat
    grammar_validator: GrammarValidator = field(default_factory=GrammarValidator)
    special_tokens: SpecialTokenFilter = field(init=False)

    def __post_init__(self) -> None:
        self.special_tokens = SpecialTokenFilter(self.tokenizer)

    def tokenizing_bytes(self, body_bytes: int) -> int:
        """Return the size that :class:`~router.openai.offload_executor.OffloadExecutor` should take
        for a body whose prompt is rendered and tokenised: that of the body, or more if its text may
        be much longer."""
        indents = "indent" in self.tokenizer.chat_template_source
        if indents and body_bytes > MAX_INDENTED_INLINE_BYTES:
            return max(body_bytes, MIN_OFFLOAD_BYTES + 1)
        return body_bytes
