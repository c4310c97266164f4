"""Encoders of OpenAI's chats and completions."""
