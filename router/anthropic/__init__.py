"""Anthropic's Messages API (``/v1/messages``): its requests become chats, and its encoder writes
their answers as content blocks and events."""
