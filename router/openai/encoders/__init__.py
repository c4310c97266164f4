"""Encoders of OpenAI's JSON for chats and completions: of whole responses and of stream chunks."""

from router.openai.choice_result import ChoiceResult
from router.openai.encoders.chat import ChatEncoder
from router.openai.encoders.completion import CompletionEncoder
from router.openai.encoders.encoder import DONE_EVENT, OpenAIEncoder, ResponseMetadata
from router.openai.encoders.usage import Usage

__all__ = [
    "DONE_EVENT",
    "ChatEncoder",
    "ChoiceResult",
    "CompletionEncoder",
    "OpenAIEncoder",
    "ResponseMetadata",
    "Usage",
]
