"""Encoders of answers, as whole responses or as stream chunks. The encoders of OpenAI's chats and
completions are here; the encoders of other APIs are in packages of their own and derive from
:class:`AnswerEncoder`."""

from router.openai.choice_result import ChoiceResult
from router.openai.encoders.answer_encoder import AnswerEncoder
from router.openai.encoders.chat import ChatEncoder
from router.openai.encoders.completion import CompletionEncoder
from router.openai.encoders.encoder import OpenAIEncoder, ResponseMetadata
from router.openai.encoders.usage import Usage

__all__ = [
    "AnswerEncoder",
    "ChatEncoder",
    "ChoiceResult",
    "CompletionEncoder",
    "OpenAIEncoder",
    "ResponseMetadata",
    "Usage",
]
