"""Request bodies as Anthropic defines them.

Validation is strict, as in :mod:`router.openai.schema`, except that unknown fields of messages and
content blocks are ignored, because clients send earlier answers back unchanged."""

from router.anthropic.schema.messages_body import CountTokensBody, MessagesBody, PromptBody

__all__ = ["CountTokensBody", "MessagesBody", "PromptBody"]
