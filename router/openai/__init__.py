"""OpenAI's chats, completions and tokenizing: their request bodies, and the encoders of their
answers."""
