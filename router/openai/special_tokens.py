"""Rejects messages that spell out a special token, like ``<|im_start|>``.

The tokenizer (as in vLLM and SGLang) turns such text into a real special token, with which a
message can begin a turn of any role. If the setting ``special_tokens_in_messages`` is ``refused``,
such messages of the roles ``user`` and ``tool`` are refused. This is for deployments that don't
trust the authors of these messages."""

import re
from collections.abc import Sequence

from baton.text.tokenizer import Tokenizer
from router.errors import ApiError
from router.openai.schema import Message

UNTRUSTED_ROLES = ("user", "tool")
"""Roles whose content may come from someone other than the application."""


class SpecialTokenFilter:
    """Finds the special tokens of one tokenizer in messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = sorted(filter(None, map(tokenizer.token, tokenizer.special_ids)))
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def check(self, messages: Sequence[Message]) -> None:
        """Check the messages of roles in :data:`UNTRUSTED_ROLES`. Raises ApiError (400) for the
        first special token found."""
        if self._pattern is None:
            return
        for number, message in enumerate(messages):
            found = message.role in UNTRUSTED_ROLES and self._pattern.search(message.content)
            if found:
                raise ApiError(
                    400,
                    f"the message contains the special token {found[0]!r}; this server refuses "
                    "such messages",
                    param=f"messages[{number}].content",
                    code="special_token",
                )
