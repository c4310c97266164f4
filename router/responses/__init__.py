"""OpenAI's Responses API (``/v1/responses``): its requests become chats, and its encoder writes
their answers as output items and events."""
