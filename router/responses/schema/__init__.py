"""Request bodies of the Responses API, with the sampling fields that all APIs have in common.

The items of ``input`` are read by :mod:`router.responses.chat_messages`, and the tools by
:mod:`router.responses.tools`, because what they become depends on one another.
"""

from router.responses.schema.input_tokens_body import InputTokensBody
from router.responses.schema.reasoning_config import ReasoningConfig
from router.responses.schema.responses_body import ResponsesBody
from router.responses.schema.text_config import TextConfig

__all__ = ["InputTokensBody", "ReasoningConfig", "ResponsesBody", "TextConfig"]
