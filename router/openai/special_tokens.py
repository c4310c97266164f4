"""Messages that spell out a special token, like ``<|im_start|>``: in a prompt that is one, and
begins a turn of whoever it names. vLLM, SGLang and we read them so; ``special_tokens_in_messages``
refuses them, for where those who write messages are not trusted."""

import re
from collections.abc import Sequence

from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.openai.schema import Message

UNTRUSTED_ROLES = ("user", "tool")
"""Whose content somebody else than the application may have written."""


class SpecialTokenFilter:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = sorted(filter(None, map(tokenizer.token, tokenizer.special_ids)))
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def check(self, messages: Sequence[Message]) -> None:
        """Raises Problem (400) for the first one found."""
        if self._pattern is None:
            return
        for number, message in enumerate(messages):
            found = message.role in UNTRUSTED_ROLES and self._pattern.search(message.content)
            if found:
                raise ApiError(
                    400,
                    f"the message has the special token {found[0]!r}, which this server refuses",
                    param=f"messages[{number}].content",
                    code="special_token",
                )
