"""Bodies of requests, as OpenAI defines them, with the extensions that vLLM's clients know.

Strict: a wrong type, a number that is none, and an unknown field are errors. ``null`` means
that a field is absent.
"""

from router.schema.body import wrong
from router.schema.chat import ChatBody
from router.schema.completion import CompletionBody
from router.schema.generation import Generation, StreamOptions
from router.schema.message import Message
from router.schema.tokenize import DetokenizeBody, TokenizeBody

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "Generation",
    "Message",
    "StreamOptions",
    "TokenizeBody",
    "wrong",
]
