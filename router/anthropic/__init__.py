"""Anthropic's Messages API (``/v1/messages``): its requests are converted to chats, and the answers
are encoded as content blocks and events."""
