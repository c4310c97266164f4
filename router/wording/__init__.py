"""OpenAI's JSON for chats and completions, whole and in chunks."""

from router.wording.answer import Answer
from router.wording.chat import ChatWording
from router.wording.completion import CompletionWording
from router.wording.usage import Usage
from router.wording.wording import DONE, Envelope, Wording

__all__ = [
    "DONE",
    "Answer",
    "ChatWording",
    "CompletionWording",
    "Envelope",
    "Usage",
    "Wording",
]
