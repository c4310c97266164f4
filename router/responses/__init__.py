"""OpenAI's Responses API (``/v1/responses``): its requests are converted to chats, and the answers
are encoded as output items and events."""
