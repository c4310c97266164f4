"""Request bodies of the Responses API, with the sampling fields that all APIs have in common.

The items of ``input`` are validated only when :mod:`router.responses.chat_messages` converts them,
and the tools only when :mod:`router.responses.tools` does."""

from router.responses.schema.input_tokens_body import InputTokensBody
from router.responses.schema.reasoning_config import ReasoningConfig
from router.responses.schema.responses_body import ResponsesBody
from router.responses.schema.text_config import TextConfig

__all__ = ["InputTokensBody", "ReasoningConfig", "ResponsesBody", "TextConfig"]
