"""Groups the objects that convert between text and the model's tokens, and that check clients'
text."""

from dataclasses import dataclass, field

from baton.text.tokenizer import Tokenizer
from router.openai.grammar_validator import GrammarValidator
from router.openai.parsers.model_output_format import ModelOutputFormat
from router.openai.special_tokens import SpecialTokenFilter


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
